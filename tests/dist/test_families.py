"""Every family at several layouts: logits, losses and gradients of transformers' own; dropout and recompute."""

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import Config
from shardwise.distributed import collectives
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import gradient_errors
from tests.dist.cells import DROPOUT
from tests.dist.dense import fill, mesh, run
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import FAMILIES, MODELS, make_config, make_data, sizes
from tests.dist.training import train as train_steps
from tests.sweeps import few

S, B, P = 16, 3, 4
V = 61  # odd: the vocabulary is padded at every degree
SIZES = sizes(V, 32, 48, heads=4, positions=32)
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
LLAMAS, OTHERS = MODELS["llamas"], MODELS["others"]
CASES = {name: SIZES | LLAMA | own for name, own in LLAMAS.items()}
TRAINED_SIZES = sizes(heads=4, spread=0.05)
CASES |= {name: SIZES | own for name, own in OTHERS.items()}
CLASSES = {"olmo2": "Olmo2", "olmo3": "Olmo3", "smollm3": "SmolLM3"}
"""As transformers spells them, where it is not the family's name with a capital."""
Result = tuple[list[Tensor], list[float], dict[str, Tensor]]
"""Logits, sums of losses, and gradients of these sums by name."""
LAYOUTS = {"tp1": (1, False), "tp2": (2, False), "tp2-sp": (2, True), "tp4": (4, False), "tp4-sp": (4, True)}
CUT_OFTEN = ("llama, one key head, tied, biased", "qwen3", "gemma3", "gpt, tied", "neox, serial", "bert")
OFTEN = (*((case, "tp1") for case in CASES), *((case, "tp4-sp") for case in CUT_OFTEN))


def scale_of(case: str) -> float:
    """Of the weights: float32's own error, which grows with them, stays well below what is asked."""
    return 0.2 if case in LLAMAS else 0.1


def configuration(case: str) -> Config:
    train = {"sequence_length": S, "micro_batch": 1, "global_batch": B}
    return make_config(model=CASES[case], train=train)


def batch_of(case: str) -> dict[str, Tensor]:
    """Of BERT sentence pairs of which the first is padded, with another number of predicted tokens each."""
    generator = torch.Generator().manual_seed(0)
    if case != "bert":
        ids = torch.randint(V, (S + 1, B), generator=generator)
        targets = ids[1:].clone()
        targets[-3:, 0] = -100
        return {"ids_SB": ids[:-1], "targets_SB": targets}
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = theirs_of(case)
    weights = fill(build_model(configuration(case), mesh(1).tp, sequence_parallel=False), scale=scale_of(case))
    missing = theirs.load_state_dict({name.replace("embed_out", "lm_head"): t for name, t in weights.items()}, False)
    assert not missing.unexpected_keys
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(missing.missing_keys) <= tied
    theirs.tie_weights()
    theirs.eval()
    batch = batch_of(case)
    if case == "bert":
        logits, losses = bert_losses(theirs, batch)
    else:
        logits = [theirs(batch["ids_SB"].t()).logits.transpose(0, 1)]
        losses = [F.cross_entropy(logits[0].flatten(0, 1), batch["targets_SB"].flatten(), reduction="sum")]
    torch.stack(losses).sum().backward()
    head = "embed_out" if CASES[case]["family"] == "gpt_neox" else "lm_head"
    gradients = {name.replace("lm_head", head): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return [each.detach() for each in logits], [loss.item() for loss in losses], gradients


def theirs_of(case: str) -> Any:
    """A model of transformers, of the same sizes."""
    import transformers

    options = copy.deepcopy(CASES[case])  # Hugging Face writes into rope_scaling
    family = options.pop("family")
    options |= {"attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None}
    if family == "bert":
        return transformers.BertForPreTraining(transformers.BertConfig(**options))
    if family == "gpt":
        options["n_inner"] = options.pop("intermediate_size")
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    if family == "gpt_neox":
        options["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": options.pop("rotary_pct", 0.25),
        }
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**options))
    options = {"sliding_window": None, "pad_token_id": None} | options
    options["use_sliding_window"] = options["sliding_window"] is not None
    options["tie_word_embeddings"] = configuration(case).model.tie_word_embeddings
    name, text = CLASSES.get(family, family.capitalize()), "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def bert_losses(theirs: Any, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    out = theirs(batch["ids_SB"].t(), attention_mask=batch["mask_SB"].t(), token_type_ids=batch["token_types_SB"].t())
    logits, pairs = out.prediction_logits.transpose(0, 1), out.seq_relationship_logits
    rows = logits.gather(0, batch["positions_PB"].unsqueeze(-1).expand(-1, -1, V))
    masked = F.cross_entropy(rows.flatten(0, 1), batch["targets_PB"].flatten(), reduction="sum")
    following = F.cross_entropy(pairs, batch["next_sentence_B"], reduction="sum")
    kept = batch["mask_SB"].bool().unsqueeze(-1)  # what padding positions predict is nobody's
    return [logits * kept, pairs], [masked, following]


