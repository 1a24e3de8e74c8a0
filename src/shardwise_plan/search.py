"""The fastest layouts that fit, in the order of their predicted time.

A search asks the cheap questions first. A layout whose state, or whose state with the blocks that it must keep, is
larger than a device is dropped. Each other layout has a bound that no schedule can beat, the work of its average rank.
Layouts are taken by this bound. Those that may be among the best get a closer one, with the fill of the pipeline and
the update. Those that still may be are simulated, and last comes their exact memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout
from shardwise.estimates.memory import RESERVED
from shardwise.estimates.memory_choice import first_fitting_candidate, memory_candidates
from shardwise_plan.data_stages import stages_with_layout
from shardwise_plan.device_specs import Cluster
from shardwise_plan.layout_choices import LayoutChoice, layout_choices, with_compiled_blocks
from shardwise_plan.plan import Plan
from shardwise_plan.search_memory import LeastMemory, short_step_memory
from shardwise_plan.step_time import least_step_times, model_seconds, step_time

_ROUNDING = 1e-9
"""Relative rounding error of a bound: it adds up the seconds of a step in another order than the step's time does."""
STATE_TOO_LARGE = "parameters, gradients and optimizer state alone are larger than the device"
ACTIVATIONS_TOO_LARGE = "activations do not fit beside parameters, gradients and optimizer state"


@dataclass
class Search:
    """The layouts that a search found, and how many it dropped.

    Attributes:
        plans: fastest layouts that fit, fastest first.
        valid: number of layouts that the rules allow.
        refused: number of layouts that a rule forbids, by the key of the rule.
        too_large: number of layouts that were dropped, by the reason.
        equal: number of layouts whose recompute changes neither time nor memory of a faster one.
        smallest: the dropped layout that needs the least memory, and its bytes.
    """

    plans: list[Plan] = field(default_factory=list)
    valid: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    smallest: tuple[LayoutChoice, float] | None = None

    @property
    def slower(self) -> int:
        """Number of layouts that are slower than all listed ones; some of them may not fit."""
        return self.valid - sum(self.too_large.values()) - len(self.plans) - self.equal

    def drop(self, reason: str, choice: LayoutChoice, size: float) -> None:
        """Note a layout that does not fit."""
        self.too_large[reason] += 1
        if self.smallest is None or size < self.smallest[1]:
            self.smallest = (choice, size)


def search_layouts(
    config: Config,
    cluster: Cluster,
    *,
    best: int = 10,
    most: int = 0,
    fixed: Collection[str] = (),
    looked: Callable[[int], object] = int,
    once: bool = False,
) -> Search:
    """Return the `best` fastest layouts on a cluster; keys in `fixed` keep the recipe's values.

    Further ones are looked for, up to `most` in all, until one leaves memory free. `looked` is told how many of
    `number_of_choices` were looked at. With `once`, recompute that changes nothing makes no layout of its own.
    """
    if config.shapes is None:
        raise ConfigError(
            f"model.family ({config.model.family}) must be one whose shapes are known: a model of your own is "
            "not known before it is built"
        )
    asked = _Asked(config.with_batch_for(cluster.world), cluster)
    result = asked.result
    # A bound comes before a plan with the same seconds. Among equals, a layout's number keeps the order of
    # `layout_choices`.
    bounded: list[tuple[float, bool, int, Plan | Iterator[float | Plan]]] = []
    for lists, layout in layout_choices(asked.config, cluster.world, cluster.per_node, fixed, result.refused, looked):
        for shardings in lists:
            result.valid += 1
            kept = asked.that_may_fit(shardings, layout)
            if kept:
                bounded.append((asked.work_seconds(kept[0], layout), False, result.valid, asked.plan(kept, layout)))
    heapq.heapify(bounded)
    plans = result.plans
    listed = set[object]()
    while bounded and (len(plans) < best or (len(plans) < most and all(plan.is_tight for plan in plans))):
        # No layout that is still to be simulated can be faster than the lowest bound.
        _, _, number, candidate = heapq.heappop(bounded)
        if isinstance(candidate, Plan):
            needs = (replace(candidate.choice, recompute="none"), candidate.time.total, candidate.memory.total)
            if once and needs in listed:
                result.equal += 1
                continue
            listed.add(needs)
            plans.append(candidate)
        elif isinstance(closer := next(candidate, None), Plan):
            heapq.heappush(bounded, (closer.time.total, True, number, closer))
        elif closer is not None:
            heapq.heappush(bounded, (closer, False, number, candidate))
    return result


