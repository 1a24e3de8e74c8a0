"""Rank the layouts of a recipe on a cluster, by the predicted time of a step.

Nothing is measured and no device is needed: `--device h100:8 --nodes 16` names a cluster of 16 machines with 8 devices
each, and a YAML file can describe any other device. All layouts are tried, whatever layout the recipe states;
parallel.tensor=8 on the command line searches only layouts with TP 8. docs/planner.md compares predictions with
published runs.

--calibrate measures this machine and writes a device file for --device. With a run's folder instead of a recipe, the
run is compared with its prediction, and --write FILE writes a device file with constants that fit the run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from shardwise.base import files, units
from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.cli.plan_against_run import compare_with_run
from shardwise.cli.plan_devices import compare_devices, named_devices, prices
from shardwise.cli.plan_rows import (
    DAY,
    MOST_RATIO,
    RANGE,
    TIGHT,
    UNTESTED,
    accuracy,
    accuracy_text,
    costs_legend,
    dollars,
    has_range,
    is_untested,
    plan_facts,
    range_text,
    row,
    time_unit,
)
from shardwise.config import Config, dump_yaml, largest_stage, load_config, recipe_name, tokens_of_run
from shardwise.config.recipe_files import carried_comments, is_without_data, own_data
from shardwise.models import parameter_counts
from shardwise.planner.device_specs import Cluster, cluster, shipped_text
from shardwise.planner.memory import offloaded_bytes
from shardwise.planner.search import Plan, Search, distinct, search
from shardwise.planner.step_time import timeline_of

_SECONDS_OF = {"hour": 3600, "day": DAY, "week": 7 * DAY}
_MOST_PLANS = 30
"""Layouts of the list before those that differ in details are left out."""
_MOST_ROWS = 10
"""Rows of the list without `--all`."""
_NODE_COUNTS = sorted({2**power for power in range(15)} | {3 * 2**power for power in range(13)})
"""Numbers of nodes that are tried first: 1, 2, 3, 4, 6, 8, 12, 16 and so on, up to 16,384."""
_EXACT_NODES = 32
"""Nodes up to which every number between two of these is tried, and beyond in steps of a sixteenth."""
_LEGEND = (
    '"MFU" = model FLOPs, without recompute and masked attention, over the peak',
    '"free" = device memory - run - 6% reserve (context, buffers, fragmentation)',
    '"comm." = communication time not overlapped with compute',
)
_COMPILED = (
    '"step" = with compiled blocks (compile.enabled) in layouts that can be compiled, and with eager ones in others'
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a shipped recipe's name, or a YAML file; or the folder of a run"
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="replaces a key of the recipe, such as train.steps=100"
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE[:N]",
        help="a device's name or YAML file, and the number of devices of a node; several, separated by commas, "
        "are compared",
    )
    parser.add_argument("--nodes", metavar="N", type=int, help="machines (default: 1)")
    parser.add_argument(
        "--price",
        metavar="DOLLARS",
        help="price of a device for an hour, or one for each device, such as 2.50,5.00; adds the price of the training",
    )
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="find the smallest number of nodes that train it in this time, such as '30 days'; without --nodes",
    )
    parser.add_argument(
        "--why", metavar=("A", "B"), nargs=2, type=int, help="explain why layout A is faster than layout B"
    )
    parser.add_argument("--all", action="store_true", help="also list layouts that differ only in details")
    parser.add_argument(
        "--write",
        metavar="FILE",
        type=Path,
        help="write the recipe with the best layout to FILE; for a run, a device file",
    )
    parser.add_argument("--layout", metavar="N", type=int, help="with --write: the number of a row (default: 1)")
    parser.add_argument(
        "--show-device", metavar="DEVICE", help="print the file of a device, as a beginning for your own"
    )
    parser.add_argument("--calibrate", action="store_true", help="measure this machine and write a device file")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="of --calibrate (default: measured.yaml, which must not exist)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw time against memory, and a step's timeline")


def run(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.output is not None:
        raise ConfigError(f"-o ({arguments.output}) must go with --calibrate; a recipe is written by --write")
    if arguments.show_device is not None:
        return _show_device(arguments)
    if arguments.recipe is None:
        raise ConfigError("RECIPE must be named, or the folder of a run, or --calibrate or --show-device given")
    if arguments.device is None:
        raise ConfigError("--device must name a device, such as h100:8, or a YAML file, as --calibrate writes it")
    if Path(arguments.recipe).is_dir():
        return compare_with_run(arguments)
    recipe: str = arguments.recipe
    config = largest_stage(load_config(recipe, arguments.overrides))
    fixed = {override.partition("=")[0].strip() for override in arguments.overrides}
    devices = named_devices(arguments.device)
    price_of = prices(arguments.price, devices)

    def searched(device: str) -> Search:
        return _searched(arguments, device, config, fixed, price_of[device])

    if arguments.layout is not None and arguments.write is None:
        raise ConfigError(f"--layout ({arguments.layout}) must go with --write FILE: it chooses what is written")
    if len(devices) > 1:
        return compare_devices(arguments, devices, searched)
    result = searched(devices[0])
    # The numbers that --layout, --why and a plot have are those of the rows.
    listed = result.plans
    if not arguments.all:
        listed = [result.plans[index] for index in distinct(result.plans)[:_MOST_ROWS]]
    if arguments.write is not None:
        # Before the list, whose reader may close the output, as `head` does.
        _write(arguments.write, recipe, devices[0], listed, 1 if arguments.layout is None else arguments.layout)
    if arguments.why is not None:
        _show_differences(listed, *arguments.why)
    elif arguments.json:
        facts = {"valid": result.valid, "dropped": dict(result.too_large), "plans": [*map(plan_facts, listed)]}
        output.json(facts | {"accuracy": accuracy_text(listed[0])})
    else:
        _show(recipe_name(recipe), result, listed)
    if arguments.plot is not None:
        draw(listed, arguments.plot)
        output.progress(f"wrote {arguments.plot}")
    return 0


def _searched(
    arguments: argparse.Namespace, device: str, config: Config, fixed: set[str], price: float | None
) -> Search:
    """Return the best layouts on the nodes that are given, or on the fewest that keep to the budget."""
    if arguments.budget is not None:
        if arguments.nodes is not None:
            raise ConfigError("--budget must go without --nodes: it answers how many nodes are needed")
        result = _search_within_budget(config, device, arguments.budget, fixed)
    else:
        nodes = 1 if arguments.nodes is None else arguments.nodes
        result = search(config, cluster(device, nodes), best=_MOST_PLANS, fixed=fixed)
        if not result.plans:
            raise ConfigError(_why_nothing_fits(result, config, device, nodes, fixed))
    if price is not None:
        result.plans = [plan.at_price(price) for plan in result.plans]
    return result


def _show_device(arguments: argparse.Namespace) -> int:
    if arguments.recipe is not None or arguments.device is not None:
        raise ConfigError(f"--show-device ({arguments.show_device}) must go alone: it plans nothing")
    output.raw(shipped_text(arguments.show_device).rstrip("\n"))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    other_options = (
        "recipe", "overrides", "device", "nodes", "price", "budget", "why", "write", "layout", "plot", "show_device",
    )  # fmt: skip
    if any(getattr(arguments, option) for option in other_options) or arguments.json:
        raise ConfigError("--calibrate must go alone or with -o FILE: it measures this machine, whatever the recipe")
    # A plan needs neither the launcher of ranks nor what fits constants to measurements.
    from shardwise.verify.calibrate import calibrate

    target: Path = arguments.output or Path("measured.yaml")
    output.progress("measuring this machine takes about a minute; other work on it makes the figures worse")
    output.table(calibrate(target))
    output.progress(f"wrote {target}; plan with: shardwise plan RECIPE --device {target}")
    return 0


def _show(name: str, result: Search, listed: Sequence[Plan]) -> None:
    best = listed[0]
    train = best.config.train
    tokens = tokens_of_run(best.config)
    parameters = units.count(parameter_counts.parameter_count(best.config.model) or 0)
    output.prose(f"{name}, {parameters} parameters, on {best.cluster}: {tokens:,} tokens in {train.steps:,} steps")
    dropped = "".join(f"; {number:,} dropped: {reason}" for reason, number in result.too_large.items())
    output.prose(f"{result.valid:,} layouts are valid{dropped}")
    output.line()
    unit = time_unit(best)
    head = ["", "layout", "step", "tokens/s", "MFU", "memory", "free", "bubble", "comm.", unit, "device-hours"]
    rows = [[str(number), *row(plan, unit)] for number, plan in enumerate(listed, 1)]
    if best.dollars is not None:
        head.append("dollars")
        rows = [[*cells, dollars(plan)] for cells, plan in zip(rows, listed, strict=True)]
    output.table(rows, head, right=(0, *range(2, len(head))))
    output.line()
    left_out = result.plans.index(listed[-1]) + 1 - len(listed)
    if left_out:
        output.prose(
            f"Listed are the {len(listed)} fastest. Left out: {units.counted(left_out, 'layout')} at most 4% slower "
            "than a listed layout with the same degrees and ZeRO; only schedule, micro-batch, recompute or SP differ. "
            f"--all lists the {len(result.plans)} fastest with them."
        )
    if any(plan.is_tight for plan in listed):
        output.line(TIGHT)
    if any(is_untested(plan) for plan in listed):
        output.prose(UNTESTED)
    output.prose(f"A step of layout 1: {best.time.shares()}")
    if any(plan.config.compile.enabled for plan in listed):
        output.prose(_COMPILED)
    consequence = ""
    if ranges := range_text(best):
        consequence = f": layout 1 takes {ranges}, {RANGE}"
    for line in (*_LEGEND, costs_legend(best, unit), *accuracy([best], consequence)):
        output.prose(line)
    if on_host := offloaded_bytes(best.config, best.layout, best.cluster.device.is_accelerator):
        output.prose(f"Layout 1 needs {units.size(on_host)} of the host's memory for each rank, which is not checked.")


def _show_differences(plans: list[Plan], first: int, second: int) -> None:
    """Print the parts of two layouts side by side, the largest difference first."""
    for number in (first, second):
        if not 1 <= number <= len(plans):
            raise ConfigError(f"--why {first} {second} must name two layouts of the list, 1 to {len(plans)}")
    left = plans[first - 1]
    right = plans[second - 1]
    output.prose(f"{first}: {left.text()}")
    output.prose(f"{second}: {right.text()}")
    output.line()
    right_seconds = dict(right.time.rows())
    parts = [(part, seconds, right_seconds[part]) for part, seconds in left.time.rows()]
    parts.append(("step", left.time.total, right.time.total))
    # The step itself stays last, below its parts.
    parts[:-1] = sorted(parts[:-1], key=lambda part: -abs(part[2] - part[1]))
    rows = [(name.replace("_", " "), f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}") for name, a, b in parts if a or b]
    output.table(rows, ("seconds", str(first), str(second), "difference"), right=(1, 2, 3))
    output.line()
    right_bytes = dict(right.memory.rows())
    memory_rows = []
    for kind, size in left.memory.rows():
        other_size = right_bytes.get(kind, 0)
        if size or other_size:
            memory_rows.append((kind, units.size(size), units.size(other_size)))
    output.table(memory_rows, ("memory", str(first), str(second)), right=(1, 2))


def _write(path: Path, recipe: str, device: str, plans: Sequence[Plan], number: int) -> None:
    """Write the recipe with the layout of this number in the list, and print how to train it.

    Args:
        device: value of `--device`.
    """
    if not 1 <= number <= len(plans):
        raise ConfigError(f"--layout ({number}) must be a layout of the list, 1 to {len(plans)}")
    plan = plans[number - 1]
    which = "as `shardwise plan` predicts it fastest" if number == 1 else f"layout {number} of `shardwise plan`"
    text = f"# {recipe_name(recipe)} on {plan.cluster}: {plan.text()}, {which}\n{carried_comments(recipe, plan.config)}"
    # Keys that the recipe left out stay out: a later release may have a better default for them.
    values = plan.config.with_tokens(plan.config.model_dump(mode="json", exclude_unset=True))
    files.write_new(path, text + dump_yaml(values), "--write")
    nodes = plan.cluster.nodes
    command = f"shardwise train {path}"
    if nodes > 1:
        command = f"shardwise submit {path} --nodes {nodes} --device {device}"
        command += f" launch.ranks_per_node={plan.cluster.per_node}"
    replaced = ""
    if is_without_data(plan.config):
        command += f" {own_data(recipe)}"
        replaced = " (replace YOUR_… by the paths of your data)"
    ranges = range_text(plan)
    predicted = f" with layout {number}, predicted to take {ranges}" if ranges else f" with layout {number}"
    output.progress(f"wrote {path}{predicted}; train it with{replaced}: {command}")


def _budget_seconds(budget: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(hour|day|week)s?\s*", budget)
    if match is None or not float(match[1]):
        raise ConfigError(f"--budget ({budget!r}) must be a time in hours, days or weeks, such as '30 days'")
    return float(match[1]) * _SECONDS_OF[match[2]]


def _search_within_budget(config: Config, device: str, budget: str, fixed: set[str]) -> Search:
    """Return the best layouts on the fewest nodes on which the training ends in time."""
    limit = _budget_seconds(budget)
    fewest = _FewestNodes(config, device, fixed)
    plan = fewest.within(limit)
    if plan is None:
        fastest = min(filter(None, fewest.plans.values()), key=lambda plan: plan.seconds, default=None)
        shortest = "nothing fits" if fastest is None else f"{units.duration(fastest.seconds)} on {fastest.cluster}"
        raise ConfigError(f"--budget ({budget}) must be longer: the shortest training found takes {shortest}")
    is_in_doubt = has_range(plan)
    safe = fewest.within(limit / MOST_RATIO) if is_in_doubt else None
    output.progress(_nodes_text(plan.cluster, None if safe is None else safe.cluster, budget, is_in_doubt))
    return search(config, plan.cluster, best=_MOST_PLANS, fixed=fixed)


class _FewestNodes:
    """Finds the fewest nodes on which a training ends in time.

    Attributes:
        plans: the fastest plan on each number of nodes that was tried; None where no layout is valid or fits.
    """

    def __init__(self, config: Config, device: str, fixed: set[str]) -> None:
        self._config = config
        self._device = device
        self._fixed = fixed
        self.plans: dict[int, Plan | None] = {}

    def within(self, seconds: float) -> Plan | None:
        """Return the plan on the fewest nodes whose training takes at most so many seconds."""
        fewer = 0
        for nodes in _NODE_COUNTS:
            machines = cluster(self._device, nodes)
            # A batch that does not grow with the ranks cannot be divided among many more of them.
            most = self._config.train.global_batch * machines.per_node * 64
            if self._config.train.rule is None and machines.world > most:
                break
            if self._is_enough(nodes, seconds):
                step = 1 if nodes <= _EXACT_NODES else nodes // 16
                between = range(fewer + step, nodes, step)
                return self.plans[next((n for n in between if self._is_enough(n, seconds)), nodes)]
            fewer = nodes
        return None

    def _is_enough(self, nodes: int, seconds: float) -> bool:
        if nodes not in self.plans:
            try:
                # One plan tells whether the time suffices. The whole list is made for the chosen number alone.
                plans = search(self._config, cluster(self._device, nodes), best=1, fixed=self._fixed).plans
            except ConfigError:
                # No layout of the recipe is valid on so many devices, and one may be on more.
                plans = []
            self.plans[nodes] = plans[0] if plans else None
        plan = self.plans[nodes]
        return plan is not None and plan.seconds <= seconds


def _nodes_text(enough: Cluster, safe: Cluster | None, budget: str, is_in_doubt: bool) -> str:
    """Return the number of nodes that a budget needs as predicted, and at the upper end of the prediction's error.

    Args:
        safe: nodes that suffice at the upper end; None if no number does.
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


