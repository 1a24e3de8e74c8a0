"""Bytes on the wire of one rank, against sums made by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config import Config, Layout
from shardwise.distributed.mesh import Group
from shardwise.estimates.communication import Transfer, evaluation_transfers, step_transfers, wire_bytes
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.sharding import bucket_shapes
from shardwise.models.build import build_model
from shardwise.models.parameter_counts import local_parameter_count
from shardwise.optim.freed_buckets import make_buckets, places_in
from shardwise.optim.sharding import OptimizerDtypes, Sharding
from shardwise.train.build import _decay_groups
from tests.unit.estimates.families import MODELS, make_config, section

S, B, H, F, V, L, HEADS, KV_HEADS = 16, 2, 32, 48, 50, 3, 4, 2
HIDDEN = 4 * S * B * H
"""Bytes of one micro-batch's hidden states in float32."""
STATS = 4 * S * B * 3
"""Bytes that the loss exchanges for one micro-batch."""
SAMPLES = 8 * (2 * S * B + 1)
"""Bytes of one micro-batch's token ids, targets and how many of these count."""
NORMS = 2 * 4
"""Bytes of the squared norms of gradients and parameters, that all ranks agree on."""
LOSS_AND_COUNT = 4 + 8
"""Bytes of the loss and of the number of counted targets, summed over data parallelism."""


def config(*, zero: int = 1, mode: str = "float32", bucket_mib: float = 25.0, **model: Any) -> Config:
    """A Llama with shared key/value heads."""
    return make_config(
        section("llama", num_key_value_heads=KV_HEADS, **model),
        optimizer={"zero": zero, "bucket_mib": bucket_mib},
        precision={"mode": mode},
    )


def sent(config: Config, layout: Layout) -> dict[tuple[str, str], float]:
    return wire_bytes(step_transfers(config, layout))


def by_tensor(config: Config, layout: Layout) -> dict[str, float]:
    """Wire bytes of a step over tensor parallelism, by what is sent."""
    transfers = step_transfers(config, layout)
    return {one.tensor: one.wire_bytes for one in transfers if one.axis == "tp"}


