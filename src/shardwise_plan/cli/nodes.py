"""The machines of `shardwise plan`: the numbers of nodes that are searched, and how many a time or a price needs."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.base.parsing import whole_number
from shardwise.config import Config, tokens_of_run
from shardwise.models.parameter_counts import flops_per_token
from shardwise_plan.cli.remarks import steps_text, unused_devices_text
from shardwise_plan.cli.rows import DAY, MOST_RATIO, cost_text, has_range
from shardwise_plan.device_specs import Cluster, Price, cluster
from shardwise_plan.plan import Plan
from shardwise_plan.proposals import Objective, objective_of
from shardwise_plan.search import Search, search

_SECONDS_OF = {"minute": 60, "hour": 3600, "day": DAY, "week": 7 * DAY}
MOST_PLANS = 30
"""Layouts of the list before those that differ in details are left out."""
_NODE_COUNTS = sorted({2**power for power in range(15)} | {3 * 2**power for power in range(13)})
"""Numbers of nodes that are tried first: 1, 2, 3, 4, 6, 8, 12, 16 and so on, up to 16,384."""
_EXACT_NODES = 32
"""Nodes up to which every number between two of these is tried, and beyond in steps of a sixteenth."""
_MOST_MORE = 4
"""With an objective other than time, up to so many times the fewest nodes are tried."""


@dataclass(frozen=True)
class Machines:
    """The devices of `--device`, with their price and failures, on any number of nodes.

    Attributes:
        device: value of `--device`.
        price: price for an hour; None: that of the device's file.
        failures_per_year: failures of one device; None: those of its file.
        restart: seconds of a restart; None: those of its file.
    """

    device: str
    price: Price | None = None
    failures_per_year: float | None = None
    restart: float | None = None

    def on(self, nodes: int) -> Cluster:
        """Return the cluster of so many nodes."""
        machines = cluster(self.device, nodes)
        reliability = machines.device.reliability
        if self.failures_per_year is not None:
            reliability = replace(reliability, failures_per_year=self.failures_per_year)
        if self.restart is not None:
            reliability = replace(reliability, restart=self.restart)
        price = machines.device.price if self.price is None else self.price
        return replace(machines, device=replace(machines.device, price=price, reliability=reliability))


@dataclass(frozen=True)
class Answer:
    """The layouts that were searched for.

    Attributes:
        result: layouts and counts, of all numbers of nodes together; the best by the objective come first.
        budget: how many nodes a budget needs, as a sentence; empty without a budget.
        steps: how many steps there are on each number of devices, as a sentence; empty where the recipe says it.
        unused: that fewer devices of each node need fewer device-hours, as a sentence; empty where they do not.
    """

    result: Search
    budget: str = ""
    steps: str = ""
    unused: str = ""


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of a time such as `30 days`."""
    seconds = _parsed_seconds(text)
    if seconds is None:
        raise ConfigError(f"{option} ({text!r}) must be a time in minutes, hours, days or weeks, such as '30 days'")
    return seconds