def _why_nothing_fits(result: Search, config: Config, device: str, nodes: int, fixed: set[str]) -> str:
    """Return why no layout fits, and the smallest change that helps."""
    machines = cluster(device, nodes)
    if not result.valid:
        return (
            f"no layout of the recipe is valid on {units.counted(machines.world, 'device')}: train.global_batch "
            f"({config.train.global_batch}) or the model's sizes have no divisor that suits; `shardwise train "
            f"RECIPE --dry-run --nproc {machines.world}` says what one needs"
        )
    assert result.smallest is not None
    choice, size = result.smallest
    fix = "choose a device with more memory"
    for larger in _NODE_COUNTS:
        if larger > nodes and search(config, cluster(device, larger), best=1, fixed=fixed).plans:
            fix = f"--nodes {larger} is the fewest that fits"
            break
        # Each further number costs a whole search, and a cluster so much larger is no advice.
        if larger > 64 * nodes:
            break
    return (
        f"no layout fits {machines}: the smallest ({choice.text(machines.world)}) needs at least {units.size(size)} on "
        f"a device of {units.size(machines.device.memory)}, of which 6% are reserved: {fix}"
    )


_COLOURS = {"forward": "#4477aa", "backward": "#66ccaa", "input": "#ccbb44", "weight": "#ee8866"}
_MOST_BARS = 20_000
"""Largest number of actions that a picture shows: each is an object of matplotlib."""


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Draw time against memory of all plans, and the timeline of the best one, in the format of the file's suffix."""
    # Costly to import, for a plot alone.
    from shardwise.data.reading.content import optional_library

    figures = optional_library("matplotlib.figure", "--plot needs", "plot")
    figure = figures.Figure(figsize=(11, 8), layout="constrained")
    scatter, bars = figure.subplots(2, 1)
    for number, plan in enumerate(plans, 1):
        position = (plan.memory.total / 1e9, plan.time.total)
        scatter.scatter(*position, color="#4477aa")
        scatter.annotate(str(number), position, xytext=(4, 4), textcoords="offset points")
    scatter.set(xlabel="memory of the neediest rank (GB)", ylabel="step (s)", title="the best layouts, by their number")
    best = plans[0]
    ranks = timeline_of(best.config, best.layout, best.cluster).ranks
    for rank, actions in enumerate(ranks):
        # Of a long pipeline the first actions are drawn, which have all that repeats.
        for timed in actions[: max(1, _MOST_BARS // len(ranks))]:
            color = _COLOURS[timed.action.kind]
            bars.barh(rank, timed.end - timed.start, left=timed.start, color=color, linewidth=0)
    title = f"{best.text()}: {best.time.total:.3g} s, then reduction and update"
    bars.set(xlabel="seconds", ylabel="pipeline rank", title=title)
    bars.invert_yaxis()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
