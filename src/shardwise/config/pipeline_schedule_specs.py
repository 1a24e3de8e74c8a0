"""One record per pipeline schedule: all that the rules, the planner, the pictures and the training ask about it.

To add a schedule, give it a name in `Schedule` and a record in `SCHEDULES`; its order of actions in
`pipeline/action_order.py`; and torch's class in `pipeline/schedule.py`.

Legend: p pipeline ranks, v stages on each rank, m micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]
"""The names that `parallel.schedule` takes. They stand in recipes and in the files of runs."""

DEFAULT_SCHEDULE: Schedule = "1f1b"
"""One stage on each rank, and the fewest activations of all schedules with one stage."""

DEFAULT_WITH_SEVERAL_STAGES: Schedule = "interleaved"
"""The schedule that messages propose to those who want several stages on each rank."""


def _two_per_rank(p: int, m: int) -> str | None:
    return None if m >= 2 * p else f"at least 2 × parallel.pipeline (2 × {p} = {2 * p})"


def _whole_rounds(p: int, m: int) -> str | None:
    rounds = rounds_of_step(p, m)
    return None if m % rounds == 0 else f"a multiple of the {rounds} rounds that parallel.pipeline ({p}) takes them in"


def rounds_of_step(p: int, m: int) -> int:
    """Return the rounds of a step by the specification of interleaved schedules.

    A round takes its micro-batches through all stages of a rank, one stage after the other. Rounds are equal, and each
    has at least p micro-batches; fewer than p micro-batches are one round.
    """
    return max(1, m // p)


def _fill_and_drain(p: int, v: int, m: int) -> float | None:
    """(p-1) / (v·m+p-1): each rank works v·m times and waits p-1 times while the pipeline fills and drains.

    arXiv:1811.06965 §2.3, arXiv:2104.04473 §2.2.1 and, for v > 1, §2.2.2.
    """
    return (p - 1) / (v * m + p - 1)


@dataclass(frozen=True)
class ScheduleSpec:
    """The facts of a schedule that do not depend on a run.

    Attributes:
        stages_per_rank: number of stages on each rank where `parallel.virtual_stages` gives none, and the smallest one.
        unmet_requirement: function of (p, m) that returns what m must be in words, or None if m suits the schedule.
        bubble: function of (p, v, m) that returns the part of a step in which a rank waits, where stages are equal and
            messages take no time; None if there is no formula.
        is_v_shaped: True if rank r holds the stages r and 2p-1-r: stages go to the last rank and back.
        splits_backward: True if gradients of weights are computed apart from gradients of inputs.
        holds_all_micro_batches: True if all forward passes of a step come before its first backward pass, so that
            activations of all its micro-batches are held at once.
    """

    name: str
    stages_per_rank: int
    unmet_requirement: Callable[[int, int], str | None]
    bubble: Callable[[int, int, int], float | None] = lambda p, v, m: None
    is_v_shaped: bool = False
    splits_backward: bool = False
    holds_all_micro_batches: bool = False

    @property
    def is_single_stage(self) -> bool:
        """True if each rank has exactly one stage."""
        return self.stages_per_rank == 1

    @property
    def allows_more_stages(self) -> bool:
        """True if each rank may have any number of stages from 2 on, and the last rank sends to the first one."""
        return not self.is_single_stage and not self.is_v_shaped


SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec
    for spec in (
        ScheduleSpec("gpipe", 1, lambda p, m: None, _fill_and_drain, holds_all_micro_batches=True),
        ScheduleSpec("1f1b", 1, lambda p, m: None if m >= p else f"at least parallel.pipeline ({p})", _fill_and_drain),
        # A round of fewer micro-batches than ranks waits for the last rank, which the formula does not count.
        ScheduleSpec("interleaved", 2, _whole_rounds, lambda p, v, m: _fill_and_drain(p, v, m) if m >= p else None),
        ScheduleSpec("interleaved_zero_bubble", 2, _whole_rounds, splits_backward=True),
        ScheduleSpec("zbv", 2, lambda p, m: None, is_v_shaped=True, splits_backward=True),
        ScheduleSpec("dualpipev", 2, _two_per_rank, is_v_shaped=True, splits_backward=True),
    )
}
