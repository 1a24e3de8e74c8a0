"""The fastest layouts that fit, in the order of their predicted time.

A search asks the cheap questions first. A layout whose state, or whose state with the blocks that it must keep, is
larger than a device is dropped. Each other layout has a bound that no schedule can beat: the work of its busiest rank
with the update. Layouts are taken by this bound, and only those that may be among the best get an exact memory and, if
they fit, a simulation.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout
from shardwise.estimates.memory import RESERVED
from shardwise.estimates.memory_choice import first_that_fits
from shardwise_plan.device_specs import Cluster
from shardwise_plan.layout_choices import Choice, choices, compiled
from shardwise_plan.plan import Plan
from shardwise_plan.run_stages import stages_with_layout
from shardwise_plan.search_memory import LeastMemory, short_step_memory
from shardwise_plan.step_time import least_times, step_time

_ROUNDING = 1e-12
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
    # A layout's number keeps the order of `choices` among equal times, and keeps the heap from comparing layouts.
    bounded: list[_Bounded] = []
    least_memory = LeastMemory(config, cluster)
    for lists, layout in choices(config, cluster.world, cluster.per_node, fixed, result.refused):
        fitting: list[tuple[int, list[Choice]]] = []
        for shardings in lists:
            result.valid += 1
            kept = _that_may_fit(result, shardings, layout, least_memory, limit)
            if kept:
                fitting.append((result.valid, kept))
        bounds = iter(_bounds(config, [choice for _, kept in fitting for choice in kept], layout, cluster))
        for number, kept in fitting:
            bound = (1 - _ROUNDING) * min(next(bounds) for _ in kept)
            bounded.append((bound, number, kept, layout))
    _add_fastest(result, config, cluster, limit, bounded, best, least_memory)
    return result


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


_Bounded = tuple[float, int, "list[Choice]", Layout]
"""Bound of the time, number, shardings that may fit, and degrees of a layout."""


def _add_fastest(
    result: Search,
    config: Config,
    cluster: Cluster,
    limit: float,
    bounded: list[_Bounded],
    best: int,
    least_memory: LeastMemory,
) -> None:
    """Add the `best` fastest layouts that fit to a result; only those that a bound cannot rule out are simulated.

    Args:
        result: the search's result, which also gets the layouts that do not fit.
        config: the recipe's configuration.
        cluster: devices that it runs on.
        limit: bytes that a rank may need.
        bounded: the layouts with the bounds of their time.
        best: number of layouts to add.
        least_memory: bytes of a layout, at least.
    """
    heapq.heapify(bounded)
    simulated: list[tuple[float, int, Plan]] = []
    while len(result.plans) < best and (bounded or simulated):
        # No layout that is still to be simulated can be faster than the lowest bound.
        if simulated and (not bounded or simulated[0][0] <= bounded[0][0]):
            result.plans.append(heapq.heappop(simulated)[2])
            continue
        _, number, shardings, layout = heapq.heappop(bounded)
        # Memory comes first, as a layout that does not fit needs no simulation.
        needed: list[tuple[Choice, float]] = []
        activation_bytes = 0.0
        state_share = 0.0
        for choice in shardings:
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
                heapq.heappush(simulated, (time.total, number, Plan(choice, chosen, layout, cluster, time, memory)))
                break
            needed.append((choice, float(memory.total)))
        else:
            result.drop(ACTIVATIONS_TOO_LARGE, *min(needed, key=lambda pair: pair[1]))


def _bounds(config: Config, shardings: list[Choice], layout: Layout, cluster: Cluster) -> list[float]:
    """Return the bounds of the times of choices that differ only in how data parallelism is sharded."""
    if not shardings:
        return []
    chosen = compiled(shardings[0].applied(config), cluster.device)
    return least_times([chosen, *(choice.sharded(chosen) for choice in shardings[1:])], layout, cluster)
