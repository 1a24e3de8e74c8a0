"""Llama, and the families that differ from it by facts, at every layout against transformers' own.

Logits, loss and the gradient of every tensor.
"""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import Config, check_layout
from shardwise.distributed import collectives
from shardwise.distributed.placement import placements
from shardwise.models.blocks import Stages
from shardwise.models.llama import Llama
from shardwise.pipeline.stages import build_stages, relay
from shardwise.verify.canonical_values import gradient_errors
from tests.dist.dense import fill, mesh, run
from tests.dist.training import make_config

S, B = 16, 3
SCALE = 0.2  # of the weights: float32's own error, which grows with them, stays well below what is asked
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "gqa 4": {"num_key_value_heads": 4},
    "gqa 2": {"num_key_value_heads": 2},
    "gqa 1, tied, biased": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "explicit heads": {"head_dim": 6, "num_key_value_heads": 2},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 5000.0, "num_key_value_heads": 4},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "sliding_window": 5},
    "qwen2, tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {
        "family": "qwen3",
        "head_dim": 6,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3, biased": {"family": "qwen3", "head_dim": 4, "attention_bias": True},
    "olmo2": {"family": "olmo2", "num_hidden_layers": 4},
    "olmo3": {
        "family": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 3,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    },
    "smollm3": {"family": "smollm3", "no_rope_layers": [1, 0]},
    "gemma3": {
        "family": "gemma3",
        "head_dim": 6,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 10,
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_local_base_freq": 100.0,
    },
}
"""All with fewer key/value heads than four ranks."""
VARIANTS = LLAMAS | {name: {"num_key_value_heads": 2} | own for name, own in FAMILIES.items()}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "smollm3": "SmolLM3",
    "gemma3": "Gemma3",
}
"""As transformers spells them."""


def configuration(variant: str, **parallel: Any) -> Config:
    return make_config(
        model={"family": "llama"} | SIZES | VARIANTS[variant],
        parallel=parallel,
        train={"sequence_length": S, "micro_batch": 1, "global_batch": B},
    )


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (S + 1, B), generator=torch.Generator().manual_seed(0))
    targets = ids[1:].clone()
    targets[-3:, 0] = -100
    return ids[:-1], targets


