"""A simulation by levels against the actions in the order of the schedule, one after the other."""

import random
from collections import defaultdict

import pytest

from shardwise.config import ParallelConfig, Recompute, Schedule
from shardwise.config.layout_rules import fits_schedule
from shardwise.config.pipeline_schedule_specs import rounds_of_step
from shardwise.pipeline.action_order import Action, ActionKind, action_order
from shardwise.pipeline.partition import pipeline_rank_of
from shardwise.pipeline.timeline import StageTimes, timeline
from shardwise_plan import makespan as levels
from shardwise_plan.makespan import makespan, pass_levels

SCHEDULES: list[Schedule] = ["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]
MANY = 13  # ranks, for which 1F1B is simulated by levels too


def parallel_of(schedule: Schedule, degree: int, virtual: int) -> ParallelConfig:
    several = virtual if schedule.startswith("interleaved") else None
    return ParallelConfig(pipeline=degree, schedule=schedule, virtual_stages=several)


def by_level(parallel: ParallelConfig, m: int) -> list[list[Action]]:
    """The passes of each rank in the order of their levels, without weights' gradients that are computed apart."""
    found = pass_levels(parallel, m, m // rounds_of_step(parallel.pipeline, m))
    placed: dict[int, dict[int, Action]] = defaultdict(dict)
    for stage in range(parallel.pipeline * parallel.stages_per_rank):
        row = placed[pipeline_rank_of(parallel, stage)]
        for k in range(m):
            kind: ActionKind = "input" if found.split[stage, k] else "backward"
            for level, action in (
                (found.forward[stage, k], Action("forward", stage, k)),
                (found.backward[stage, k], Action(kind, stage, k)),
            ):
                assert level not in row, f"{action} and {row[level]} are on one level"
                row[int(level)] = action
    return [[action for _, action in sorted(row.items())] for _, row in sorted(placed.items())]


@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one != "gpipe"])
def test_levels_have_the_order_of_the_schedule(schedule: Schedule) -> None:
    for p in (2, 3, 5):
        for virtual in (2, 3) if schedule.startswith("interleaved") else (1,):
            parallel = parallel_of(schedule, p, virtual)
            for m in range(1, 4 * p + 2):
                if fits_schedule(parallel, m):
                    expected = [
                        [action for action in action_order(parallel, m, rank) if action.kind != "weight"]
                        for rank in range(p)
                    ]
                    assert by_level(parallel, m) == expected, (p, virtual, m)


def cases(schedule: Schedule, number: int) -> list[tuple[ParallelConfig, int, tuple[StageTimes, ...], float]]:
    """Random degrees, micro-batches, times and messages; in each third all stages but the last take the same."""
    draw, found = random.Random(schedule), []
    while len(found) < number:
        parallel = parallel_of(schedule, draw.choice((2, 3, 4, 6, MANY)), draw.randint(2, 4))
        m = draw.choice((draw.randint(1, 3 * parallel.pipeline), draw.randint(1, 100)))
        if not fits_schedule(parallel, m):
            continue
        several, times = draw.random() < 0.67, []
        for _ in range(parallel.pipeline * parallel.stages_per_rank):
            backward = draw.uniform(0.5, 4)
            times.append(StageTimes(draw.uniform(0.5, 2), backward, backward * draw.uniform(0.2, 0.8)))
        stages = times if several else [*times[:1] * (len(times) - 1), times[-1]]
        found.append((parallel, m, tuple(stages), draw.choice((0.0, draw.uniform(0, 2)))))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_ends_when_its_last_action_does(schedule: Schedule) -> None:
    recompute: Recompute
    for number, (parallel, m, stages, message) in enumerate(cases(schedule, 24)):
        recompute = "full" if number % 4 == 0 else "none"
        whole = timeline(parallel, m, stages, message, recompute).makespan
        found = makespan(parallel, m, stages, message, recompute)
        assert found == pytest.approx(whole, rel=1e-12), (parallel, m, stages, message, recompute)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule, marks=() if schedule in ("1f1b", "zbv") else pytest.mark.slow)
        for schedule in SCHEDULES
        if schedule != "gpipe"
    ],
)
def test_a_long_step_that_repeats_itself_is_cut_short(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    degree = MANY if schedule == "1f1b" else 4
    parallel, done = parallel_of(schedule, degree, 3), [0]
    run = levels._LevelSimulation._run

    def counted(self: levels._LevelSimulation, run_levels: range) -> None:
        done[0] += len(run_levels)
        run(self, run_levels)

    monkeypatch.setattr(levels._LevelSimulation, "_run", counted)
    stages = (StageTimes(1.0, 2.1, 0.9),) * (degree * parallel.stages_per_rank)
    found = makespan(parallel, 4_000, stages, 0.05, "none")
    assert 0 < done[0] < 1_000
    assert found == pytest.approx(timeline(parallel, 4_000, stages, 0.05, "none").makespan)
    # A rank that is slower by little is waited for late, so the step repeats itself late.
    slow = (StageTimes(1.0, 2.101, 0.9), *stages[1:])
    found = makespan(parallel, 400, slow, 0.05, "none")
    assert found == pytest.approx(timeline(parallel, 400, slow, 0.05, "none").makespan, rel=1e-12)
