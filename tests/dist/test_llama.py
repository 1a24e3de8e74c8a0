"""Llama at every layout against transformers' own: logits, loss and the gradient of every tensor."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import comm
from shardwise.checkpoint import canonical
from shardwise.config import LlamaConfig
from shardwise.models import Llama
from shardwise.placement import placements
from shardwise.testing import gradient_errors
from tests.dist.dense import fill, mesh, run

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
VARIANTS: dict[str, dict[str, Any]] = {
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


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (S + 1, B), generator=torch.Generator().manual_seed(0))
    targets = ids[1:].clone()
    targets[-3:, 0] = -100
    return ids[:-1], targets


@functools.cache
def reference(variant: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    """transformers' logits `[S, B, V]`, summed loss, and gradients by name."""
    from transformers import LlamaConfig as HuggingFaceConfig
    from transformers import LlamaForCausalLM

    options = copy.deepcopy(VARIANTS[variant])  # Hugging Face writes into rope_scaling
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = LlamaForCausalLM(HuggingFaceConfig(**SIZES | options, attn_implementation="eager"))
    ours = Llama(LlamaConfig(family="llama", **SIZES | VARIANTS[variant]), seed=1)
    missing = theirs.load_state_dict(fill(ours, scale=SCALE), strict=not options.get("tie_word_embeddings"))
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    ids, targets = batch()
    logits = theirs(ids.t()).logits.transpose(0, 1)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    return logits.detach(), loss.item(), gradients


def train(variant: str, tp: int, sequence: bool) -> tuple[Tensor, float, dict[str, Tensor]]:
    config = LlamaConfig(family="llama", **SIZES | VARIANTS[variant])
    model = Llama(config, mesh(tp).tp, sequence_parallel=sequence, seed=1)
    fill(model, scale=SCALE)
    ids, targets = batch()
    with torch.no_grad():
        logits = model.logits(ids)
    loss = model(ids, targets)
    loss.backward()
    for _, parameter, record in placements(model):
        for piece in record.pieces:
            if piece.partial:
                assert parameter.grad is not None
                summed = comm.all_reduce_(parameter.grad[piece.local.slices].clone(), piece.copies)
                parameter.grad[piece.local.slices] = summed
    return logits, loss.item(), {name: tensor.clone() for name, tensor in canonical(model, gradient)}


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


@pytest.mark.parametrize(("tp", "sequence"), LAYOUTS, ids=["tp1", "tp2", "tp2-sp", "tp4", "tp4-sp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_is_hugging_faces(variant: str, tp: int, sequence: bool, ranks: Any) -> None:
    wanted_logits, wanted_loss, wanted = reference(variant)
    assert float(wanted_logits.std()) > 0.3, "the reference says nothing about its input"
    for rank, (logits, loss, gradients) in enumerate(run(ranks, tp, train, variant, tp, sequence)):
        difference = float((logits - wanted_logits).abs().max())
        assert difference <= 1e-5, f"rank {rank}: logits are off by {difference:.1e}"
        assert abs(loss - wanted_loss) <= 1e-6 * wanted_loss, f"rank {rank}: loss {loss!r}, theirs {wanted_loss!r}"
        assert set(gradients) == set(wanted)
        errors = gradient_errors(gradients, wanted)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 1e-5, f"rank {rank}: gradient of {worst} is off by {errors[worst]:.1e} of its norm"
