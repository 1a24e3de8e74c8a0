"""What communication adds to the computation beside it: limits that follow from the schedule of pieces."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import load_config
from shardwise_plan.device_seconds import LinkedRanks, shipped_constants
from shardwise_plan.device_specs import DeviceLink, load_device, parse_cluster
from shardwise_plan.overlap import Product, TensorCollectives, TensorOverlap
from shardwise_plan.step_time import shardwise_traits

H100 = load_device("h100")
EIGHT = LinkedRanks(8, 8)
SIZE = 1e8
OVERLAPS: tuple[TensorOverlap, ...] = ("pieces", "symmetric_memory", "user_buffers")


def _collectives(
    overlap: TensorOverlap | None, bandwidth: float = H100.node.bandwidth, sequence_parallel: bool = True
) -> TensorCollectives:
    device = replace(H100, node=DeviceLink(bandwidth, 0.0, "switch"))
    return TensorCollectives(device, shipped_constants(), EIGHT, SIZE, SIZE, sequence_parallel, overlap)


def _even(seconds: float) -> Product:
    """A product that loses nothing when it is cut."""
    return lambda pieces: seconds / pieces


def test_behind_a_long_product_the_first_or_last_piece_remains() -> None:
    sent = SIZE * 7 / 8 / (H100.node.bandwidth * shipped_constants().node)
    pieces = _collectives("pieces")
    assert pieces.gather_before(_even(1.0)) == pytest.approx(shipped_constants().start + sent / 4)
    assert pieces.sum_after(_even(1.0)) == pytest.approx(shipped_constants().start + sent / 4)
    assert pieces.sum_behind(_even(1.0)) == 0
    ring = _collectives("symmetric_memory")
    assert ring.gather_before(_even(1.0)) == pytest.approx(0, abs=1e-12)
    assert ring.sum_after(_even(1.0)) == pytest.approx(0, abs=1e-12)
    # The sum's kernels take 16 of 132 processors while they run.
    buffers = _collectives("user_buffers")
    assert buffers.gather_before(_even(1.0)) == pytest.approx(0, abs=1e-12)
    assert buffers.sum_after(_even(1.0)) == pytest.approx(sent / 4 + sent * 16 / 116)


@given(seconds=st.floats(1e-6, 1e-1), bandwidth=st.floats(1e9, 1e12))
@pytest.mark.parametrize("overlap", OVERLAPS)
@settings(deadline=None)
def test_overlap_never_hides_more_than_there_is(overlap: TensorOverlap, seconds: float, bandwidth: float) -> None:
    both = _collectives(overlap, bandwidth)
    sent = SIZE * 7 / 8 / (bandwidth * shipped_constants().node)
    for added in (both.gather_before, both.sum_after, both.sum_behind):
        exposed = added(_even(seconds))
        assert exposed >= max(0.0, sent - seconds) * (1 - 1e-9)
        assert exposed <= shipped_constants().start + sent * (1 + 16 / 116)


def test_the_recipe_names_the_overlap_and_a_cpu_has_none() -> None:
    config = load_config("llama2-7b", ["parallel.tensor=2", "parallel.tensor_overlap=pieces"])
    assert shardwise_traits(config, parse_cluster("h100:8")).tensor_overlap == "pieces"
    assert shardwise_traits(config, parse_cluster("cpu:2")).tensor_overlap is None