def _parsed_seconds(text: str) -> float | None:
    """Return the seconds of a time; None for anything else, and for no time at all."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(minute|hour|day|week)s?\s*", text)
    if match is None or not float(match[1]):
        return None
    return float(match[1]) * _SECONDS_OF[match[2]]


def node_counts(text: str | None) -> list[int]:
    """Return the numbers of nodes that `--nodes` names."""
    if text is None:
        return [1]
    counts = [count for part in text.split(",") if (count := whole_number(part.strip())) is not None]
    if len(counts) <= text.count(",") or len(set(counts)) < len(counts):
        raise ConfigError(f"--nodes ({text}) must be a number of machines, or several, such as 16,32,64")
    return counts


def is_comparison(arguments: argparse.Namespace) -> bool:
    """Return whether clusters of several sizes or kinds are compared."""
    return arguments.budget is not None or "," in f"{arguments.nodes}{arguments.device}"


def answer(arguments: argparse.Namespace, machines: Machines, config: Config, fixed: set[str]) -> Answer:
    """Return the best layouts on the nodes that are given, or on the number that a budget allows."""
    objective: Objective = arguments.objective or "time"
    if arguments.budget is not None:
        if arguments.nodes is not None:
            raise ConfigError("--budget must go without --nodes: it answers how many nodes are needed")
        return _within_budget(config, machines, arguments.budget, fixed, objective)
    counts = node_counts(arguments.nodes)
    results = [(nodes, search(config, machines.on(nodes), best=MOST_PLANS, fixed=fixed)) for nodes in counts]
    if not any(result.plans for _, result in results):
        raise ConfigError([_why_nothing_fits(result, config, machines, nodes, fixed) for nodes, result in results])
    for _, result in results:
        _require_end(result)
    return _answer(config, machines, fixed, _together([result for _, result in results], objective))


def _answer(config: Config, machines: Machines, fixed: set[str], result: Search, budget: str = "") -> Answer:
    best = result.plans[0]
    unused = unused_devices_text(best, config, machines.device, fixed)
    return Answer(result, budget, steps_text(result.plans), unused)


def _require_end(result: Search) -> None:
    """Refuse devices that fail so often that no training ends.

    Raises:
        ConfigError: the training does not finish.
    """
    if not result.plans or result.plans[0].calendar.ends:
        return
    plan = result.plans[0]
    reliability = plan.cluster.device.reliability
    raise ConfigError(
        f"--failures ({reliability.failures_per_year:g}) must be lower: on {plan.cluster} a device fails every "
        f"{units.duration(plan.calendar.between_failures)}, and the training does not finish at this rate of failures"
    )


def _together(results: Sequence[Search], objective: Objective) -> Search:
    """Return the layouts of several searches as those of one, the best by the objective first."""
    joined = Search()
    for result in results:
        joined.plans += result.plans
        joined.valid += result.valid
        joined.refused += result.refused
        joined.too_large += result.too_large
    joined.plans.sort(key=lambda plan: objective_of(plan, objective))
    return joined


def _within_budget(config: Config, machines: Machines, budget: str, fixed: set[str], objective: Objective) -> Answer:
    """Return the best layouts on the nodes with which the training keeps to a time or to a price."""
    nodes_of = _Nodes(config, machines, fixed)
    price = re.fullmatch(r"\s*((?:\d+|\d{1,3}(?:[_,]\d{3})+)(?:\.\d+)?)\s*([A-Za-z]{3})\s*", budget)
    seconds = _parsed_seconds(budget)
    if seconds is not None:
        plan, sentence = _in_time(nodes_of, budget, seconds, objective)
    elif price is not None:
        plan, sentence = _for_a_price(nodes_of, budget, float(re.sub("[_,]", "", price[1])), price[2].upper())
    else:
        raise ConfigError(
            f"--budget ({budget!r}) must be a time in minutes, hours, days or weeks, such as '30 days', or a price "
            "with its currency, such as '100,000 USD'"
        )
    result = search(config, plan.cluster, best=MOST_PLANS, fixed=fixed)
    return _answer(config, machines, fixed, _together([result], objective), sentence)


def _in_time(nodes_of: _Nodes, budget: str, limit: float, objective: Objective) -> tuple[Plan, str]:
    plan = nodes_of.fewest(limit)
    if plan is None:
        tried = (nodes_of.on_most(), *nodes_of.plans())
        fastest = min(filter(None, tried), key=lambda plan: plan.calendar.seconds, default=None)
        text = "nothing fits"
        if fastest is not None:
            text = f"{units.duration(fastest.calendar.seconds)} on {fastest.cluster}"
        raise ConfigError(f"--budget ({budget}) must be longer: the shortest training found takes {text}")
    is_in_doubt = has_range(plan)
    safe = nodes_of.fewest(limit / MOST_RATIO) if is_in_doubt else None
    sentence = _nodes_text(plan.cluster, None if safe is None else safe.cluster, budget, is_in_doubt)
    if objective == "time":
        return plan, sentence
    best = nodes_of.best(plan.cluster.nodes, objective)
    if best.cluster != plan.cluster:
        sentence += f"; {units.counted(best.cluster.nodes, 'node')} need the least {objective}"
    return best, sentence


def _for_a_price(nodes_of: _Nodes, budget: str, most: float, currency: str) -> tuple[Plan, str]:
    """Return the fastest plan that costs at most so much."""

    def costs_too_much(nodes: int) -> bool:
        plan = nodes_of.plan(nodes)
        return plan is None or _cost_in(plan, currency, budget) > most

    counts = nodes_of.tried_first()
    # The first numbers of nodes may cost too much because memory is short.
    is_last = (not costs_too_much(nodes) or len(nodes_of.plans()) > 2 for nodes in counts)
    place = next((place for place, ends in enumerate(is_last) if ends), len(counts) - 1)
    between = counts[: place + 1]
    if not costs_too_much(counts[place]):
        # From here on, more nodes cost more: of the powers of two, and of three times these, which divide batches and
        # layers less well.
        chains = (counts[place::2], counts[place + 1 :: 2])
        most_nodes = max(n for chain in chains for n in chain[: bisect_left(chain, True, key=costs_too_much)])
        between = [nodes for nodes in counts if nodes > most_nodes][:1]
    for nodes in between:
        nodes_of.plan_before(nodes)
    tried = nodes_of.plans()
    affordable = [plan for plan in tried if _cost_in(plan, currency, budget) <= most]
    if not affordable:
        cheapest = min(tried, key=lambda plan: plan.device_hours, default=None)
        text = "nothing fits" if cheapest is None else f"{cost_text(cheapest)} on {cheapest.cluster}"
        raise ConfigError(f"--budget ({budget}) must be higher: the cheapest training found costs {text}")
    fastest = min(affordable, key=lambda plan: plan.calendar.seconds)
    verb = "trains" if fastest.cluster.nodes == 1 else "train"
    time = units.duration(fastest.calendar.seconds)
    return fastest, f"{units.counted(fastest.cluster.nodes, 'node')} {verb} it for {budget} in {time}"


def _cost_in(plan: Plan, currency: str, budget: str) -> float:
    """Return what a training costs in a currency.

    Raises:
        ConfigError: the price of its device is not known in this currency.
    """
    price = plan.cluster.device.price
    if plan.cost is None or price is None or price.currency != currency:
        named = "which is not known" if price is None else f"which is in {price.currency}"
        raise ConfigError(
            f"--budget ({budget}) must go with a price in {currency} of {plan.cluster.device.name}, {named}: give "
            f"--price, such as --price '2.50 {currency}'"
        )
    return plan.cost


class _Nodes:
    """The fastest plan on each number of nodes that is asked for."""

    def __init__(self, config: Config, machines: Machines, fixed: set[str]) -> None:
        self._config = config
        self._machines = machines
        self._fixed = fixed
        self._plans: dict[int, Plan | None] = {}

    def plans(self) -> list[Plan]:
        """Return the plans on all numbers that were tried and that a layout fits."""
        return [plan for plan in self._plans.values() if plan is not None]

    def fewest(self, seconds: float) -> Plan | None:
        """Return the plan on the fewest nodes whose training takes at most so many seconds."""
        fewer = 0
        for nodes in self._counts():
            if self._is_enough(nodes, seconds):
                between = _between(fewer, nodes)
                return self._plans[next((n for n in between if self._is_enough(n, seconds)), nodes)]
            fewer = nodes
        return None

    def on_most(self) -> Plan | None:
        """Return the plan on the most nodes that a layout fits."""
        return next(filter(None, map(self.plan, reversed(list(self._counts())))), None)

    def best(self, fewest: int, objective: Objective) -> Plan:
        """Return the plan with the least of the objective on these nodes or somewhat more."""
        counts = {fewest, *(nodes for nodes in self._counts() if fewest < nodes <= _MOST_MORE * fewest)}
        plans = [plan for nodes in sorted(counts) if (plan := self.plan(nodes)) is not None]
        return min(plans, key=lambda plan: objective_of(plan, objective))

    def tried_first(self) -> list[int]:
        """Return the numbers of nodes that are tried first."""
        return list(self._counts())

    def plan_before(self, nodes: int) -> None:
        """Plan the numbers between these nodes and the next smaller number that is tried first."""
        fewer = max((count for count in _NODE_COUNTS if count < nodes), default=0)
        for between in _between(fewer, nodes):
            self.plan(between)

    def _counts(self) -> Iterator[int]:
        for nodes in _NODE_COUNTS:
            machines = self._machines.on(nodes)
            # A batch that does not grow with the ranks cannot be divided among many more of them.
            most = self._config.train.global_batch * machines.per_node * 64
            if self._config.train.rule is None and machines.world > most:
                return
            yield nodes

    def plan(self, nodes: int) -> Plan | None:
        """Return the fastest plan on so many nodes; None if no layout fits."""
        if nodes not in self._plans:
            try:
                # One plan tells whether the time suffices. The whole list is made for the chosen number alone.
                plans = search(self._config, self._machines.on(nodes), best=1, fixed=self._fixed).plans
            except ConfigError:
                # No layout of the recipe is valid on so many devices, and one may be on more.
                plans = []
            ends = [plan for plan in plans if plan.calendar.ends]
            self._plans[nodes] = ends[0] if ends else None
        return self._plans[nodes]

    def _is_enough(self, nodes: int, seconds: float) -> bool:
        if self._least_seconds(nodes) > seconds:
            return False
        plan = self.plan(nodes)
        return plan is not None and plan.calendar.seconds <= seconds

    def _least_seconds(self, nodes: int) -> float:
        """Return the seconds of all steps at the devices' peak, which no layout can beat."""
        machines = self._machines.on(nodes)
        config = self._config.with_batch_for(machines.world)
        train = config.train
        flops = flops_per_token(config.model, train.sequence_length, config.data.predictions(train.sequence_length))
        if flops is None:
            return 0.0
        device = machines.device
        peak = max(device.bfloat16, device.float32, device.fp8 or 0.0)
        return flops * tokens_of_run(config) / (peak * machines.world)


