"""The machines of `shardwise plan`: the numbers of nodes that are searched, and how many a time or a price needs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.base.prices import Price
from shardwise.base.progress import progress
from shardwise.base.yaml_and_json import whole_number
from shardwise.cli import output
from shardwise.config import Config, check_layout, tokens_of_run
from shardwise.config.learning_rate_specs import LEARNING_RATES
from shardwise.config.stand_in import config_as_given
from shardwise.models.flops import flops_per_token
from shardwise_plan.cli.wording import cost_text, duration, has_published_error, published_error_ratios
from shardwise_plan.device_specs import Cluster, parse_cluster
from shardwise_plan.layout_choices import number_of_choices
from shardwise_plan.plan import Plan
from shardwise_plan.proposals import Objective, objective_value, recommended_plan
from shardwise_plan.search import Search, search_layouts

_SECONDS_OF = {"minute": 60, "hour": 3600, "day": 86_400, "week": 7 * 86_400}
_MOST_PLANS = 30  # layouts of the list before those that differ in details are left out
_MOST_TIGHT = 100  # layouts that are looked at until one leaves memory free
_NODE_COUNTS = sorted({2**power for power in range(15)} | {3 * 2**power for power in range(13)})
"""Numbers of nodes that are tried first: 1, 2, 3, 4, 6, 8, 12, 16 and so on, up to 16,384."""
_EXACT_NODES = 32  # nodes up to which every number between two of these is tried, and beyond in steps of a sixteenth
_MOST_MORE = 4  # with an objective other than time, up to so many times the fewest nodes are tried
_FARTHEST_ADVICE = 64  # up to so many times the given nodes are tried to advise a larger cluster


@dataclass(frozen=True)
class PricedDevices:
    """The devices of `--device`, with their price and failures, on any number of nodes."""

    device: str  # value of `--device`
    price: Price | None = None  # price for an hour; None: that of the device's file
    failures_per_year: float | None = None  # failures of one device; None: those of its file
    restart: float | None = None  # seconds of a restart; None: those of its file
    # Shows how far the searches are.
    work: progress = field(default_factory=partial(progress, "planning", noun="choice"))

    def on(self, nodes: int) -> Cluster:
        """Return the cluster of so many nodes."""
        machines = parse_cluster(self.device, nodes)
        given = {"failures_per_year": self.failures_per_year, "restart": self.restart}
        changed = {name: value for name, value in given.items() if value is not None}
        reliability = replace(machines.device.reliability, **changed)
        price = self.price or machines.device.price
        device = replace(machines.device, price=price, reliability=reliability)
        return replace(machines, device=device)

    def search(self, config: Config, on: Cluster, fixed: Collection[str], best: int) -> Search:
        """Search the layouts on a cluster of these devices."""
        self.work.doing = f"planning on {units.counted(on.nodes, 'node')}"
        return search_layouts(config, on, best=best, most=_MOST_TIGHT, fixed=fixed, looked=self.work.advance, once=True)


@dataclass(frozen=True)
class SearchedNodes:
    """The layouts that `shardwise plan` found on one or several numbers of nodes."""

    result: Search  # layouts and counts, of all numbers of nodes together; the best by the objective come first
    # Sentences, or None: `rates` has the learning rates, `steps` those on each number of devices where the recipe does
    # not say them, `budget` how many nodes a budget needs, `unused` that fewer devices of each node need fewer
    # device-hours.
    remarks: Mapping[str, str | None]
    compared: Sequence[Plan]  # the plan to choose on each number of nodes that was looked at

    @property
    def sentences(self) -> list[str]:
        return [remark for remark in self.remarks.values() if remark]


def parse_plan_time(text: str) -> float | None:
    """Parse a time of `shardwise plan` such as `30 days` into seconds; None for anything else, and for no time."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(minute|hour|day|week)s?\s*", text)
    return float(match[1]) * _SECONDS_OF[match[2]] or None if match is not None else None


def parse_node_counts(text: str | None) -> list[int]:
    """Return the numbers of nodes to plan for that `--nodes` names."""
    if text is None:
        return [1]
    counts = [count for part in text.split(",") if (count := whole_number(part.strip())) is not None]
    if len(counts) <= text.count(",") or len(set(counts)) < len(counts):
        raise ConfigError(f"--nodes ({text}) must be a number of machines, or several, such as 16,32,64")
    return counts


