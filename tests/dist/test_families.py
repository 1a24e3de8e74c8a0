"""Every family at several layouts: logits, losses and gradients of transformers' own; dropout and recompute."""

import copy
import functools
import itertools
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import Config, check_layout
from shardwise.config.hugging_face import read_hugging_face
from shardwise.data.samples.causal import DocumentEnds, causal_batch
from shardwise.data.samples.packing import PackedBatches, PackedSamples
from shardwise.distributed import collectives
from shardwise.distributed.placement import placements
from shardwise.estimates.memory import expected_memory
from shardwise.layers.dropout import DropoutKey
from shardwise.models.build import build_model
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import gradient_errors
from tests import hugging_face
from tests.dist.cells import DROPOUT
from tests.dist.dense import fill, mesh, run
from tests.dist.dense import mesh as shared_mesh
from tests.dist.test_memory import DROPOUT as KEYS_OF_DROPOUT
from tests.dist.test_memory import RECOMPUTE, measure_step
from tests.dist.test_memory import SIZES as MEASURED_SIZES
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


END = 3
CAUSAL = ("llama", "gpt", "gpt_neox")
# Step by step, with a mask that drops nothing: as near to none as a probability comes.
NEARLY_NONE: dict[str, dict[str, float]] = {
    "llama": {"attention_dropout": 1e-9},
    "gpt": {"attn_pdrop": 1e-9},
    "gpt_neox": {"attention_dropout": 1e-9},
}


def model_of(config: Config) -> Any:
    return build_model(config, None, sequence_parallel=False, dtype=torch.float32).eval()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "step by step"])
@pytest.mark.parametrize("family", CAUSAL)
def test_a_document_in_a_sample_is_a_document_alone(family: str, fused: bool) -> None:
    sizes = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    own = FAMILIES[family] | no_dropout(family) | ({} if fused else NEARLY_NONE[family])
    config = make_config(model=sizes | {"num_attention_heads": 4, "initializer_range": 0.2} | own)
    model = model_of(config)
    generator = np.random.default_rng(0)
    rows = generator.integers(END + 1, 23, (2, 17))
    ends = ((6, 7), (0, 11, 15))
    for row, places in zip(rows, ends, strict=True):
        row[list(places)] = END
    resets = DocumentEnds(END, reset_position_ids=True, reset_attention_mask=True)
    batch = causal_batch(rows, np.full(2, 16), np.arange(2), resets)
    key = None if fused else DropoutKey(1, 1, torch.arange(2), 0, "invariant")
    inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    together = model(**inputs, dropout=key).item()
    alone = 0.0
    for row, places in zip(rows, ends, strict=True):
        cuts = [0, *(place + 1 for place in places), 16]
        for begin, end in pairwise(cuts):
            if begin < end:
                ids, targets = (
                    torch.from_numpy(part[:, None].copy()) for part in (row[begin:end], row[begin + 1 : end + 1])
                )
                alone += model(ids, targets).item()
    assert together == pytest.approx(alone, rel=1e-6)
    without = {name: inputs[name] for name in ("ids_SB", "targets_SB")}
    assert model(**without).item() != pytest.approx(alone, rel=1e-4), "the documents do not change the loss at all"


def test_the_loss_of_a_packed_sample_is_that_of_transformers(tmp_path: Path) -> None:
    """There, a mask of blocks keeps documents apart, and each has its own positions."""
    theirs = hugging_face.save("llama", tmp_path)
    ours = model_of(make_config(model=read_hugging_face(tmp_path)))
    weights = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for _, parameter, record in placements(ours):
            for piece in record.pieces:
                piece.of(parameter).copy_(weights[piece.name][piece.box.slices])
    lengths = [8, 3, 12, 31, 1, 5]  # two samples of 24, one has padding; one document is longer
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    row = np.random.default_rng(0).integers(0, hugging_face.VOCABULARY, bounds[-1], dtype=np.int32)
    batches = PackedBatches(row, PackedSamples.from_bounds(bounds, 24), seed=1)
    batch = batches.global_batch(0, batches.num_samples)
    inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
    starts_BS = inputs["starts_SB"].T
    keys_S = torch.arange(24)
    sees_BSS = (keys_S <= keys_S[:, None]) & (keys_S >= starts_BS[:, :, None])
    mask_B1SS = torch.where(sees_BSS, 0.0, -torch.inf)[:, None]
    with torch.no_grad():
        logits = theirs(
            inputs["ids_SB"].T, attention_mask=mask_B1SS, position_ids=inputs["positions_SB"].T, use_cache=False
        ).logits
        wanted = cross_entropy(logits.flatten(0, 1), inputs["targets_SB"].T.flatten(), reduction="sum").item()
        loss = ours(**inputs).item()
    assert int(batch.counts[0]) == sum(lengths) - len(lengths)
    assert loss == pytest.approx(wanted, rel=1e-6)


def no_dropout(family: str) -> dict[str, float]:
    return dict.fromkeys(KEYS_OF_DROPOUT[family], 0.0)


@pytest.mark.parametrize("family", few(["llama", "gpt", "gpt_neox"], "llama"))
def test_the_masks_are_in_the_memory_estimate(family: str) -> None:
    for recompute in RECOMPUTE:
        config = make_config(
            model=MEASURED_SIZES | FAMILIES[family] | no_dropout(family),
            train={"recompute": recompute, "sequence_length": 128, "micro_batch": 2, "global_batch": 2},
            data={"reset_position_ids": True, "reset_attention_mask": True, "eod_token": END},
        )
        memory = expected_memory(config, check_layout(config, 1))
        found = measure_step(config)
        off = memory.total / found - 1
        assert abs(off) <= 0.04, f"{recompute}: held {found:,}, cost has {memory.total:,} ({off:+.1%})"
