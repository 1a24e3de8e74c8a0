"""GPT, GPT-NeoX and BERT at every layout against transformers' own: logits, losses and the gradient of every tensor."""

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import BertConfig, GPTConfig, GPTNeoXConfig
from shardwise.distributed import collectives
from shardwise.distributed.placement import placements
from shardwise.models.bert import Bert
from shardwise.models.gpt import GPT
from shardwise.models.gpt_neox import GPTNeoX
from shardwise.verify.canonical_values import gradient_errors
from tests.dist.dense import fill, mesh, run

S, B, P = 16, 3, 4
V = 61  # odd: the vocabulary is padded at every degree
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
SCALE = 0.1  # of the weights: float32's own error, which grows with them, stays well below what is asked
CASES: dict[str, dict[str, Any]] = {
    "gpt tied": {"family": "gpt"},
    "gpt untied": {"family": "gpt", "tie_word_embeddings": False},
    "neox parallel": {"family": "gpt_neox"},
    "neox serial": {"family": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 0.5},
    "neox parallel with dropout": {"family": "gpt_neox", "hidden_dropout": 0.1},  # leaves its two layers one by one
    "neox tied, no attention bias": {"family": "gpt_neox", "tie_word_embeddings": True, "attention_bias": False},
    "neox gelu_fast": {"family": "gpt_neox", "hidden_act": "gelu_fast"},
    "bert": {"family": "bert"},
}
Result = tuple[list[Tensor], list[float], dict[str, Tensor]]
"""Logits, sums of losses, and gradients of these sums by name."""


def make(case: str, tp: int = 1, sequence: bool = False, recompute: Any = "none") -> GPT | GPTNeoX | Bert:
    options = SIZES | CASES[case]
    how: dict[str, Any] = {"sequence_parallel": sequence, "recompute": recompute, "seed": 1}
    group = mesh(tp).tp
    if options["family"] == "gpt":
        return GPT(GPTConfig(**options), group, **how)
    if options["family"] == "gpt_neox":
        return GPTNeoX(GPTNeoXConfig(**options), group, **how)
    return Bert(BertConfig(**options), group, **how)


def causal_batch() -> dict[str, Tensor]:
    ids = torch.randint(V, (S + 1, B), generator=torch.Generator().manual_seed(0))
    targets = ids[1:].clone()
    targets[-3:, 0] = -100
    return {"ids_SB": ids[:-1], "targets_SB": targets}