def search_nodes(
    arguments: argparse.Namespace, machines: PricedDevices, config: Config, fixed: set[str]
) -> SearchedNodes:
    """Search the best layouts on the nodes that are given, or on the number that a budget allows."""
    objective: Objective = arguments.objective or "time"
    nodes_of = _Nodes(config, machines, fixed)
    budget = None
    if arguments.budget is None:
        counts = parse_node_counts(arguments.nodes)
    elif arguments.nodes is None:
        plan, budget = _within_budget(nodes_of, arguments.budget, objective)
        counts = [plan.cluster.nodes]
    else:
        raise ConfigError("--budget must go without --nodes: it answers how many nodes are needed")
    clusters = [machines.on(nodes) for nodes in counts]
    machines.work.total = sum(number_of_choices(config, on.world, on.per_node, fixed) for on in clusters)
    results = []
    for on in clusters:
        results.append(machines.search(config, on, fixed, _MOST_PLANS))
        if len(clusters) > 1 and results[-1].plans:
            plan = recommended_plan(results[-1].plans)
            output.progress(f"{units.counted(on.nodes, 'node')}: {duration(plan.calendar.seconds)} with {plan.text()}")
    if not any(result.plans for result in results):
        raise ConfigError([nodes_of.why_none(result, nodes) for result, nodes in zip(results, counts, strict=True)])
    for result in results:
        _require_end(result)
    compared = nodes_of.tried() or [recommended_plan(result.plans) for result in results if result.plans]
    joined = Search()
    for result in results:
        joined.plans += result.plans
        joined.valid += result.valid
        joined.refused += result.refused
        joined.too_large += result.too_large
        joined.equal += result.equal
    joined.plans.sort(key=lambda plan: objective_value(plan, objective))
    best = recommended_plan(joined.plans)
    unused = _unused_devices(best, config, machines, fixed)
    remarks = {
        "rates": _learning_rates_text(best),
        "steps": growing_batch_text(joined.plans),
        "budget": budget,
        "unused": unused,
    }
    return SearchedNodes(joined, remarks, sorted(compared, key=lambda plan: plan.cluster.nodes))


def _require_end(result: Search) -> None:
    """Refuse devices that fail so often that no training ends; ConfigError: the training does not finish."""
    if not result.plans or result.plans[0].calendar.ends:
        return
    plan = result.plans[0]
    raise ConfigError(
        f"--failures ({plan.cluster.device.reliability.failures_per_year:g}) must be lower: on {plan.cluster} a device "
        f"fails every {units.duration(plan.calendar.between_failures)}, and the training does not finish at this rate "
        "of failures"
    )


def _learning_rates_text(plan: Plan) -> str:
    optimizer, steps = plan.config.optimizer, plan.config.train.steps
    lowest = "" if "min_lr" in LEARNING_RATES[optimizer.schedule].excludes else f" to {optimizer.min_lr:g}"
    usual = [("", f"{units.counted(optimizer.warmup_steps, 'step')} of warmup")]
    ((_, warmup),) = optimizer.long_warmup(steps) or usual
    return f"Learning rate: {optimizer.schedule}, {optimizer.lr:g}{lowest}; {warmup}"


def growing_batch_text(plans: Sequence[Plan]) -> str | None:
    """Return the steps of plans on each number of devices where the batch grows with them; None where it does not."""
    config = plans[0].config
    if not config.steps_follow_batch:
        return None
    steps_of_world = {plan.cluster.world: plan.config.train.steps for plan in plans}
    (world, steps), *further = sorted(steps_of_world.items())
    texts = [f"{steps:,} steps on {world:,} devices", *(f"{steps:,} on {world:,}" for world, steps in further)]
    return (
        f"The batch grows with the devices ({config.train.batch_rule}), and the steps follow, for "
        f"{units.count(tokens_of_run(config))} tokens in all: {', '.join(texts)}"
    )


def _unused_devices(best: Plan, config: Config, machines: PricedDevices, fixed: Collection[str]) -> str | None:
    """Return that fewer devices of each node need fewer device-hours; None where they do not.

    Only a power of two is tried, and only where the batch lacks the odd factor that the devices of a node have. `best`
    is the fastest plan on whole nodes.
    """
    on = best.cluster
    power = 1 << (on.per_node.bit_length() - 1)
    odd = on.per_node // (on.per_node & -on.per_node)
    batch = config.train.global_batch
    if config.train.rule is not None or batch % odd == 0:
        return None
    fewer = _fastest(config, machines, replace(on, per_node=power), fixed)
    if fewer is None or fewer.device_hours >= best.device_hours:
        return None
    name = re.sub(r":\d+$", "", machines.device)
    return (
        f"The {on.per_node} devices of a node do not divide the batch of {batch}: with {power} of each (--device "
        f"{name}:{power}) the training takes {fewer.device_hours:,.0f} device-hours in place of "
        f"{best.device_hours:,.0f}, and {units.duration(fewer.calendar.seconds)} in place of "
        f"{units.duration(best.calendar.seconds)}"
    )