def train(case: str, tp: int, sequence: bool) -> Result:
    model: Any = build_model(configuration(case), mesh(tp).tp, sequence_parallel=sequence)
    fill(model, scale=scale_of(case))
    model.eval()
    batch = batch_of(case)
    with torch.no_grad():
        if case == "bert":
            tokens, pairs = model.logits(batch["ids_SB"], batch["token_types_SB"], batch["mask_SB"])
            logits = [tokens * batch["mask_SB"].bool().unsqueeze(-1), pairs]
        else:
            logits = [model.logits(batch["ids_SB"])]
    model.train()
    losses = model(**batch).reshape(-1)
    losses.sum().backward()
    return logits, losses.tolist(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole canonical gradients, summed where the placement says partial."""
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            if piece.partial:
                here = piece.of(parameter.grad)
                here.copy_(collectives.all_reduce_(here.clone(), piece.copies))
    return {name: tensor.clone() for name, tensor in canonical_tensors(model, gradient)}


def gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad


@pytest.mark.parametrize(("case", "layout"), few(itertools.product(CASES, LAYOUTS), *OFTEN))
def test_family_is_hugging_faces(case: str, layout: str, ranks: Any) -> None:
    tp, sequence = LAYOUTS[layout]
    wanted_logits, wanted_losses, wanted = reference(case)
    for rank, (logits, losses, gradients) in enumerate(run(ranks, tp, train, case, tp, sequence)):
        for found_logits, expected in zip(logits, wanted_logits, strict=True):
            assert float(expected.std()) > 0.1, "the reference says nothing about its input"
            difference = float((found_logits - expected).abs().max())
            assert difference <= 1e-5, f"rank {rank}: logits are off by {difference:.1e}"
        for found, loss in zip(losses, wanted_losses, strict=True):
            # Of a token: transformers' loss is the mean, and no objective counts more targets than B · S.
            most = 1e-6 * loss if case in LLAMAS else 1e-5 * max(1, loss / 10)
            assert abs(found - loss) <= most, f"rank {rank}: loss {found!r}, theirs {loss!r}"
        assert set(gradients) == set(wanted)
        errors = gradient_errors(gradients, wanted)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 1e-5, f"rank {rank}: gradient of {worst} is off by {errors[worst]:.1e} of its norm"


def configuration_of(family: str, dropout: str, sequence: bool = True, **train_steps: Any) -> Config:
    model = TRAINED_SIZES | FAMILIES[family] | dict.fromkeys(DROPOUT[family], 0.1)
    parallel = {"tensor": 2, "sequence": sequence}
    return make_config(model=model, parallel=parallel, train={"micro_batch": 2, "dropout_mode": dropout, **train_steps})


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["fast", "invariant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_draws_the_same_masks(family: str, dropout: str, ranks: Any) -> None:
    """To the bit, on TP 2 × DP 2 with sequence parallelism, accumulation and dropout."""
    wanted, *others = (
        ranks(4).run(train_steps, configuration_of(family, dropout, recompute=how), 1)[0]
        for how in ("none", "selective", "full")
    )
    for how, found in zip(("selective", "full"), others, strict=True):
        assert found.losses == wanted.losses, f"{how} recompute changes the losses"
        for name, gradient in wanted.gradients.items():
            assert torch.equal(found.gradients[name], gradient), f"{how} recompute changes the gradient of {name}"


def losses_and_masks(config: Config) -> tuple[list[float], list[bool]]:
    """Losses on this rank, and of the first block's output which elements its last dropout removed."""
    mesh = shared_mesh(config.parallel.tensor)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    removed: list[bool] = []
    layer = trainer.model.layers[0]  # type: ignore[index, union-attr]
    layer.mlp_dropout.register_forward_hook(lambda _module, _args, y: removed.extend((y == 0).flatten().tolist()))
    losses = [trainer.step().loss for _ in range(3)]
    return losses, removed


@pytest.mark.parametrize("sequence", [False, True])
def test_fast_masks_agree_where_activations_are_copies_and_differ_elsewhere(sequence: bool, ranks: Any) -> None:
    everyone = ranks(4).run(losses_and_masks, configuration_of("gpt", "fast", sequence))
    for losses, _ in everyone:
        assert losses == everyone[0][0], "ranks of one job report different losses"
    (_, first), (_, neighbour), (_, other_replica), _ = everyone
    assert len(first) == len(neighbour) > 1000
    agreeing = sum(a == b for a, b in zip(first, neighbour, strict=True)) / len(first)
    if sequence:
        assert abs(agreeing - 0.82) < 0.02, f"masks of other parts of the sequence agree on {agreeing:.0%}, not 82 %"
    else:
        assert agreeing == 1.0, "the residual stream is a copy on both ranks, but its masks differ"
    between = sum(a == b for a, b in zip(first, other_replica, strict=True)) / len(first)
    assert abs(between - 0.82) < 0.02, f"masks of other samples agree on {between:.0%}, not 82 %"