@functools.cache
def reference(variant: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    """transformers' logits `[S, B, V]`, summed loss, and gradients by name."""
    import transformers

    config = configuration(variant).model
    options = SIZES | copy.deepcopy(VARIANTS[variant])  # Hugging Face writes into rope_scaling
    family = CLASSES[options.pop("family", "llama")]
    options |= {"tie_word_embeddings": config.tie_word_embeddings, "attn_implementation": "eager"}
    options = {"sliding_window": None} | options
    options["use_sliding_window"] = options["sliding_window"] is not None
    options |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")(**options)
        theirs = getattr(transformers, f"{family}ForCausalLM")(made)
    ours = Llama(config, seed=1)
    missing = theirs.load_state_dict(fill(ours, scale=SCALE), strict=not config.tie_word_embeddings)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    ids, targets = batch()
    logits = theirs(ids.t()).logits.transpose(0, 1)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return logits.detach(), loss.item(), gradients


def train(variant: str, tp: int, sequence: bool) -> tuple[Tensor, float, dict[str, Tensor]]:
    model = Llama(configuration(variant).model, mesh(tp).tp, sequence_parallel=sequence, seed=1)
    fill(model, scale=SCALE)
    ids, targets = batch()
    with torch.no_grad():
        logits = model.logits(ids)
    loss = model(ids, targets)
    loss.backward()
    return logits, loss.item(), gradients_of(model)


def train_stages(variant: str, tp: int, schedule: str) -> tuple[list[Tensor], list[float], dict[str, Tensor]]:
    """Of each micro-batch, one sequence, on the last stage's ranks; gradients of the stages that a rank has."""
    from shardwise.pipeline.schedule import Pipeline

    config = configuration(variant, pipeline=2, tensor=tp, sequence=tp > 1, schedule=schedule)
    ranks, parallel = mesh(tp, 2), config.parallel
    stages = build_stages(config, check_layout(config, 2 * tp), ranks, dtype=torch.float32)
    assert isinstance(stages, Stages)
    fill(stages, scale=SCALE)
    ids, targets = (each.split(1, dim=1) for each in batch())
    logits, losses = [], []

    def look(model: Any, x: Tensor | None, number: int) -> Any:
        hidden = model.hidden(ids[number], x=x)
        if model.part.is_last:
            logits.append(model.lm_head(hidden))
        return hidden

    def compute(model: Any, x: Tensor | None, number: int) -> Any:
        out = model(ids[number], targets[number], x=x)
        if model.part.is_last:
            losses.append(float(out.detach()))
        return out.reshape(-1) if model.part.is_last else out

    length = S // tp
    relay(stages, parallel, ranks, look, [(length, 1)] * B)
    like = torch.empty(length, 1, SIZES["hidden_size"], device="meta")
    Pipeline(stages, parallel, ranks, B, like, losses=1).step(compute)
    return logits, losses, gradients_of(stages)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            if piece.partial:
                assert parameter.grad is not None
                summed = collectives.all_reduce_(parameter.grad[piece.local.slices].clone(), piece.copies)
                parameter.grad[piece.local.slices] = summed
    return {name: tensor.clone() for name, tensor in canonical_tensors(model, gradient)}


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


LAYOUTS = {"tp1": (1, False), "tp2": (2, False), "tp2-sp": (2, True), "tp4": (4, False), "tp4-sp": (4, True)}
CELLS: list[Any] = [(variant, layout) for variant in LLAMAS for layout in ("tp1", "tp4-sp")]
CELLS += [pytest.param(variant, "tp2", marks=pytest.mark.slow) for variant in LLAMAS]
CELLS += [(variant, layout) for variant in FAMILIES for layout in ("tp1", "tp2-sp", "tp4")]
# Of both norms of queries and keys, in a backward pass that is done in two parts, too.
PIPELINES = [(variant, 1, "1f1b") for variant in FAMILIES] + [("olmo2", 2, "zbv")]


def check(where: str, found: tuple[Tensor, float, dict[str, Tensor]], wanted: tuple[Any, float, Any]) -> None:
    logits, loss, gradients = found
    wanted_logits, wanted_loss, wanted_gradients = wanted
    assert float(wanted_logits.std()) > 0.3, "the reference says nothing about its input"
    difference = float((logits - wanted_logits).abs().max())
    assert difference <= 1e-5, f"{where}: logits are off by {difference:.1e}"
    assert abs(loss - wanted_loss) <= 1e-6 * wanted_loss, f"{where}: loss {loss!r}, theirs {wanted_loss!r}"
    assert set(gradients) == set(wanted_gradients)
    errors = gradient_errors(gradients, wanted_gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, f"{where}: gradient of {worst} is off by {errors[worst]:.1e} of its norm"


@pytest.mark.parametrize(("variant", "layout"), CELLS)
def test_llama_is_hugging_faces(variant: str, layout: str, ranks: Any) -> None:
    tp, sequence = LAYOUTS[layout]
    for rank, found in enumerate(run(ranks, tp, train, variant, tp, sequence)):
        check(f"rank {rank}", found, reference(variant))


@pytest.mark.parametrize(("variant", "tp", "schedule"), PIPELINES)
def test_a_pipeline_is_hugging_faces(variant: str, tp: int, schedule: str, ranks: Any) -> None:
    outcomes = ranks(2 * tp).run(train_stages, variant, tp, schedule)
    gradients = {name: gradient for _, _, here in outcomes for name, gradient in here.items()}
    lasts = [(logits, losses) for logits, losses, _ in outcomes if logits]
    assert len(lasts) == tp
    for logits, losses in lasts:
        check(f"PP 2 × TP {tp}", (torch.cat(logits, dim=1), sum(losses), gradients), reference(variant))