def _fastest(config: Config, machines: PricedDevices, on: Cluster, fixed: Collection[str]) -> Plan | None:
    try:
        plans = machines.search(config, on, fixed, 1).plans
    except ConfigError:
        return None
    return recommended_plan(plans) if plans and plans[0].calendar.ends else None


class _Nodes:
    def __init__(self, config: Config, machines: PricedDevices, fixed: set[str]) -> None:
        self._config = config
        self._machines = machines
        self._fixed = fixed
        self._plans: dict[int, Plan | None] = {}
        # The numbers that are tried first: a batch that does not grow is divided among so many at most.
        most = config.train.global_batch * 64 if config.train.rule is None else _NODE_COUNTS[-1]
        self.counts = [nodes for nodes in _NODE_COUNTS if nodes <= most]

    def plan(self, nodes: int) -> Plan | None:
        """Return the fastest plan on so many nodes; None if no layout fits, or the network is unknown."""
        if nodes not in self._plans:
            try:
                self._plans[nodes] = _fastest(self._config, self._machines, self._machines.on(nodes), self._fixed)
            except ConfigError:
                self._plans[nodes] = None
        return self._plans[nodes]

    def tried(self) -> list[Plan]:
        return [plan for plan in self._plans.values() if plan is not None]

    def between(self, nodes: int) -> range:
        """Return the numbers between these nodes and the next smaller number that is tried first."""
        fewer = max((count for count in _NODE_COUNTS if count < nodes), default=0)
        step = 1 if nodes <= _EXACT_NODES else nodes // 16
        return range(fewer + step, nodes, step)

    def fewest(self, seconds: float) -> Plan | None:
        """Return the plan on the fewest nodes whose training takes at most so many seconds."""
        enough = next((nodes for nodes in self.counts if self._is_enough(nodes, seconds)), None)
        if enough is None:
            return None
        fewer = next((nodes for nodes in self.between(enough) if self._is_enough(nodes, seconds)), enough)
        return self._plans[fewer]

    def _is_enough(self, nodes: int, seconds: float) -> bool:
        if self._least_seconds(nodes) > seconds:
            return False
        plan = self.plan(nodes)
        return plan is not None and plan.calendar.seconds <= seconds

    def _least_seconds(self, nodes: int) -> float:
        """Return the seconds of all steps at the devices' peak, which no layout can beat."""
        on = self._machines.on(nodes)
        config = self._config.with_batch_for(on.world)
        length = config.train.sequence_length
        flops = flops_per_token(config.model, length, config.data.predictions(length)) or 0.0
        peak = max(on.device.bfloat16, on.device.float32, on.device.fp8 or 0.0)
        return flops * tokens_of_run(config) / (peak * on.world)

    def why_none(self, result: Search, nodes: int) -> str:
        on = self._machines.on(nodes)
        if result.smallest is None:
            config = self._config.with_batch_for(on.world)
            needs = f"`shardwise train RECIPE --dry-run --nproc {on.world}` says what one needs"
            try:
                check_layout(config_as_given(config), on.world)
            except ConfigError as error:
                needs = f"in its own layout, {'; '.join(error.problems)}"
            return (
                f"no layout of the recipe is valid on {units.counted(on.world, 'device')}: train.global_batch "
                f"({config.train.global_batch}) or the model's sizes have no divisor that suits; {needs}"
            )
        choice, size = result.smallest
        larger = [count for count in _NODE_COUNTS if nodes < count <= _FARTHEST_ADVICE * nodes]
        fits = next((count for count in larger if self.plan(count) is not None), None)
        fix = "choose a device with more memory" if fits is None else f"--nodes {fits} is the fewest that fits"
        return (
            f"no layout fits {on}: the smallest ({choice.text(on.world)}) needs at least {units.size(size)} on "
            f"a device of {units.size(on.device.memory)}, of which 6% are reserved: {fix}"
        )


