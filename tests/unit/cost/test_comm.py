"""Bytes on the wire of one rank, against sums made by hand."""

import pytest
import torch

from shardwise.comm import Group
from shardwise.config import Config, Layout, config_from
from shardwise.cost import Transfer, bytes_per_evaluation_batch, bytes_per_step, step_transfers
from shardwise.cost.buckets import bucket_shapes, padded_elements
from shardwise.models import Llama
from shardwise.optim.buckets import Dtypes, make_buckets
from shardwise.train.build import decay_groups

S, B, H, F, V, L, HEADS, KV_HEADS = 16, 2, 32, 48, 50, 3, 4, 2
HIDDEN = 4 * S * B * H
"""Bytes of one micro-batch's hidden states in float32."""
STATS = 4 * S * B * 3
"""Bytes that the loss exchanges for one micro-batch."""
NORMS = 2 * 4
"""Bytes of the squared norms of gradients and parameters, that all ranks agree on."""
LOSS_AND_COUNT = 4 + 8
"""Bytes of the loss and of the number of counted targets, summed over data parallelism."""


def config(*, zero: int = 1, mode: str = "float32", bucket_mib: float = 25.0, **model: object) -> Config:
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
            "optimizer": {"lr": 1e-3, "zero": zero, "bucket_mib": bucket_mib},
            "precision": {"mode": mode},
        }
    )


def bucket_elements(t: int, slices: int) -> int:
    """Counted without the code under test: one bucket of matrices and one of norms, all of them multiples of 32."""
    q, kv = H // t, max(KV_HEADS // t, 1) * H // HEADS
    matrices = 2 * -(-V // t) * H + L * (H * (q + 2 * kv) + q * H + 3 * H * F // t)
    return sum(-(-elements // (32 * slices)) * 32 * slices for elements in (matrices, (2 * L + 1) * H))


def test_one_process_is_silent() -> None:
    assert bytes_per_step(config(), Layout(1)) == {}


def test_tensor_parallelism() -> None:
    n = 4  # micro-batches
    whole = n * HIDDEN * (1 + 2 * L + 1 + 2 * L) + n * STATS  # embedding, blocks, head's dx, blocks backward
    assert bytes_per_step(config(), Layout(2, tensor=2)) == {
        ("tp", "all_reduce"): 2 * whole / 2,
        ("world", "all_reduce"): 2 * NORMS / 2,
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
        ("world", "all_reduce"): 2 * NORMS / 2,
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
    transfers = step_transfers(config(num_key_value_heads=kv_heads), Layout(4, tensor=4))
    gradient = 4 * L * 2 * (H // HEADS) * H
    assert [one for one in transfers if one.what == "partial gradients"] == [
        Transfer(axis, "all_reduce", 4 // kv_heads, gradient, 1, "partial gradients")
    ]


@pytest.mark.parametrize("bucket_mib", [25.0, 0.01])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_slices_partial_gradients_add_up(sequence: bool, bucket_mib: float) -> None:
    chosen = config(attention_bias=True, bucket_mib=bucket_mib)
    expected = {"tp/2": 4 * L * 2 * (H // HEADS) * (H + 1)} | ({"tp": 4 * (3 * L + 1) * H} if sequence else {})
    found = dict.fromkeys(expected, 0)
    for rank in range(4):
        for one in step_transfers(chosen, Layout(16, tensor=4, sequence=sequence), data_rank=rank):
            if one.what == "partial gradients":
                found[one.axis] += one.bytes
    assert found == expected


@pytest.mark.parametrize(("mode", "gradient", "parameter"), [("float32", 4, 4), ("mixed", 4, 2), ("bfloat16", 2, 2)])
def test_zero_scatters_gradients_and_gathers_parameters(mode: str, gradient: int, parameter: int) -> None:
    elements = bucket_elements(1, 4)
    assert bytes_per_step(config(mode=mode), Layout(4)) == {
        ("dp", "reduce_scatter"): gradient * elements * 3 / 4,
        ("dp", "all_gather"): parameter * elements * 3 / 4,
        ("dp", "all_reduce"): 2 * LOSS_AND_COUNT * 3 / 4,
        ("world", "all_reduce"): 2 * NORMS * 3 / 4,
    }


def test_without_zero_one_all_reduce() -> None:
    found = bytes_per_step(config(zero=0), Layout(2))
    assert found["dp", "all_reduce"] == 2 * (4 * bucket_elements(1, 1) + LOSS_AND_COUNT) / 2
    assert ("dp", "all_gather") not in found


def test_data_parallelism_reduces_the_padded_local_parameters() -> None:
    found = bytes_per_step(config(), Layout(8, tensor=4))
    assert found["dp", "reduce_scatter"] == 4 * bucket_elements(4, 2) / 2


@pytest.mark.parametrize(("bucket_mib", "zero"), [(25.0, 1), (0.01, 1), (0.01, 0)])
@pytest.mark.parametrize("tied", [False, True])
def test_buckets_are_those_of_the_optimizer(bucket_mib: float, zero: int, tied: bool) -> None:
    chosen = config(mode="mixed", zero=zero, bucket_mib=bucket_mib, attention_bias=True, tie_word_embeddings=tied)
    model = Llama(chosen.model, seed=1, dtype=torch.bfloat16)
    made = [
        bucket.numel
        for group in decay_groups(model.parameters(), 0.1)
        for bucket in make_buckets(
            group["params"],
            Group(),
            bucket_mib * 2**20,
            shard=bool(zero),
            dtypes=Dtypes(torch.float32, torch.float32, torch.float32),
        )
    ]
    assert [bucket.elements for bucket in bucket_shapes(chosen, Layout(1))] == made
    assert padded_elements(chosen, Layout(1)) == sum(made)


def test_evaluation_goes_forward_only() -> None:
    layout = Layout(2, tensor=2, sequence=True)
    assert bytes_per_evaluation_batch(config(), layout) == {
        ("tp", "all_gather"): 4 * HIDDEN * (2 * L + 1) / 2,
        ("tp", "reduce_scatter"): 4 * HIDDEN * (2 * L + 1) / 2,
        ("tp", "all_reduce"): 2 * 4 * STATS / 2,
    }
