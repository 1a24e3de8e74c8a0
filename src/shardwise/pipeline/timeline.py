"""The times at which each pipeline rank does its actions in a step, simulated action by action.

Stages may take different times, and messages between ranks take time. `pipeline/makespan.py` computes the end of the
step alone, much faster.

torch's first stage computes both halves of a split backward pass at the place of the second; here each has its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config import ParallelConfig, Recompute
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.pipeline.action_order import TIME, Action, ActionKind, action_order
from shardwise.pipeline.partition import pipeline_rank_of


@dataclass(frozen=True)
class StageTimes:
    """Time of one micro-batch in a stage, in seconds or any other unit."""

    forward: float  # time of the forward pass
    backward: float  # time of the whole backward pass
    weight: float  # time of the gradients of weights, a part of `backward` that a schedule may do apart

    def of(self, kind: ActionKind) -> float:
        """Return the time of an action of this kind."""
        return self.backward - self.weight if kind == "input" else float(getattr(self, kind))


@dataclass(frozen=True)
class _TimedAction:
    """An action with its start and end, in the unit of the stages' times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline."""

    ranks: tuple[tuple[_TimedAction, ...], ...]  # actions of each rank, in its order

    @property
    def makespan(self) -> float:
        """Time from the first forward pass to the end of the last action."""
        return max(actions[-1].end for actions in self.ranks)

    def busy(self, rank: int) -> float:
        """Return how long a rank works."""
        return sum(timed.end - timed.start for timed in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank waits for others, as the mean over the ranks."""
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        return 1 - busy / (self.makespan * len(self.ranks))


_Pass = tuple[bool, int, int]  # (True for a forward pass, stage, micro-batch)


def timeline(
    parallel: ParallelConfig, micro_batches: int, stages: Sequence[StageTimes], message: float, recompute: Recompute
) -> Timeline:
    """Return the timeline of a step in which each rank does its actions in order, each as soon as its input is there.

    Args:
        parallel: degrees and schedule of the pipeline.
        micro_batches: number of micro-batches of a step.
        stages: times of each stage, in the order of the model.
        message: time of a message from one rank to another.
        recompute: kind of recompute; with `full` no backward pass is split.
    """
    orders = [action_order(parallel, micro_batches, rank, recompute) for rank in range(parallel.pipeline)]
    rank_of_stage = [pipeline_rank_of(parallel, stage) for stage in range(len(stages))]
    done: dict[_Pass, float] = {}
    rows: list[list[_TimedAction]] = [[] for _ in orders]
    # In each turn every rank goes on until an action's input is not there. A turn without progress is the last one.
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            row = rows[rank]
            free = row[-1].end if row else 0.0
            while len(row) < len(order):
                action = order[len(row)]
                start = free
                source = _input_of(action, len(stages) - 1)
                if source is not None:
                    if source not in done:
                        break
                    is_sent = rank_of_stage[source[1]] != rank
                    arrival = done[source] + (message if is_sent else 0.0)
                    start = max(free, arrival)
                free = start + stages[action.stage].of(action.kind)
                row.append(_TimedAction(action, start, free))
                if action.kind != "weight":
                    done[action.kind == "forward", action.stage, action.micro_batch] = free
                progressed = True
    assert all(len(row) == len(order) for row, order in zip(rows, orders, strict=True)), "ranks wait for each other"
    return Timeline(tuple(map(tuple, rows)))


def _input_of(action: Action, last_stage: int) -> _Pass | None:
    """Return the pass of a neighbouring stage whose output the action needs, or None if it needs none."""
    if action.kind == "forward":
        return (True, action.stage - 1, action.micro_batch) if action.stage else None
    if action.kind == "weight" or action.stage == last_stage:
        return None
    return (False, action.stage + 1, action.micro_batch)


def simulate(parallel: ParallelConfig, micro_batches: int, recompute: Recompute = "none") -> Timeline:
    """Return the timeline of a step with equal stages and instant messages, in units of a forward pass.

    Its bubble is the one that the order of the actions causes by itself, on any device.
    """
    equal = StageTimes(TIME["forward"], TIME["backward"], TIME["weight"])
    stages = [equal] * (parallel.pipeline * parallel.stages_per_rank)
    return timeline(parallel, micro_batches, stages, 0.0, recompute)


def bubble(parallel: ParallelConfig, micro_batches: int) -> float | None:
    """Return the part of a step in which a rank waits for others, where stages are equal and messages take no time.

    None for schedules and numbers of micro-batches that have no formula: `simulate` follows the order of their actions.
    """
    if parallel.pipeline == 1:
        return 0.0
    spec = SCHEDULES[parallel.schedule]
    return spec.bubble(parallel.pipeline, parallel.stages_per_rank, micro_batches)
