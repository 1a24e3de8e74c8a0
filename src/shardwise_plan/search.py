"""The fastest layouts that fit, in the order of their predicted time.

A search asks the cheap questions first. A layout whose state, or whose state with the blocks that it must keep, is
larger than a device is dropped. Each other layout has a bound that no schedule can beat: the work of its busiest rank.
Layouts are taken by this bound. Those that may be among the best are simulated, and only if they still may be, their
exact memory is computed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout
from shardwise.estimates.memory import RESERVED
from shardwise.estimates.memory_choice import first_that_fits
from shardwise_plan.device_specs import Cluster
from shardwise_plan.layout_choices import Choice, choices, compiled
from shardwise_plan.plan import Plan
from shardwise_plan.run_stages import stages_with_layout
from shardwise_plan.search_memory import LeastMemory, short_step_memory
from shardwise_plan.search_time import LeastTime
from shardwise_plan.step_time import step_time

_ROUNDING = 1e-9
"""Relative rounding error of a bound: it adds up the seconds of a step in another order than the step's time does."""
STATE_TOO_LARGE = "parameters, gradients and optimizer state alone are larger than the device"
ACTIVATIONS_TOO_LARGE = "activations do not fit beside parameters, gradients and optimizer state"


@dataclass
class Search:
    """The result of a search.

    Attributes:
        plans: fastest layouts that fit, fastest first.
        valid: number of layouts that the rules allow.
        refused: number of layouts that a rule forbids, by the key of the rule.
        too_large: number of layouts that were dropped, by the reason.
        smallest: the dropped layout that needs the least memory, and its bytes.
    """

    plans: list[Plan] = field(default_factory=list)
    valid: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    smallest: tuple[Choice, float] | None = None

    @property
    def slower(self) -> int:
        """Number of layouts that are slower than all listed ones; some of them may not fit."""
        return self.valid - sum(self.too_large.values()) - len(self.plans)

    def drop(self, reason: str, choice: Choice, size: float) -> None:
        """Note a layout that does not fit."""
        self.too_large[reason] += 1
        if self.smallest is None or size < self.smallest[1]:
            self.smallest = (choice, size)


def search(config: Config, cluster: Cluster, *, best: int = 10, fixed: Collection[str] = ()) -> Search:
    """Return the `best` fastest layouts on a cluster; keys in `fixed` keep the recipe's values."""
    if config.shapes is None:
        raise ConfigError(
            f"model.family ({config.model.family}) must be one whose shapes are known: a model of your own is "
            "not known before it is built"
        )
    config = config.with_batch_for(cluster.world)
    limit = cluster.device.memory * (1 - RESERVED)
    result = Search()
    bounded: list[_Bounded] = []
    least_memory = LeastMemory(config, cluster)
    least_time = LeastTime(config, cluster)
    for lists, layout in choices(config, cluster.world, cluster.per_node, fixed, result.refused):
        for shardings in lists:
            result.valid += 1
            kept = _that_may_fit(result, shardings, layout, least_memory, limit)
            if kept:
                seconds = (1 - _ROUNDING) * least_time(kept[0], layout)
                bounded.append(_Bounded(seconds, 0, result.valid, kept, layout))
    heapq.heapify(bounded)
    while len(result.plans) < best and bounded:
        # No layout that is still to be simulated can be faster than the lowest bound.
        lowest = heapq.heappop(bounded)
        if lowest.plan is not None:
            result.plans.append(lowest.plan)
        elif lowest.asked < 2:
            passes = None if lowest.asked else lowest.seconds
            seconds = (1 - _ROUNDING) * least_time.step(lowest.shardings, lowest.layout, passes)
            heapq.heappush(bounded, lowest._replace(seconds=seconds, asked=lowest.asked + 1))
        elif plan := _plan_that_fits(result, config, cluster, limit, lowest, least_memory):
            heapq.heappush(bounded, lowest._replace(seconds=plan.time.total, asked=3, plan=plan))
    return result


class _Bounded(NamedTuple):
    """A layout in the order in which a search takes layouts.

    Attributes:
        seconds: bound of the time of a step, or the time itself.
        asked: number of questions that are answered, cheap ones first: a bound of the time comes before a plan.
        number: its place in `choices`, which orders equal times.
        shardings: those that may fit.
        layout: its degrees.
        plan: the first sharding that fits, with its prediction.
    """

    seconds: float
    asked: int
    number: int
    shardings: list[Choice]
    layout: Layout
    plan: Plan | None = None


def _that_may_fit(
    result: Search, shardings: list[Choice], layout: Layout, least_memory: LeastMemory, limit: float
) -> list[Choice]:
    """Return the shardings that a bound of their memory cannot rule out; note the layout as dropped if there are none.

    Shardings that follow one which may fit are kept: they are asked in this order.
    """
    states = [least_memory.state(choice, layout) for choice in shardings]
    by_state = [pair for pair in zip(shardings, states, strict=True) if pair[1] <= limit]
    if not by_state:
        result.drop(STATE_TOO_LARGE, *min(zip(shardings, states, strict=True), key=lambda pair: pair[1]))
        return []
    with_activations = [(choice, least_memory(choice, layout)) for choice, _ in by_state]
    kept = [choice for choice, least in with_activations if least <= limit]
    if not kept:
        result.drop(ACTIVATIONS_TOO_LARGE, *min(with_activations, key=lambda pair: pair[1]))
    return kept


def _plan_that_fits(
    result: Search, config: Config, cluster: Cluster, limit: float, bounded: _Bounded, least_memory: LeastMemory
) -> Plan | None:
    """Return the plan of the first sharding of a layout that fits; None where none does, which is noted.

    Args:
        result: the search's result, which gets a layout that does not fit.
        config: the recipe's configuration.
        cluster: devices that it runs on.
        limit: bytes that a rank may need.
        bounded: the layout.
        least_memory: bytes of a layout, at least.
    """
    layout = bounded.layout
    needed: list[tuple[Choice, float]] = []
    activation_bytes = 0.0
    state_share = 0.0
    for choice in bounded.shardings:
        # What activations need beside the state does not depend on the sharding.
        least = activation_bytes + state_share * least_memory.state(choice, layout)
        if least > limit:
            needed.append((choice, least))
            continue
        estimated = partial(short_step_memory, layout=layout, cluster=cluster, limit=limit)
        chosen, memory = first_that_fits(compiled(choice.applied(config), cluster.device), layout, estimated, limit)
        choice = replace(choice, regathers=chosen.regathers, passes_keys=chosen.passes_keys)
        activation_bytes = memory.total - memory.state - memory.in_flight
        state_share = memory.state / least_memory.state(choice, layout)
        further_stages = [stage for stage in stages_with_layout(chosen, layout) if stage is not chosen]
        memory = max([memory, *map(estimated, further_stages)], key=lambda estimate: estimate.total)
        if memory.total <= limit:
            time = step_time(chosen, layout, cluster)
            assert time is not None
            return Plan(choice, chosen, layout, cluster, time, memory)
        needed.append((choice, float(memory.total)))
    result.drop(ACTIVATIONS_TOO_LARGE, *min(needed, key=lambda pair: pair[1]))
    return None
