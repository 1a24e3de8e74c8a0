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
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.base.files import write_new
from shardwise.base.prices import Price
from shardwise.base.yaml_and_json import dump_yaml
from shardwise.cli import output
from shardwise.cli.help import RECIPE_HELP
from shardwise.cli.train import load_recipe
from shardwise.config import largest_size_stage, recipe_name
from shardwise.config.recipe_files import carried_comments, is_model_recipe, own_data
from shardwise.config.stand_in import config_as_given
from shardwise.config.token_counts import parse_tokens
from shardwise_plan.cli.against_run import compare_with_run
from shardwise_plan.cli.devices import compare_devices, parse_devices, parse_plan_prices
from shardwise_plan.cli.layout_list import answer_facts, print_layouts
from shardwise_plan.cli.nodes import PricedDevices, SearchedNodes, parse_node_counts, parse_plan_time, search_nodes
from shardwise_plan.cli.wording import time_range_text
from shardwise_plan.data_stages import run_with_layout
from shardwise_plan.device_specs import MOST_FAILURES, shipped_device_text
from shardwise_plan.plan import Plan, distinct_plans
from shardwise_plan.proposals import OBJECTIVES, recommended_plan

_MOST_ROWS = 10  # rows of the list without `--all`
_SEARCHED = ("device", "nodes", "objective", "price", "budget", "failures", "restart")
"""Options that say what is searched; `--tokens` is a key."""
_OPTIONS = (
    "recipe", "overrides", "tokens", *_SEARCHED, "why", "all", "write", "layout", "show_device", "calibrate", "output",
    "json", "html", "plot",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", metavar="RECIPE", nargs="?", help=f"{RECIPE_HELP}; or the folder of a run")
    add("overrides", metavar="key=value", nargs="*", help="replaces a key of the recipe, such as train.steps=100")
    device_help = (
        "a device's name or YAML file, and the number of devices of a node; several, separated by commas, are compared"
    )
    add("--device", metavar="DEVICE[:N]", help=device_help)
    add("--tokens", metavar="N", help="tokens of the training, such as 1T; the same as train.steps=1T")
    add("--nodes", metavar="N[,N…]", help="machines; several numbers are compared (default: 1)")
    add("--objective", choices=OBJECTIVES, help="what the best layouts need least of (default: time)")
    add(
        "--price",
        metavar="PRICE",
        help="price of a device for an hour with its currency, such as '2.50 USD', of a node ('40 USD/node') or of a "
        "chip ('2 USD/chip'); or one for each device; adds the price of the training",
    )
    add(
        "--budget",
        metavar="TIME|MONEY",
        help="find the smallest number of nodes that train it in this time, such as '30 days', or the number that "
        "trains it fastest for this price, such as '100000 USD'; without --nodes",
    )
    add("--failures", metavar="F", type=float, help="failures of one device in a year (default: the device file's)")
    add("--restart", metavar="TIME", help="time of a restart after a failure, such as '15 minutes' (default: likewise)")
    add("--why", metavar=("A", "B"), nargs=2, type=int, help="explain why layout A is faster than layout B")
    add("--all", action="store_true", help="also list layouts that differ only in details")
    write_help = "write the recipe with a layout of the list to FILE; for a run, a device file"
    add("--write", metavar="FILE", type=Path, help=write_help)
    add("--layout", metavar="N", type=int, help="with --write: a row (default: the first without '!')")
    add("--show-device", metavar="DEVICE", help="print the file of a device, as a beginning for your own")
    add("--calibrate", action="store_true", help="measure this machine and write a device file")
    output_help = "of --calibrate (default: measured.yaml, which must not exist)"
    add("-o", "--output", metavar="FILE", type=Path, help=output_help)
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", type=Path, help="write one page with the proposals, a step's timeline and memory")
    add("--plot", metavar="FILE", type=Path, help="draw time against memory, and a step's timeline")


def run(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        _require_alone(arguments, "--calibrate", "calibrate", "output")
        _calibrate(arguments.output or Path("measured.yaml"))
    elif arguments.output is not None:
        raise ConfigError(f"-o ({arguments.output}) must go with --calibrate; a recipe is written by --write")
    elif arguments.show_device is not None:
        _require_alone(arguments, f"--show-device ({arguments.show_device})", "show_device")
        output.raw(shipped_device_text(arguments.show_device).rstrip("\n"))
    elif arguments.recipe is None:
        raise ConfigError("RECIPE must be named, or the folder of a run, or --calibrate or --show-device given")
    elif arguments.device is None:
        raise ConfigError("--device must name a device, such as h100:8, or a YAML file, as --calibrate writes it")
    elif Path(arguments.recipe).is_dir() and not is_model_recipe(arguments.recipe):
        _require_alone(
            arguments, "RUN (whose keys are as they were)", "recipe", "device", "nodes", "all", "json", "write"
        )
        nodes = parse_node_counts(arguments.nodes)
        if len(nodes) > 1:
            raise ConfigError(f"--nodes ({arguments.nodes}) must be one number: that of the run's machines")
        machines = PricedDevices(arguments.device).on(nodes[0])
        compare_with_run(Path(arguments.recipe), machines, as_json=arguments.json, write=arguments.write)
    else:
        _plan(arguments)
    return 0


def _require_alone(arguments: argparse.Namespace, subject: str, *allowed: str) -> None:
    given = [name for name in _OPTIONS if name not in allowed and getattr(arguments, name)]
    if given:
        name = {"overrides": "key=value", "recipe": "RECIPE"}.get(given[0], f"--{given[0].replace('_', '-')}")
        raise ConfigError(f"{name} must be left out: {subject} goes without it")


def _plan(arguments: argparse.Namespace) -> None:
    recipe: str = arguments.recipe
    if arguments.tokens is not None:
        if parse_tokens(arguments.tokens) is None:
            raise ConfigError(f"--tokens ({arguments.tokens}) must be a number with k, M, B or T, such as 300B or 1.5T")
        arguments.overrides.append(f"train.steps={arguments.tokens}")
    config = largest_size_stage(load_recipe(recipe, arguments.overrides))
    fixed = {override.partition("=")[0].strip() for override in arguments.overrides}
    if arguments.budget is not None or "," in f"{arguments.nodes}{arguments.device}":
        # A rule of the batch would otherwise let each of the compared clusters train other tokens.
        config = config.with_tokens_for_any_batch()
    if config.model.is_own:
        from shardwise_plan.own_model import own_model_stand_in  # costly to import, as torch is

        config, counts = own_model_stand_in(config, fixed)
        output.progress(counts)
    devices = parse_devices(arguments.device)
    # That of the recipe is of the user's own devices, and no price of others that they are compared with.
    price_of = parse_plan_prices(arguments.price or (config.log.price if len(devices) == 1 else None), devices)

    def answered(device: str) -> SearchedNodes:
        machines = _machines(arguments, device, price_of[device])
        with machines.work:
            return search_nodes(arguments, machines, config, fixed)

    if arguments.layout is not None and arguments.write is None:
        raise ConfigError(f"--layout ({arguments.layout}) must go with --write FILE: it chooses what is written")
    if arguments.plot is not None and not arguments.plot.suffix:
        raise ConfigError(f"--plot ({arguments.plot}) must end in its format, such as .png or .svg")
    if len(devices) > 1:
        single = {name for name in _OPTIONS if name not in ("why", "write", "plot", "html", "all")}
        _require_alone(arguments, f"--device ({arguments.device}), of several devices,", *single)
        compare_devices(arguments, devices, answered)
        return
    chosen = answered(devices[0])
    # The numbers that --layout, --why and a plot have are those of the rows.
    listed = chosen.result.plans if arguments.all else _without_details(chosen.result.plans)
    if arguments.write is not None:
        # Before the list, whose reader may close the output, as `head` does.
        _write(arguments.write, recipe, devices[0], listed, arguments.layout)
    if arguments.html is not None:
        from shardwise_plan.cli.page import plan_page  # costly to import, for a page alone

        target = arguments.write or Path("planned.yaml")
        plan = listed[arguments.layout - 1] if arguments.layout else recommended_plan(listed)
        training, replaced = _training(target, recipe, devices[0], plan)
        commands = {f"Write its recipe and train it{replaced}": [f"{_command(arguments)} --write {target}", training]}
        write_new(arguments.html, plan_page(recipe_name(recipe), chosen, listed, plan, commands), "--html")
        output.progress(f"wrote {arguments.html}")
    if arguments.why is not None:
        _show_differences(listed, *arguments.why)
    elif arguments.json:
        output.json(answer_facts(chosen, listed))
    else:
        print_layouts(recipe_name(recipe), chosen, listed)
    if arguments.plot is not None:
        _draw(listed, arguments.plot)
        output.progress(f"wrote {arguments.plot}")


def _machines(arguments: argparse.Namespace, device: str, price: Price | None) -> PricedDevices:
    failures = arguments.failures
    if failures is not None and not 0 <= failures <= MOST_FAILURES:
        raise ConfigError(
            f"--failures ({failures}) must be failures of a device in a year, from 0 to {MOST_FAILURES:,g}"
        )
    restart = None if arguments.restart is None else parse_plan_time(arguments.restart)
    if arguments.restart is not None and restart is None:
        raise ConfigError(
            f"--restart ({arguments.restart!r}) must be a time in minutes, hours, days or weeks, such as '15 minutes'"
        )
    return PricedDevices(device, price, failures, restart)


def _without_details(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that differ by more than details, at most ten, and of each number of nodes some."""
    different = [plans[index] for index in distinct_plans(plans)]
    numbers = Counter[int]()
    most = max(2, _MOST_ROWS // len({plan.cluster.nodes for plan in different}))
    listed = []
    roomy = set[int]()
    for plan in different:
        nodes = plan.cluster.nodes
        numbers[nodes] += 1
        # The first one that leaves memory free is listed in any case: it is proposed.
        if numbers[nodes] <= most or not (plan.is_tight or nodes in roomy):
            listed.append(plan)
        roomy |= set() if plan.is_tight else {nodes}
    return listed


def _calibrate(target: Path) -> None:
    # A plan needs neither the launcher of ranks nor what fits constants to measurements.
    from shardwise_plan.calibrate import calibrate

    output.progress("measuring this machine takes about a minute; other work on it makes the figures worse")
    output.table(calibrate(target))
    output.progress(f"wrote {target}; plan with: shardwise plan RECIPE --device {target}")


def _show_differences(plans: list[Plan], first: int, second: int) -> None:
    for number in (first, second):
        if not 1 <= number <= len(plans):
            raise ConfigError(f"--why {first} {second} must name two layouts of the list, 1 to {len(plans)}")
    pair = [plans[first - 1], plans[second - 1]]
    for number, plan in zip((first, second), pair, strict=True):
        output.prose(f"{number}: {plan.text()}")
    left, right = ({**dict(plan.time.rows()), "step": plan.time.total} for plan in pair)
    # The step itself stays last, below its parts.
    parts = sorted(left, key=lambda part: (part == "step", -abs(right[part] - left[part])))
    rows = [
        (part.replace("_", " "), f"{left[part]:.4f}", f"{right[part]:.4f}", f"{right[part] - left[part]:+.4f}")
        for part in parts
        if left[part] or right[part]
    ]
    output.line()
    output.table(rows, ("seconds", str(first), str(second), "difference"), right=(1, 2, 3))
    output.line()
    sizes = [dict(plan.memory.rows()) for plan in pair]
    kinds = [(kind, *(units.size(by_kind.get(kind, 0)) for by_kind in sizes)) for kind in sizes[0] | sizes[1]]
    output.table(kinds, ("memory", str(first), str(second)), right=(1, 2))


def _write(path: Path, recipe: str, device: str, plans: Sequence[Plan], number: int | None) -> None:
    """Write the recipe with a layout of the list, and print how to train it.

    Without a number the layout is the first that leaves a tenth of the memory free, or else 1.
    """
    choice = ""
    if number is None:
        number = plans.index(recommended_plan(plans)) + 1
        choice = ", the first that leaves a tenth of the memory free" if number > 1 else ""
    if not 1 <= number <= len(plans):
        raise ConfigError(f"--layout ({number}) must be a layout of the list, 1 to {len(plans)}")
    plan = plans[number - 1]
    config = config_as_given(run_with_layout(plan.config, plan.layout))
    which = "as `shardwise plan` predicts it fastest" if number == 1 else f"layout {number} of `shardwise plan`{choice}"
    text = f"# {recipe_name(recipe)} on {plan.cluster}: {plan.text()}, {which}\n{carried_comments(recipe, config)}"
    # Keys that the recipe left out stay out: a later release may have a better default for them.
    values = config.with_tokens(config.model_dump(mode="json", exclude_unset=True))
    if config.model.is_own:
        # Optional keys that are null would be arguments of the class.
        values["model"] = {key: value for key, value in values["model"].items() if value is not None}
    if not plan.calendar.is_given:
        # The list assumes the interval that costs least; a training that is shorter has no use for one.
        values.setdefault("checkpoint", {})["every_minutes"] = max(1.0, round(plan.calendar.interval / 60, 1))
    write_new(path, text + dump_yaml(values), "--write")
    command, replaced = _training(path, recipe, device, plan)
    ranges = time_range_text(plan)
    doubt = f", which leaves {units.size(plan.headroom)} of memory and may not fit" if plan.is_tight else ""
    predicted = f" with layout {number}{choice}{doubt}{f', predicted to take {ranges}' if ranges else ''}"
    output.progress(f"wrote {path}{predicted}; train it with{replaced}: {command}")


def _training(path: Path, recipe: str, device: str, plan: Plan) -> tuple[str, str]:
    nodes = plan.cluster.nodes
    command = f"shardwise train {path}"
    if nodes > 1:
        command = f"shardwise submit {path} --nodes {nodes} --device {device}"
        command += f" launch.ranks_per_node={plan.cluster.per_node}"
    if plan.config.names_no_data:
        return f"{command} {own_data(recipe)}", " (replace YOUR_… by the paths of your data)"
    return command, ""


def _command(arguments: argparse.Namespace) -> str:
    options = []
    for name in (*_SEARCHED, "all", "layout"):
        value = getattr(arguments, name)
        if value is not None and value is not False:
            options += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(["shardwise", "plan", arguments.recipe, *arguments.overrides, *options])


_COLOURS = {"forward": "#4477aa", "backward": "#66ccaa", "input": "#ccbb44", "weight": "#ee8866"}
_MOST_BARS = 20_000  # largest number of actions that a picture shows: each is an object of matplotlib


def _draw(plans: Sequence[Plan], path: Path) -> None:
    # Costly to import, for a plot alone.
    from shardwise.base.registered import optional_library

    figures = optional_library("matplotlib.figure", "--plot needs", "plot")
    figure = figures.Figure(figsize=(11, 8), layout="constrained")
    scatter, bars = figure.subplots(2, 1)
    for number, plan in enumerate(plans, 1):
        position = (plan.memory.total / 1e9, plan.time.total)
        scatter.scatter(*position, color="#4477aa")
        scatter.annotate(str(number), position, xytext=(4, 4), textcoords="offset points")
    scatter.set(xlabel="memory of the neediest rank (GB)", ylabel="step (s)", title="the best layouts, by their number")
    best = plans[0]
    ranks = best.timeline().ranks
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
