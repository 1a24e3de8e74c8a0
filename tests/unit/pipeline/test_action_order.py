"""Orders of work against those of torch's schedules, and what is read from them against closed forms."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from shardwise.config import Config, ParallelConfig, Schedule, check_layout, load_config
from shardwise.config.layout_rules import fits_schedule
from shardwise.config.pipeline_schedule_specs import SCHEDULES, rounds_of_step
from shardwise.pipeline.action_order import Action, action_order
from shardwise.pipeline.partition import balanced, compute_shares, pipeline_rank_of, stage_plan
from shardwise.pipeline.timeline import Timeline, bubble, simulate

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


ALL: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")


def simulated(micro_batches: int, **parallel: Any) -> tuple[ParallelConfig, Timeline]:
    config = ParallelConfig(**parallel)
    return config, simulate(config, micro_batches)


def cases(schedule: Schedule, virtual: tuple[int | None, ...] = (None,)) -> list[tuple[int, int | None, int]]:
    return [
        (p, v, m)
        for p, v, m in itertools.product((2, 3, 4), virtual, MICRO_BATCHES)
        if fits_schedule(ParallelConfig(pipeline=p, schedule=schedule, virtual_stages=v), m)
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_one_stage_on_each_rank_is_the_formula(schedule: Schedule) -> None:
    for p, _, m in cases(schedule):
        config, found = simulated(m, pipeline=p, schedule=schedule)
        assert found.bubble == pytest.approx(bubble(config, m)), f"p {p}, m {m}"
        assert found.makespan == 3 * (m + p - 1)
        assert {found.busy(rank) for rank in range(p)} == {3 * m}


def test_the_interleaved_bubble_is_the_formula() -> None:
    """Where a round has p micro-batches or more; there is none for fewer, whose bubble is longer."""
    for p, v, m in cases("interleaved", (2, 3)):
        config, found = simulated(m, pipeline=p, schedule="interleaved", virtual_stages=v)
        assert bubble(config, m) == (pytest.approx(found.bubble) if m >= p else None), f"p {p}, v {v}, m {m}"
        assert m >= p or found.bubble > (p - 1) / (config.stages_per_rank * m + p - 1)


@pytest.mark.parametrize("schedule", ALL)
def test_everything_is_done_once_and_in_order(schedule: Schedule) -> None:
    for p, _, m in cases(schedule):
        config, found = simulated(m, pipeline=p, schedule=schedule)
        stages = p * config.stages_per_rank
        timed = {(one.action.kind, one.action.stage, one.action.micro_batch): one for row in found.ranks for one in row}
        assert len(timed) == sum(map(len, found.ranks)), "something is done twice"
        for stage, micro_batch in itertools.product(range(stages), range(m)):
            forward = timed["forward", stage, micro_batch]
            backward = timed.get(("backward", stage, micro_batch)) or timed["input", stage, micro_batch]
            assert forward.end <= backward.start
            assert backward.action.kind == "backward" or timed["weight", stage, micro_batch].start >= backward.end
            if stage:
                assert timed["forward", stage - 1, micro_batch].end <= forward.start
        for row in found.ranks:
            assert all(one.end <= other.start for one, other in itertools.pairwise(row)), "a rank does two things"
        assert 0 <= found.bubble < 1


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_weight_gradients_fill_gaps(schedule: Schedule) -> None:
    """Beside a second stage on each rank: from 2p micro-batches on, (p-1) / (6m+p-1) is left."""
    for p, _, m in cases(schedule):
        _, found = simulated(m, pipeline=p, schedule=schedule)
        _, plain = simulated(m, pipeline=p, schedule="1f1b")
        if m >= p:
            assert found.bubble < plain.bubble or (schedule, m) == ("zbv", p), f"p {p}, m {m}"
        if m >= 2 * p:
            assert found.bubble == pytest.approx((p - 1) / (6 * m + p - 1)), f"p {p}, m {m}"


def sizes(config: Config) -> list[int]:
    layout = check_layout(config, config.parallel.tensor * config.parallel.pipeline)
    return [len(stage.layers) for stage in stage_plan(config, layout)]


def tiny(*overrides: str) -> Config:
    return load_config("gpt-tiny", ["train.micro_batch=1", *(f"parallel.{one}" for one in overrides)])


@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 1.7, 3.2, 40.0])
@pytest.mark.parametrize(("layers", "stages"), [(8, 1), (8, 2), (7, 3), (12, 4), (9, 5), (5, 5)])
def test_no_other_cut_has_a_cheaper_dearest_stage(layers: int, stages: int, head: float) -> None:
    def dearest(cut: list[int]) -> float:
        return max(cut[-1] + head, *cut[:-1], 0)

    cuts = [
        [stop - start for start, stop in itertools.pairwise((0, *inner, layers))]
        for inner in itertools.combinations(range(1, layers), stages - 1)
    ]
    found = list(balanced(layers, stages, head))
    assert found in cuts
    assert dearest(found) == min(map(dearest, cuts))
    assert found[:-1] == sorted(found[:-1]), "an earlier stage holds more micro-batches: it has not more blocks"


def test_the_plan_of_stages() -> None:
    wide = load_config("gpt-tiny", ["train.micro_batch=1", "parallel.pipeline=2", "model.vocab_size=4096"])
    shares = compute_shares(wide, check_layout(wide, 2))
    assert sizes(wide) == [6, 2]
    assert shares[1] > shares[0]
    assert sizes(tiny("pipeline=2")) == [4, 4]
    for recipe in ("gpt3-23b", "gpt-neox-20b-pp4"):
        config = load_config(recipe)
        shares = compute_shares(config, check_layout(config, 128))
        assert sum(shares) == pytest.approx(1.0)
        assert shares[0] == shares[1] < shares[-1]
    whole = load_config("gpt-tiny")
    assert compute_shares(whole, check_layout(whole, 1)) == (1.0,)
    config = tiny("pipeline=2", "schedule=interleaved", "virtual_stages=4")
    plan = stage_plan(config, check_layout(config, 2))
    assert [list(stage.layers) for stage in plan] == [[block] for block in range(8)]
    assert [stage.index for stage in plan] == list(range(8))
    assert [stage.is_first for stage in plan] == [True] + [False] * 7
    assert [stage.is_last for stage in plan] == [False] * 7 + [True]
    assert sizes(tiny("pipeline=3", "stages=[2,4,2]")) == [2, 4, 2]
    assert sizes(tiny("pipeline=2", "schedule=zbv", "stages=[1,2,3,2]")) == [1, 2, 3, 2]
    for schedule, ranks in [("1f1b", [0, 1, 2]), ("interleaved", [0, 1, 2, 0, 1, 2]), ("zbv", [0, 1, 2, 2, 1, 0])]:
        parallel = ParallelConfig.model_validate({"pipeline": 3, "schedule": schedule})
        assert [pipeline_rank_of(parallel, stage) for stage in range(len(ranks))] == ranks
