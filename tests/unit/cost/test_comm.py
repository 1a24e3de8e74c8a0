"""Bytes on the wire of one rank, against sums made by hand."""

import pytest

from shardwise.config import Config, Layout, config_from
from shardwise.cost import Transfer, bytes_per_evaluation_batch, bytes_per_step, step_transfers
from shardwise.cost.comm import STEP_SCALARS

S, B, H, F, V, L, HEADS, KV_HEADS = 16, 2, 32, 48, 50, 3, 4, 2
HIDDEN = 4 * S * B * H
"""Bytes of one micro-batch's hidden states in float32."""
STATS = 4 * S * B * 3
"""Bytes that the loss exchanges for one micro-batch."""


def config(*, zero: int = 1, mode: str = "float32", **model: object) -> Config:
    sizes = {
        "family": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    return config_from(
        {
            "model": sizes | model,
            "train": {"steps": 1, "global_batch": 8, "micro_batch": B, "sequence_length": S},
            "optimizer": {"lr": 1e-3, "zero": zero},
            "precision": {"mode": mode},
        }
    )


def local_elements(t: int) -> int:
    """Counted without the code under test."""
    q, kv = H // t, max(KV_HEADS // t, 1) * H // HEADS
    return 2 * -(-V // t) * H + L * (H * (q + 2 * kv) + q * H + 3 * H * F // t) + (2 * L + 1) * H


def test_one_process_is_silent() -> None:
    assert bytes_per_step(config(), Layout(1)) == {}


def test_tensor_parallelism() -> None:
    n = 4  # micro-batches
    whole = n * HIDDEN * (1 + 2 * L + 1 + 2 * L) + n * STATS  # embedding, blocks, head's dx, blocks backward
    scalars = 8 * STEP_SCALARS
    assert bytes_per_step(config(), Layout(2, tensor=2)) == {
        ("tp", "all_reduce"): 2 * whole / 2,
        ("world", "all_reduce"): 2 * scalars / 2,
    }


def test_sequence_parallelism() -> None:
    n = 4
    gathered = n * HIDDEN * (2 * L + 1 + 2 * L + 1)  # inputs, head, outputs' gradients, embedding's gradient
    scattered = n * HIDDEN * (1 + 2 * L + 1 + 2 * L)  # embedding, outputs, head's gradient, inputs' gradients
    norms = 4 * (2 * L + 1) * H
    assert bytes_per_step(config(), Layout(2, tensor=2, sequence=True)) == {
        ("tp", "all_gather"): gathered / 2,
        ("tp", "reduce_scatter"): scattered / 2,
        ("tp", "all_reduce"): 2 * (n * STATS + norms) / 2,
        ("world", "all_reduce"): 2 * 8 * STEP_SCALARS / 2,
    }


def test_row_biases_are_partial_under_sequence_parallelism_only() -> None:
    layout = Layout(2, tensor=2, sequence=True)
    biased = config(attention_bias=True, mlp_bias=True)
    key = ("tp", "all_reduce")
    assert bytes_per_step(biased, layout)[key] - bytes_per_step(config(), layout)[key] == 4 * 2 * L * H
    plain = Layout(2, tensor=2)
    assert bytes_per_step(biased, plain)[key] == bytes_per_step(config(), plain)[key]


@pytest.mark.parametrize(("kv_heads", "axis"), [(2, "tp/2"), (1, "tp")])
def test_shared_key_value_heads_are_summed_over_the_ranks_that_hold_them(kv_heads: int, axis: str) -> None:
    model = config(num_key_value_heads=kv_heads)
    copies = 4 // kv_heads
    shared = [one for one in step_transfers(model, Layout(4, tensor=4)) if one.what.endswith("key/value heads")]
    gradient = 4 * L * 2 * (H // HEADS) * H
    assert shared == [Transfer(axis, "all_reduce", copies, gradient, 1, shared[0].what)]


@pytest.mark.parametrize(("mode", "gradient", "parameter"), [("float32", 4, 4), ("mixed", 4, 2), ("bfloat16", 2, 2)])
def test_zero_scatters_gradients_and_gathers_parameters(mode: str, gradient: int, parameter: int) -> None:
    elements = local_elements(1)
    assert elements % 4 == 0
    counts = 8
    assert bytes_per_step(config(mode=mode), Layout(4)) == {
        ("dp", "reduce_scatter"): gradient * elements * 3 / 4,
        ("dp", "all_gather"): parameter * elements * 3 / 4,
        ("dp", "all_reduce"): 2 * counts * 3 / 4,
        ("world", "all_reduce"): 2 * 8 * STEP_SCALARS * 3 / 4,
    }


def test_without_zero_one_all_reduce() -> None:
    found = bytes_per_step(config(zero=0), Layout(2))
    assert found["dp", "all_reduce"] == 2 * (4 * local_elements(1) + 8) / 2
    assert ("dp", "all_gather") not in found


def test_data_parallelism_reduces_the_padded_local_parameters() -> None:
    found = bytes_per_step(config(), Layout(8, tensor=4))
    assert found["dp", "reduce_scatter"] == 4 * local_elements(4) / 2


def test_evaluation_goes_forward_only() -> None:
    layout = Layout(2, tensor=2, sequence=True)
    assert bytes_per_evaluation_batch(config(), layout) == {
        ("tp", "all_gather"): 4 * HIDDEN * (2 * L + 1) / 2,
        ("tp", "reduce_scatter"): 4 * HIDDEN * (2 * L + 1) / 2,
        ("tp", "all_reduce"): 2 * 4 * STATS / 2,
    }