def _within_budget(nodes_of: _Nodes, budget: str, objective: Objective) -> tuple[Plan, str]:
    seconds = parse_plan_time(budget)
    if seconds is not None:
        return _in_time(nodes_of, budget, seconds, objective)
    price = re.fullmatch(r"\s*((?:\d+|\d{1,3}(?:[_,]\d{3})+)(?:\.\d+)?)\s*([A-Za-z]{3})\s*", budget)
    if price is not None:
        return _for_a_price(nodes_of, budget, float(re.sub("[_,]", "", price[1])), price[2].upper())
    raise ConfigError(
        f"--budget ({budget!r}) must be a time in minutes, hours, days or weeks, such as '30 days', or a price "
        "with its currency, such as '100,000 USD'"
    )


def _in_time(nodes_of: _Nodes, budget: str, limit: float, objective: Objective) -> tuple[Plan, str]:
    plan = nodes_of.fewest(limit)
    if plan is None:
        on_most = next(filter(None, map(nodes_of.plan, reversed(nodes_of.counts))), None)
        text = "nothing fits"
        if on_most is not None:
            fastest = min(nodes_of.tried(), key=lambda plan: plan.calendar.seconds)
            text = f"{units.duration(fastest.calendar.seconds)} on {fastest.cluster}"
        raise ConfigError(f"--budget ({budget}) must be longer: the shortest training found takes {text}")
    enough = plan.cluster
    verb = "trains" if enough.nodes == 1 else "train"
    sentence = f"{units.counted(enough.nodes, 'node')} of {enough.per_node} {verb} it in {budget}"
    _, most = published_error_ratios(plan)
    late = f"if steps take {most - 1:.0%} longer than predicted"
    safe = nodes_of.fewest(limit / most) if has_published_error(plan) else None
    sentence += f", even {late}" if safe is not None and safe.cluster == enough else ", as predicted"
    if safe is None and has_published_error(plan):
        sentence += f"; {late}, no number of nodes that was tried does"
    elif safe is not None and safe.cluster != enough:
        sentence += f"; {late}, {units.counted(safe.cluster.nodes, 'node')} are needed"
    if objective == "time":
        return plan, sentence
    larger = [nodes for nodes in nodes_of.counts if enough.nodes < nodes <= _MOST_MORE * enough.nodes]
    best = min([plan, *filter(None, map(nodes_of.plan, larger))], key=lambda plan: objective_value(plan, objective))
    if best is not plan:
        sentence += f"; {units.counted(best.cluster.nodes, 'node')} need the least {objective}"
    return best, sentence


def _for_a_price(nodes_of: _Nodes, budget: str, most: float, currency: str) -> tuple[Plan, str]:
    def is_affordable(nodes: int) -> bool:
        plan = nodes_of.plan(nodes)
        return plan is not None and _cost_in(plan, currency, budget) <= most

    # More nodes cost more, but the first ones may be short of memory, and three times a power of two divides batches
    # and layers less well: two numbers in a row that cost too much end the search.
    largest = 0
    ends: list[int] = []
    for nodes in nodes_of.counts:
        if is_affordable(nodes):
            largest = nodes
            ends = []
        else:
            ends.append(nodes)
        if len(ends) > 1 and (largest or len(nodes_of.tried()) > 2):
            break
    # Between the first numbers, some may cost less than these do.
    for end in ends[:1] if largest else ends:
        for nodes in nodes_of.between(end):
            nodes_of.plan(nodes)
    affordable = [plan for plan in nodes_of.tried() if _cost_in(plan, currency, budget) <= most]
    if not affordable:
        cheapest = min(nodes_of.tried(), key=lambda plan: plan.device_hours, default=None)
        text = "nothing fits" if cheapest is None else f"{cost_text(cheapest)} on {cheapest.cluster}"
        raise ConfigError(f"--budget ({budget}) must be higher: the cheapest training found costs {text}")
    fastest = min(affordable, key=lambda plan: plan.calendar.seconds)
    verb = "trains" if fastest.cluster.nodes == 1 else "train"
    time = units.duration(fastest.calendar.seconds)
    return fastest, f"{units.counted(fastest.cluster.nodes, 'node')} {verb} it for {budget} in {time}"


def _cost_in(plan: Plan, currency: str, budget: str) -> float:
    price = plan.cluster.device.price
    if plan.cost is None or price is None or price.currency != currency:
        named = "which is not known" if price is None else f"which is in {price.currency}"
        raise ConfigError(
            f"--budget ({budget}) must go with a price in {currency} of {plan.cluster.device.name}, {named}: give "
            f"--price, such as --price '2.50 {currency}'"
        )
    return plan.cost