def pair_batch() -> dict[str, Tensor]:
    """Sentence pairs of which the first is padded, with another number of predicted tokens each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (S, B), generator=generator)  # 0, the padding id, among them as a token
    mask = torch.ones(S, B, dtype=torch.int64)
    mask[-5:, 0] = 0
    ids[-5:, 0] = 0
    targets = torch.randint(V, (P, B), generator=generator)
    targets[1:, 0], targets[3:, 1] = -100, -100
    return {
        "ids_SB": ids,
        "token_types_SB": (torch.arange(S) > 6).long().unsqueeze(1).expand(S, B).contiguous(),
        "mask_SB": mask,
        "positions_PB": torch.stack([torch.randperm(S - 5, generator=generator)[:P] for _ in range(B)], dim=1),
        "targets_PB": targets,
        "next_sentence_B": torch.tensor([0, 1, -100]),
    }


@functools.cache
def reference(case: str) -> Result:
    """What transformers computes."""
    import transformers

    options = {key: value for key, value in (SIZES | CASES[case]).items() if key != "family"}
    plain = {"attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None}
    weights = fill(make(case), scale=SCALE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if CASES[case]["family"] == "bert":
            return _bert_reference(
                transformers.BertForPreTraining(transformers.BertConfig(**options, **plain)), weights
            )
        if CASES[case]["family"] == "gpt":
            options["n_inner"] = options.pop("intermediate_size")
            theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **plain))
        else:
            options["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": options.pop("rotary_pct", 0.25),
            }
            theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**options, **plain))
    _load(theirs, weights)
    batch = causal_batch()
    logits = theirs(batch["ids_SB"].t()).logits.transpose(0, 1)
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets_SB"].flatten(), reduction="sum")
    loss.backward()
    return [logits.detach()], [loss.item()], _gradients(theirs)


def _bert_reference(theirs: Any, weights: dict[str, Tensor]) -> Result:
    _load(theirs, weights)
    batch = pair_batch()
    out = theirs(batch["ids_SB"].t(), attention_mask=batch["mask_SB"].t(), token_type_ids=batch["token_types_SB"].t())
    logits, pairs = out.prediction_logits.transpose(0, 1), out.seq_relationship_logits
    rows = logits.gather(0, batch["positions_PB"].unsqueeze(-1).expand(-1, -1, V))
    masked = F.cross_entropy(rows.flatten(0, 1), batch["targets_PB"].flatten(), reduction="sum")
    following = F.cross_entropy(pairs, batch["next_sentence_B"], reduction="sum")
    (masked + following).backward()
    kept = batch["mask_SB"].bool().unsqueeze(-1)  # what padding positions predict is nobody's
    return [(logits * kept).detach(), pairs.detach()], [masked.item(), following.item()], _gradients(theirs)


def _load(theirs: nn.Module, weights: dict[str, Tensor]) -> None:
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    named = {name.replace("embed_out", "lm_head"): tensor for name, tensor in weights.items()}
    missing = theirs.load_state_dict(named, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= tied
    theirs.tie_weights()
    theirs.eval()


def _gradients(theirs: nn.Module) -> dict[str, Tensor]:
    found = {name.replace("lm_head", "embed_out"): p.grad for name, p in theirs.named_parameters()}
    if "gpt_neox.embed_in.weight" not in found:
        found = {name.replace("embed_out", "lm_head"): gradient for name, gradient in found.items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def train(case: str, tp: int, sequence: bool, recompute: str = "none") -> Result:
    model = make(case, tp, sequence, recompute)
    fill(model, scale=SCALE)
    with torch.no_grad():
        if isinstance(model, Bert):
            batch = pair_batch()
            tokens, pairs = model.logits(batch["ids_SB"], batch["token_types_SB"], batch["mask_SB"])
            logits = [tokens * batch["mask_SB"].bool().unsqueeze(-1), pairs]
        else:
            batch = causal_batch()
            logits = [model.logits(batch["ids_SB"])]
    losses = model(**batch).reshape(-1)
    losses.sum().backward()
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            if piece.partial:
                assert parameter.grad is not None
                here = piece.of(parameter.grad)
                here.copy_(collectives.all_reduce_(here.clone(), piece.copies))
    return logits, losses.tolist(), {name: tensor.clone() for name, tensor in canonical_tensors(model, gradient)}


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


LAYOUTS = [(1, False), (2, False), (4, True)]


@pytest.mark.parametrize(("tp", "sequence"), LAYOUTS, ids=["tp1", "tp2", "tp4-sp"])
@pytest.mark.parametrize("case", CASES)
def test_family_is_hugging_faces(case: str, tp: int, sequence: bool, ranks: Any) -> None:
    wanted_logits, wanted_losses, wanted = reference(case)
    for rank, (logits, losses, gradients) in enumerate(run(ranks, tp, train, case, tp, sequence)):
        for found_logits, expected in zip(logits, wanted_logits, strict=True):
            assert float(expected.std()) > 0.1, "the reference says nothing about its input"
            difference = float((found_logits - expected).abs().max())
            assert difference <= 1e-5, f"rank {rank}: logits are off by {difference:.1e}"
        for found, loss in zip(losses, wanted_losses, strict=True):
            # of a token: transformers' loss is the mean, and no objective counts more targets than B · S
            assert abs(found - loss) <= 1e-5 * max(1, loss / 10), f"rank {rank}: loss {found!r}, theirs {loss!r}"
        assert set(gradients) == set(wanted)
        errors = gradient_errors(gradients, wanted)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 1e-5, f"rank {rank}: gradient of {worst} is off by {errors[worst]:.1e} of its norm"


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("case", ["gpt tied", "neox parallel", "bert"])
def test_recompute_changes_no_bit(case: str, recompute: str, ranks: Any) -> None:
    for (_, wanted, gradients), (_, losses, found) in zip(
        run(ranks, 2, train, case, 2, True), run(ranks, 2, train, case, 2, True, recompute), strict=True
    ):
        assert losses == wanted
        for name, tensor in gradients.items():
            assert torch.equal(found[name], tensor), f"the gradient of {name} is another with {recompute} recompute"