def bucket_elements() -> int:
    """Counted without the code under test: buckets of matrices and of norms, multiples of 32 for each of 4 slices."""
    kv = KV_HEADS * H // HEADS
    matrices = 2 * V * H + L * (H * (H + 2 * kv) + H * H + 3 * H * F)
    return sum(-(-elements // 128) * 128 for elements in (matrices, (2 * L + 1) * H))


def test_tensor_parallelism_berts_heads_zero_and_shared_heads() -> None:
    """One process is silent. Any other layout is measured on ranks by tests/dist/test_cells.py."""
    n = 4  # micro-batches
    whole = n * HIDDEN * (1 + 2 * L + 1 + 2 * L) + n * STATS  # embedding, blocks, head's dx, blocks backward
    assert wire_bytes(step_transfers(config(), Layout(1))) == {}
    assert wire_bytes(step_transfers(config(), Layout(2, tensor=2))) == {
        ("tp", "broadcast"): n * SAMPLES / 2,
        ("tp", "all_reduce"): 2 * whole / 2,
        ("world", "all_reduce"): 2 * NORMS / 2,
    }
    n, predicted = 4, 5 * B
    found = by_tensor(make_config(section("bert"), data={"max_predictions": 5}), SEQUENCE)
    assert found["largest logit of each token"] == n * 4 * predicted
    assert found["inputs of the decoder and of the classifier"] == n * 4 * (predicted + B) * H / 2
    assert found["gradient of the decoder's input"] == n * 4 * predicted * H
    assert found["input of the head"] == found["gradient of the head's input"] == n * HIDDEN / 2
    evaluated = evaluation_transfers(make_config(section("bert"), data={"max_predictions": 5}), SEQUENCE)
    assert "gradient of the decoder's input" not in {one.tensor for one in evaluated}
    for kv_heads, axis in [(2, "tp/2"), (1, "tp")]:
        chosen = section("llama", num_key_value_heads=kv_heads)
        transfers = step_transfers(make_config(chosen), Layout(4, tensor=4))
        gradient = 4 * L * 2 * (H // HEADS) * H
        assert [one for one in transfers if one.tensor == "partial gradients"] == [
            Transfer(axis, "all_reduce", 4 // kv_heads, gradient, 1, "partial gradients")
        ]
    for mode, gradient, parameter in [("float32", 4, 4), ("mixed", 4, 2), ("bfloat16", 2, 2)]:
        elements = bucket_elements()
        assert wire_bytes(step_transfers(config(mode=mode), Layout(4))) == {
            ("dp", "reduce_scatter"): gradient * elements * 3 / 4,
            ("dp", "all_gather"): parameter * elements * 3 / 4,
            ("dp", "all_reduce"): 2 * LOSS_AND_COUNT * 3 / 4,
            # With stochastic rounding, norms are sums in float64.
            ("world", "all_reduce"): 2 * (2 if mode == "bfloat16" else 1) * NORMS * 3 / 4,
        }


@pytest.mark.parametrize(("name", "bucket_mib", "zero"), [*((name, 0.01, 1) for name in MODELS), ("gpt", None, 0)])
def test_buckets_are_those_of_the_optimizer(name: str, bucket_mib: float | None, zero: int) -> None:
    chosen = make_config(section(name), optimizer={"zero": zero, "bucket_mib": bucket_mib}, precision={"mode": "mixed"})
    model: nn.Module = build_model(chosen, Group(), sequence_parallel=False, dtype=torch.bfloat16)
    sharding = Sharding(zero, bucket_mib=bucket_mib)
    made = [
        bucket.numel
        for group in _decay_groups(model.parameters(), 0.1)
        for bucket in make_buckets(
            group["params"],  # type: ignore[arg-type]
            sharding,
            sharding.cut(Group()),
            OptimizerDtypes(torch.float32, torch.float32, torch.float32),
            places_in(model),
        )
    ]
    case = RankWorkload.of(chosen, Layout(1), False)
    assert [bucket.elements for bucket in bucket_shapes(case)] == made


OUTPUTS, INPUTS = "outputs of attention and MLP", "inputs of attention and MLP"
SEQUENCE = Layout(2, tensor=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "p", "left"), [("llama", 0.1, 1), ("gpt", 0.0, 1), ("gpt", 0.1, 2), ("gpt_neox", 0.0, 0), ("bert", 0.0, 2)]
)
def test_full_recompute_repeats_what_comes_before_the_last_saved_tensor(name: str, p: float, left: int) -> None:
    """The sum behind the last matrix product only where dropout or a norm follows it."""
    found = by_tensor(make_config(section(name, p), train={"recompute": "full"}), SEQUENCE)
    plain = by_tensor(make_config(section(name, p)), SEQUENCE)
    again = {what: amount for what, amount in found.items() if what not in plain}
    expected = {f"{INPUTS}, recomputed": 2, f"{OUTPUTS}, recomputed": left}
    assert again == {what: 4 * times * L * HIDDEN / 2 for what, times in expected.items() if times}
    assert {what: amount for what, amount in found.items() if what in plain} == plain


@pytest.mark.parametrize(
    ("layout", "zero", "axis"),
    [(Layout(4, tensor=2), 1, "world"), (Layout(2), 0, "dp"), (Layout(8, tensor=2, pipeline=2), 1, "world/4")],
)
def test_muon_sends_each_matrix_to_its_owner_and_the_update_back(layout: Layout, zero: int, axis: str) -> None:
    """The blocks' matrices in float32: each rank has its part of a stage's, and without ZeRO-1 gets all that it holds.

    Buckets begin at multiples of 32 elements, of which these are.
    """
    model = section("llama") | {"num_hidden_layers": 4}
    parallel = {"pipeline": layout.pipeline}
    chosen = make_config(model, optimizer={"name": "muon", "zero": zero}, parallel=parallel)
    muon = sent(chosen, layout)
    matrices = local_parameter_count(chosen.model, layout.tensor, block_matrices=True)
    stage = 4 * matrices // layout.pipeline
    ranks = layout.tensor * layout.data
    back = stage if zero == 0 else stage / layout.data
    assert muon[axis, "all_to_all"] == pytest.approx((stage / layout.data + back) * (ranks - 1) / ranks)
