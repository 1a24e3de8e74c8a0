"""Orders of work against those of torch's schedules, and what is read from them against closed forms."""

from functools import cache
from typing import Any

import pytest
import torch

from shardwise.config import ParallelConfig, Schedule
from shardwise.config.layout_rules import fits_schedule
from shardwise.config.pipeline_schedule_specs import SCHEDULES, rounds_of_step
from shardwise.pipeline.action_order import Action, action_order
from shardwise.pipeline.partition import pipeline_rank_of
from shardwise.pipeline.timeline import simulate

CLASSES: dict[Schedule, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}
MICRO_BATCHES = range(1, 13)


def class_of(schedule: Schedule) -> Any:
    from torch.distributed.pipelining import schedules  # here, as it imports torch's compiler, which is slow

    return getattr(schedules, CLASSES[schedule])


def shapes() -> list[ParallelConfig]:
    """Every schedule on 2 to 4 ranks, with 2 and 3 stages on each where it can have them."""
    found = []
    for schedule in CLASSES:
        for degree in (2, 3, 4):
            for virtual in (2, 3) if schedule.startswith("interleaved") else (None,):
                found.append(ParallelConfig(pipeline=degree, schedule=schedule, virtual_stages=virtual))
    return found


def name(parallel: ParallelConfig) -> str:
    return f"{parallel.schedule}-{parallel.pipeline}x{parallel.stages_per_rank}"


class Stub:
    """As much of a stage as a schedule asks for when it is made."""

    def __init__(self, index: int, rank: int, parallel: ParallelConfig) -> None:
        self.stage_index, self.group_rank, self.group_size = index, rank, parallel.pipeline
        self.num_stages = parallel.pipeline * parallel.stages_per_rank
        self.stage_index_to_group_rank = {i: pipeline_rank_of(parallel, i) for i in range(self.num_stages)}
        self.is_first, self.is_last = index == 0, index == self.num_stages - 1
        self.submod, self.has_backward, self.group = torch.nn.Identity(), True, None


@cache
def torch_schedule(parallel: ParallelConfig, micro_batches: int) -> Any:
    """As the first rank makes it; it knows the work of all."""
    stages = range(parallel.pipeline * parallel.stages_per_rank)
    stubs = [Stub(i, 0, parallel) for i in stages if pipeline_rank_of(parallel, i) == 0]
    single = SCHEDULES[parallel.schedule].is_single_stage
    return class_of(parallel.schedule)(stubs[0] if single else stubs, micro_batches, loss_fn=len, scale_grads=False)


class Recorder(Stub):
    """Notes what a schedule of one stage does with it. What torch draws is another order on 1F1B's last rank."""

    def __init__(self, index: int, rank: int, parallel: ParallelConfig) -> None:
        super().__init__(index, rank, parallel)
        self.has_backward, self.order = False, list[Action]()

    def forward_one_chunk(self, number: int, *_arguments: object, **_options: object) -> None:
        self.order.append(Action("forward", self.stage_index, number))

    def backward_one_chunk(self, number: int, *_arguments: object, **_options: object) -> None:
        self.order.append(Action("backward", self.stage_index, number))

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: []  # nothing to send or to receive


def single_stage_order(parallel: ParallelConfig, micro_batches: int, rank: int) -> tuple[Action, ...]:
    stage = Recorder(rank, rank, parallel)
    schedule = class_of(parallel.schedule)(stage, micro_batches, scale_grads=False)
    schedule._initialize_stage = lambda *_arguments: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return tuple(stage.order)


def torch_order(parallel: ParallelConfig, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """What torch's schedule has a rank compute."""
    if SCHEDULES[parallel.schedule].is_single_stage:
        return single_stage_order(parallel, micro_batches, rank)
    listed = torch_schedule(parallel, micro_batches).pipeline_order[rank]
    actions = [part for action in listed if action for part in action.sub_actions or (action,)]
    return tuple(
        Action(KINDS[one.computation_type.name], one.stage_index, one.microbatch_index)  # type: ignore[arg-type]
        for one in actions
        if one.computation_type.name in KINDS
    )


@pytest.mark.parametrize("parallel", shapes(), ids=name)
def test_orders_and_passes_in_flight_are_torchs(parallel: ParallelConfig) -> None:
    for micro_batches in MICRO_BATCHES:
        if fits_schedule(parallel, micro_batches):
            for rank in range(parallel.pipeline):
                assert action_order(parallel, micro_batches, rank) == torch_order(parallel, micro_batches, rank)
    # A schedule is refused when it is made; one that is made comes to an end, which the simulation asserts.
    for micro_batches in MICRO_BATCHES:
        try:
            torch_schedule(parallel, micro_batches)
            takes = True
        except ValueError:
            takes = False
        assert fits_schedule(parallel, micro_batches) == takes, micro_batches
        if takes:
            assert 0 <= simulate(parallel, micro_batches).bubble < 1
    p, v = parallel.pipeline, parallel.stages_per_rank
    for m in MICRO_BATCHES:
        if not fits_schedule(parallel, m):
            continue
        each = m // rounds_of_step(p, m)
        for r in range(p):
            expected = {
                "gpipe": m,
                "1f1b": p - r,
                "interleaved": (v - 1) * each + 2 * (p - 1 - r) + 1,
                "interleaved_zero_bubble": (v - 1) * each + p,
                "zbv": 2 * p,
                "dualpipev": 2 * p + 1,
            }[parallel.schedule]
            found = in_flight(action_order(parallel, m, r))
            # ZB-V of fewer than 2p-1 micro-batches is that of 2p-1, without those that are not there.
            assert found == min(expected, v * m) or (parallel.schedule == "zbv" and m < 2 * p - 1 and found < expected)


def in_flight(order: tuple[Action, ...]) -> int:
    """The most passes whose activations a rank holds, from the forward pass to the weights' gradients."""
    most = now = 0
    for work in order:
        now += {"forward": 1, "input": 0, "backward": -1, "weight": -1}[work.kind]
        most = max(most, now)
    return most
