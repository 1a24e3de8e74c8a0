"""What communication adds to the computation beside it: limits that follow from the schedule of pieces."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import check_layout, load_config
from shardwise_plan.device_seconds import LinkedRanks, collective, shipped_constants
from shardwise_plan.device_specs import DeviceLink, load_device, parse_cluster
from shardwise_plan.overlap import Product, TensorCollectives, TensorOverlap, ring_seconds
from shardwise_plan.step_time import shardwise_traits, step_time

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


def test_without_overlap_the_whole_collective_is_added() -> None:
    in_turn = _collectives(None)
    whole = collective(in_turn.device, shipped_constants(), EIGHT, SIZE)
    for added in (in_turn.gather_before, in_turn.sum_after, in_turn.sum_behind):
        assert added(_even(1.0)) == pytest.approx(whole)
    assert _collectives(None, sequence_parallel=False).gather_before(_even(1.0)) == 0


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
def test_overlap_never_hides_more_than_there_is(overlap: TensorOverlap, seconds: float, bandwidth: float) -> None:
    both = _collectives(overlap, bandwidth)
    sent = SIZE * 7 / 8 / (bandwidth * shipped_constants().node)
    for added in (both.gather_before, both.sum_after, both.sum_behind):
        exposed = added(_even(seconds))
        assert exposed >= max(0.0, sent - seconds) * (1 - 1e-9)
        assert exposed <= shipped_constants().start + sent * (1 + 16 / 116)


def test_a_product_that_loses_by_its_cuts_pays_for_them() -> None:
    def lossy(pieces: int) -> float:
        return 1.0 if pieces == 1 else 1.1 / pieces

    assert _collectives("pieces").sum_after(lossy) - _collectives("pieces").sum_after(_even(1.0)) == pytest.approx(0.1)
    assert _collectives("user_buffers").gather_before(lossy) == pytest.approx(0, abs=1e-12)


def test_an_operand_that_goes_round_is_hidden_by_the_parts_that_are_there() -> None:
    assert ring_seconds(computed=8.0, sent=7.0, ranks=8) == 0
    assert ring_seconds(computed=8.0, sent=14.0, ranks=8) == pytest.approx(7)
    assert ring_seconds(computed=1.0, sent=1.0, ranks=1) == 0


def test_steps_are_shorter_the_more_is_hidden() -> None:
    keys = ["parallel.tensor=8", "parallel.pipeline=8", "train.global_batch=64", "train.recompute=none"]
    on = parse_cluster("h100:8", 16)

    def tensor(overlap: TensorOverlap | None) -> float:
        config = load_config("gpt3-175b", keys)
        program = replace(shardwise_traits(config, on), tensor_overlap=overlap)
        time = step_time(config, check_layout(config, 128), on, program)
        return time.tensor

    in_turn, pieces, ring, buffers = (tensor(overlap) for overlap in (None, *OVERLAPS))
    assert in_turn > pieces > ring > 2 * buffers > 0


def test_the_recipe_names_the_overlap_and_a_cpu_has_none() -> None:
    config = load_config("llama2-7b", ["parallel.tensor=2", "parallel.tensor_overlap=pieces"])
    assert shardwise_traits(config, parse_cluster("h100:8")).tensor_overlap == "pieces"
    assert shardwise_traits(config, parse_cluster("cpu:2")).tensor_overlap is None


def test_a_graph_starts_the_kernels_without_the_host() -> None:
    config = load_config("gpt2", ["train.global_batch=8", "train.micro_batch=1"])
    on = parse_cluster("h100:8")
    program = shardwise_traits(config, on)
    times = [
        step_time(config, check_layout(config, 8), on, replace(program, graphs=graphs)) for graphs in (True, False)
    ]
    by_graph, by_host = times
    assert by_graph.launch == 0 < by_host.launch
    assert by_graph.total < by_host.total