class _Asked:
    """The questions that a search asks of a layout, from cheap to costly; `result` notes those that do not fit."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self.config = config
        self.result = Search()
        self._cluster = cluster
        self._limit = cluster.device.memory * (1 - RESERVED)
        self._least_memory = LeastMemory(config, cluster)
        self._seconds: dict[tuple[object, ...], float] = {}

    def that_may_fit(self, shardings: list[LayoutChoice], layout: Layout) -> list[LayoutChoice]:
        """Return the shardings that a bound of their memory cannot rule out.

        Shardings that follow one which may fit are kept: they are asked in this order.
        """
        states = [(choice, self._least_memory.state(choice, layout)) for choice in shardings]
        by_state = [choice for choice, least in states if least <= self._limit]
        if not by_state:
            self.result.drop(STATE_TOO_LARGE, *min(states, key=lambda pair: pair[1]))
            return []
        with_activations = [(choice, self._least_memory(choice, layout)) for choice in by_state]
        kept = [choice for choice, least in with_activations if least <= self._limit]
        if not kept:
            self.result.drop(ACTIVATIONS_TOO_LARGE, *min(with_activations, key=lambda pair: pair[1]))
        return kept

    def work_seconds(self, choice: LayoutChoice, layout: Layout) -> float:
        """Return a bound of the step's time: the work of the average pipeline rank, without any wait and the update.

        The fastest of what is left to the memory counts, and the choice's stage of ZeRO must be the lowest.
        """
        at_choice = (choice.splits_backward, choice.micro_batch, choice.recompute, choice.zero >= 2)
        key = (*layout.inside_a_stage, layout.pipeline > 1, *at_choice)
        if key not in self._seconds:
            self._seconds[key] = min(
                model_seconds(candidate, layout, self._cluster) for candidate in self._candidates(choice, layout)
            )
        micro_batches = self.config.train.global_batch // (choice.micro_batch * layout.data)
        return (1 - _ROUNDING) * micro_batches / layout.pipeline * self._seconds[key]

    def plan(self, shardings: list[LayoutChoice], layout: Layout) -> Iterator[float | Plan]:
        """Yield closer and closer bounds of the step's time, then the plan of the first sharding that fits."""
        for simulated in (False, True):
            of_sharding = partial(least_step_times, layout=layout, cluster=self._cluster, simulated=simulated)
            yield (1 - _ROUNDING) * min(
                min(of_sharding([config, *(choice.sharded(config) for choice in shardings[1:])]))
                for config in self._candidates(shardings[0], layout)
            )
        needed: list[tuple[LayoutChoice, float]] = []
        estimated = partial(short_step_memory, layout=layout, cluster=self._cluster, limit=self._limit)
        for choice in shardings:
            config = with_compiled_blocks(choice.applied(self.config), self._cluster.device)
            chosen, memory = first_fitting_candidate(config, layout, estimated, self._limit)
            choice = replace(choice, regathers=chosen.regathers, passes_keys=chosen.passes_keys)
            further_stages = [stage for stage in stages_with_layout(chosen, layout) if stage is not chosen]
            memory = max([memory, *map(estimated, further_stages)], key=lambda estimate: estimate.total)
            if memory.total <= self._limit:
                time = step_time(chosen, layout, self._cluster)
                assert time is not None
                yield Plan(choice, chosen, layout, self._cluster, time, memory)
                return
            needed.append((choice, float(memory.total)))
        self.result.drop(ACTIVATIONS_TOO_LARGE, *min(needed, key=lambda pair: pair[1]))

    def _candidates(self, choice: LayoutChoice, layout: Layout) -> Iterator[Config]:
        return memory_candidates(with_compiled_blocks(choice.applied(self.config), self._cluster.device), layout)