def _between(smaller: int, larger: int) -> range:
    """Return the numbers of nodes between two that are tried first."""
    step = 1 if larger <= _EXACT_NODES else larger // 16
    return range(smaller + step, larger, step)


def _nodes_text(enough: Cluster, safe: Cluster | None, budget: str, is_in_doubt: bool) -> str:
    """Return the number of nodes that a budget needs as predicted, and at the upper end of the prediction's error.

    Args:
        enough: nodes that suffice as predicted.
        safe: nodes that suffice at the upper end; None if no number does.
        budget: the time.
        is_in_doubt: False if the error of the prediction is not known.
    """
    verb = "trains" if enough.nodes == 1 else "train"
    text = f"{units.counted(enough.nodes, 'node')} of {enough.per_node} {verb} it in {budget}"
    if not is_in_doubt:
        return f"{text}, as predicted"
    late = f"if steps take {MOST_RATIO - 1:.0%} longer than predicted"
    if safe is None:
        return f"{text}, as predicted; {late}, no number of nodes that was tried does"
    if safe == enough:
        return f"{text}, even {late}"
    return f"{text}, as predicted; {late}, {units.counted(safe.nodes, 'node')} are needed"


def _why_nothing_fits(result: Search, config: Config, machines: Machines, nodes: int, fixed: set[str]) -> str:
    """Return why no layout fits, and the smallest change that helps."""
    on = machines.on(nodes)
    if not result.valid:
        return (
            f"no layout of the recipe is valid on {units.counted(on.world, 'device')}: train.global_batch "
            f"({config.train.global_batch}) or the model's sizes have no divisor that suits; `shardwise train "
            f"RECIPE --dry-run --nproc {on.world}` says what one needs"
        )
    assert result.smallest is not None
    choice, size = result.smallest
    fix = "choose a device with more memory"
    for larger in _NODE_COUNTS:
        if larger > nodes and _fits(config, machines, larger, fixed):
            fix = f"--nodes {larger} is the fewest that fits"
            break
        # Each further number costs a whole search, and a cluster so much larger is no advice.
        if larger > 64 * nodes:
            break
    return (
        f"no layout fits {on}: the smallest ({choice.text(on.world)}) needs at least {units.size(size)} on "
        f"a device of {units.size(on.device.memory)}, of which 6% are reserved: {fix}"
    )


def _fits(config: Config, machines: Machines, nodes: int, fixed: set[str]) -> bool:
    try:
        return bool(search(config, machines.on(nodes), best=1, fixed=fixed).plans)
    except ConfigError:
        # Such as a device whose network is unknown.
        return False
