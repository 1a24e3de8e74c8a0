"""Compare the training losses of runs, or of runs and golden curves: A with each other one, where both have points.

A, B and further ones are each a run's folder or a file with a loss curve: metrics.jsonl; text, CSV or JSON with one
loss a line (from step 1 on), or with steps and losses; trainer_state.json of transformers; Megatron-LM's golden values;
TensorBoard's event files, or the folder with them. If a step occurs twice, as in a run that was resumed, the last one
counts.

The difference at a step is |A - B| / |B|. With --x tokens or --x time A is interpolated, so that runs with other batch
sizes can be compared. Exit code 0: no difference is greater than the tolerance; 1: a difference is greater, or a loss
of a run is not finite; 2: there is nothing to compare. With --bits, 1: a loss or a gradient norm differs in any bit, or
a hash of the state if both runs have hashes (log.state_hash_every). Without --bits the hashes are only shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import files, units
from shardwise.base.errors import ConfigError, listing, see
from shardwise.base.terminal import printable
from shardwise.cli import output
from shardwise.runs.events import last_event
from shardwise.runs.failure_record import failure_of
from shardwise.runs.folder import RunDirectory, read_config
from shardwise.runs.layout_spans import layout_spans, spans_text
from shardwise_watch import curve_points
from shardwise_watch.curve_points import Points, curve_label
from shardwise_watch.curves import beginning, read_loss
from shardwise_watch.report.numbers import config_differences, relative_difference

if TYPE_CHECKING:
    from shardwise.runs.state_records import StateRecords

_TOLERANCE = 0.01
_ROUNDING = 1e-5  # greatest relative difference of the losses of two layouts in float32, before training amplifies it
_JUMP = 1e-3  # difference at the first step beyond `_ROUNDING` from which on it is no rounding that has grown
_LEAST_AGREEING = 3
"""Steps at the beginning that must agree, so that a growth can be told from a difference that was always there."""
_FORMATS = (".png", ".svg")
_GREY = "#77797d"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", type=Path, help="a run's folder, or a file with a loss curve")
    add("b", metavar="B", type=Path, help="a run's folder or a file that A is compared with")
    add("others", metavar="C", type=Path, nargs="*", default=[], help="further ones that A is compared with")
    add("--tolerance", metavar="X", type=float, help=f"the greatest difference allowed (default: {_TOLERANCE})")
    add("--loss", metavar="NAME", help="the column, key or scalar of B and C with the loss (default: a usual name)")
    add("--shift", metavar="N", type=int, default=0, help="add N to the steps of B and C: 1 if they count them from 0")
    add(
        "--bits", action="store_true", help="allow no difference in any bit, of losses, gradient norms and state hashes"
    )
    add("--x", metavar="AXIS", default="step", help="compare by step, by tokens or by time of training (default: step)")
    add("--smooth", metavar="S", type=float, default=0.0, help="smooth the losses, from 0 to below 1 (default: 0)")
    add("--log", metavar="AXES", help="axes that are logarithmic in the pictures: x, y or xy")
    add("--draw", action="store_true", help="draw the curves, and their differences, in the terminal")
    add("--plot", metavar="FILE", type=Path, help="draw the curves and their differences (.png, .svg)")
    add("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    paths: list[Path] = [arguments.a, arguments.b, *arguments.others]
    tolerance = _tolerance(arguments)
    plot: Path | None = arguments.plot
    if plot is not None and plot.suffix not in _FORMATS:
        raise ConfigError(f"--plot ({plot}) must end in {listing(_FORMATS, 'or')}")
    x = arguments.x
    _require_choices(arguments, paths)
    read = [read_loss(paths[0], None, x), *(read_loss(path, arguments.loss, x, arguments.shift) for path in paths[1:])]
    names = {curve_label(number): f"{curve_label(number)}: {path}" for number, path in enumerate(paths)}
    raw = {name: points for name, (points, _) in zip(names, read, strict=True)}
    curves = curve_points.smoothed_curves(raw, arguments.smooth)
    pairs = []
    for path, name, (_, odd) in [*zip(paths, names, read, strict=True)][1:]:
        signed = curve_points.curve_differences(curves[name], curves["A"], x)
        if not signed:
            has = [f"{source} has {_extent(curves[letter], x)}" for source, letter in ((paths[0], "A"), (path, name))]
            raise ConfigError(f"A and {name} must have {_UNITS[x]}s in common: {'; '.join(has)}")
        pairs.append(_Pair(paths[0], path, name, curves["A"], curves[name], signed, sorted({*read[0][1], *odd}), x))
    if plot is not None:
        _draw(plot, names, raw, pairs, arguments, tolerance)
    facts = [_facts(arguments, pair, tolerance) for pair in pairs]
    # The states are shown where both runs have them, and count with --bits.
    for pair_facts in facts:
        if not pair_facts["states"]["steps"] and not arguments.bits:
            del pair_facts["states"]
    is_within = all(pair_facts["within"] for pair_facts in facts)
    if arguments.json:
        output.json(facts[0] if len(facts) == 1 else {"within": is_within, "pairs": facts})
    elif len(facts) == 1:
        begin = [(name, f"{path}: {_extent(curves[name], x)}") for name, path in zip("AB", paths, strict=True)]
        output.table([*begin, ("both", _extent(pairs[0].signed, x)), *_rows(facts[0], pairs[0])])
    else:
        _print_table(names, curves, pairs, facts)
    if arguments.draw and not arguments.json:
        _draw_in_terminal(names, curves, pairs, arguments)
    return int(not is_within)


@dataclass(frozen=True)
class _Pair:
    """A and another curve, `b`, of the letter `name`; `signed`: losses of B minus those of A, where both are."""

    a: Path
    b: Path
    name: str
    points_of_a: Points  # losses over the axis `x`, smoothed if asked for, as those of B
    points_of_b: Points
    signed: Points
    not_finite: Sequence[float]  # places of losses that are not finite in one of the two
    x: str

    @cached_property
    def differences(self) -> dict[float, float]:
        """|A - B| / |B| by place."""
        return {place: relative_difference(self.loss_of_a(place), self.points_of_b[place]) for place in self.signed}

    def loss_of_a(self, place: float) -> float:
        return self.points_of_a.get(place, self.points_of_b[place] - self.signed[place])


def _require_choices(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    curve_points.require_curve_options(
        arguments.x, arguments.smooth, arguments.log, {"x": "--x", "smoothing": "--smooth", "scale": "--log"}
    )
    if arguments.x != "step" and (arguments.bits or arguments.shift):
        raise ConfigError(f"--x {arguments.x} must be left out with --bits and --shift, which count steps")
    if arguments.bits and arguments.smooth:
        raise ConfigError(f"--smooth ({arguments.smooth}) must be left out with --bits, which compares the losses")
    # Two equal paths are a check of this command.
    if len(paths) > 2:
        curve_points.require_distinct_runs(paths, [path.resolve() for path in paths])


def _facts(arguments: argparse.Namespace, pair: _Pair, tolerance: float) -> dict[str, Any]:
    """The object of --json on two curves; it has "norms" with --bits alone."""
    paths = (pair.a, pair.b)
    x = pair.x
    differences = pair.differences
    largest = max(differences, key=differences.__getitem__)
    beyond = [place for place, difference in differences.items() if difference > tolerance]
    runs = [RunDirectory(path) for path in paths]
    are_runs = all(run.config.is_file() for run in runs)
    configs = [read_config(run) for run in runs] if are_runs else []
    is_by_step = x == "step" and not arguments.smooth
    # A run with `train.bitwise` adds in one order at every layout: then no difference comes from rounding.
    are_bitwise = are_runs and all((config.get("train") or {}).get("bitwise") is True for config in configs)
    may_be_rounding = bool(beyond) and not arguments.bits and is_by_step and not are_bitwise
    layouts = [spans_text(layout_spans(run.events("start", "resume"))) for run in runs] if are_runs else None
    records = (None, None) if arguments.shift else tuple(map(_records_of, runs))
    compared = {"norms": _compare_norms(*records)} if arguments.bits else {}
    compared["states"] = _compare_states(*records)
    is_equal = all(result["first_difference"] is None for result in compared.values())
    curves = {"a": pair.points_of_a, "b": pair.points_of_b}
    further: dict[str, Any] = {} if is_by_step else {"x": x, "smoothing": arguments.smooth}
    if arguments.others or not is_by_step:
        further["last"] = {"difference": [*pair.signed.values()][-1], x: max(pair.signed)}
    if pair.not_finite:
        further["not_finite"] = {"points": len(pair.not_finite), "first": pair.not_finite[0]}
    return {
        "a": str(pair.a),
        "b": str(pair.b),
        **further,
        "steps" if x == "step" else "points": len(differences),
        "largest": {
            "difference": differences[largest],
            x: largest,
            "a": pair.loss_of_a(largest),
            "b": pair.points_of_b[largest],
        },
        "tolerance": tolerance,
        "beyond": beyond,
        "within": not beyond and not pair.not_finite and (is_equal or not arguments.bits),
        "final": {name: {x: max(curve), "loss": curve[max(curve)]} for name, curve in curves.items()},
        "keys": config_differences(*configs) if are_runs else None,
        "grows_from": _first_of_growth(differences) if may_be_rounding else None,
        "failures": {name: _failure(run) for name, run in zip("ab", runs, strict=True)},
        "layouts": None if layouts is None else dict(zip("ab", layouts, strict=True)),
        **compared,
    }


def _rows(facts: Mapping[str, Any], pair: _Pair) -> Iterator[tuple[str, str]]:
    x = pair.x
    final = ", ".join(
        f"loss {end['loss']:.8g} at {_place(x, end[x])} in {name.upper()}" for name, end in facts["final"].items()
    )
    largest = facts["largest"]
    text = "{difference:.3g} at {place}: loss {a:.8g} in A, {b:.8g} in B".format(place=_place(x, largest[x]), **largest)
    yield from (("final", final), ("largest", text))
    beyond = facts["beyond"]
    if "norms" in facts:
        firsts = [facts[name]["first_difference"] for name in ("norms", "states")]
        differing = [step for step in (*beyond[:1], *firsts) if step is not None]
        counts = f"losses of {units.counted(facts['steps'], 'step')}, gradient norms of {facts['norms']['steps']:,}"
        equal = f"equal to the bit: {counts}, states of {facts['states']['steps']:,}"
        yield "result", f"not equal to the bit, first at step {min(differing):,}" if differing else equal
        yield "norms", _compared_text(facts["norms"], "of both")
    elif beyond:
        count = units.counted(len(beyond), _UNITS[x])
        yield "result", f"beyond the tolerance ({facts['tolerance']:g}) at {count}, first at {_place(x, beyond[0])}"
    elif facts["within"]:
        yield "result", f"within the tolerance ({facts['tolerance']:g})"
    if pair.not_finite:
        yield "odd", _not_finite(pair)
    if facts["grows_from"] is not None:
        yield "growth", _growth(pair.differences, facts["grows_from"])
    if "states" in facts:
        yield "states", _compared_text(facts["states"], "with hashes in both")
    yield from (("failed", f"{name.upper()} {failure}") for name, failure in facts["failures"].items() if failure)
    layouts = facts["layouts"] or {"a": "", "b": ""}
    if all(layouts.values()) and layouts["a"] != layouts["b"]:
        yield "layout", f"{layouts['a']} in A; {layouts['b']} in B"
    if facts["keys"] is not None:
        texts = _keys_text(facts, "B")
        # A run whose layout changed had other keys before.
        has_changed = any(", then " in text for text in layouts.values())
        none = "no key differs at the last starts" if has_changed else "no key differs"
        yield from (("" if number else "keys", text) for number, text in enumerate(texts or [none]))


def _keys_text(facts: Mapping[str, Any], name: str) -> list[str]:
    return [
        f"{key}: {beginning(json.dumps(a))} in A, {beginning(json.dumps(b))} in {name}" for key, a, b in facts["keys"]
    ]


def _not_finite(pair: _Pair) -> str:
    count = units.counted(len(pair.not_finite), _UNITS[pair.x])
    return f"the loss is not finite at {count}, first at {_place(pair.x, pair.not_finite[0])}"


def _print_table(
    names: Mapping[str, str], curves: Mapping[str, Points], pairs: Sequence[_Pair], facts: Sequence[Any]
) -> None:
    x = pairs[0].x
    rows = [[text, _extent(curves[name], x), f"{[*curves[name].values()][-1]:.6g}"] for name, text in names.items()]
    for row, pair, pair_facts in zip(rows[1:], pairs, facts, strict=True):
        last, largest = pair_facts["last"], pair_facts["largest"]
        beyond = f"beyond at {units.counted(len(pair_facts['beyond']), _UNITS[x])}"
        result = "within" if pair_facts["within"] else beyond if pair_facts["beyond"] else "not equal to the bit"
        row += [
            f"{last['difference']:+.4g} at {_place(x, last[x])}",
            f"{largest['difference']:.3g} at {_place(x, largest[x])}",
            _not_finite(pair) if pair.not_finite else result,
        ]
    rows[0] += ["", "", ""]
    largest_of = "largest |A - it| / |it|"
    tolerance = f"tolerance {facts[0]['tolerance']:g}"
    output.table(rows, ("", f"{_UNITS[x]}s", "final loss", "last minus A", largest_of, tolerance))
    for pair, pair_facts in zip(pairs, facts, strict=True):
        if pair_facts["keys"] is not None:
            output.line(f"{pair.name}: {'; '.join(_keys_text(pair_facts, pair.name)) or 'no key differs from A'}")
    failures = [("A", facts[0]["failures"]["a"])]
    failures += [(pair.name, pair_facts["failures"]["b"]) for pair, pair_facts in zip(pairs, facts, strict=True)]
    for name, failure in failures:
        output.line(f"{name} failed {failure}") if failure else None


def _tolerance(arguments: argparse.Namespace) -> float:
    tolerance: float | None = arguments.tolerance
    if arguments.bits and tolerance is not None:
        raise ConfigError(f"--tolerance ({tolerance}) must be left out with --bits, which allows no difference")
    if tolerance is None:
        return 0.0 if arguments.bits else _TOLERANCE
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"--tolerance ({tolerance}) must be a number from 0, such as 0.01 for 1 %")
    return tolerance


def _first_of_growth(differences: Mapping[float, float]) -> float | None:
    """Return the step from which a difference grows that was no more than rounding before; None if none does so.

    A difference that begins with a jump, or that is no larger at the end than where it began, has another cause.
    """
    steps = sorted(differences)
    first = next((number for number, step in enumerate(steps) if differences[step] > _ROUNDING), 0)
    if first < _LEAST_AGREEING or differences[steps[first]] > _JUMP:
        return None
    return steps[first] if max(differences[step] for step in steps[first:]) > differences[steps[first]] else None


def _growth(differences: Mapping[float, float], grows_from: float) -> str:
    agreeing = [step for step in differences if step < grows_from]
    return (
        f"steps {min(agreeing):,} to {max(agreeing):,} agree within {_ROUNDING:g}, and the difference grows from step "
        f"{grows_from:,}: rounding that training amplifies looks like this; train.bitwise=true tells it from a fault"
        f"{see('training#difference-grows')}"
    )


def _failure(run: RunDirectory) -> str | None:
    failure = failure_of(run.recorded_failure(), last_event(run.path, "start") or {})
    return None if failure is None else failure.sentence


def _records_of(run: RunDirectory) -> StateRecords | None:
    if not (run.path.is_dir() and run.metrics.exists()):
        return None
    # Costly to import, for folders of runs alone.
    from shardwise.runs.state_records import StateRecords

    return StateRecords.of(run)


def _compare_norms(a: StateRecords | None, b: StateRecords | None) -> dict[str, Any]:
    if a is None or b is None:
        return {"steps": 0, "first_difference": None, "not_compared": _missing(a, b)}
    steps = [step for step in a.norms if step in b.norms]
    # A norm that is not a number in both is equal.
    pairs = {step: (repr(a.norms[step]), repr(b.norms[step])) for step in steps}
    first = next((step for step, (norm_a, norm_b) in pairs.items() if norm_a != norm_b), None)
    return {"steps": len(steps), "first_difference": first}


def _compare_states(a: StateRecords | None, b: StateRecords | None) -> dict[str, Any]:
    steps = [] if a is None or b is None else [step for step in a.hashes if step in b.hashes]
    if a is None or b is None or not steps:
        return {"steps": 0, "first_difference": None, "tensors": [], "not_compared": _missing(a, b)}
    from shardwise.runs.state_records import differing_tensors

    first = next((step for step in steps if a.hashes[step].text != b.hashes[step].text), None)
    tensors = [] if first is None else differing_tensors(a.hashes[first], b.hashes[first])
    return {"steps": len(steps), "first_difference": first, "tensors": tensors}


def _missing(a: StateRecords | None, b: StateRecords | None) -> str:
    if a is None or b is None:
        return "A and B must be folders of runs, without --shift"
    lacking = [name for name, records in (("A", a), ("B", b)) if not records.hashes]
    if not lacking:
        return "no step has hashes in both"
    has = f"{listing(lacking)} {'have' if len(lacking) > 1 else 'has'}"
    return f"{has} no hashes; log.state_hash_every=N records them"


def _compared_text(facts: Mapping[str, Any], which: str) -> str:
    if "not_compared" in facts:
        return f"not compared: {facts['not_compared']}"
    if facts["first_difference"] is None:
        return f"equal to the bit at all {units.counted(facts['steps'], 'step')} {which}"
    place = f"differ first at step {facts['first_difference']:,}"
    if "tensors" in facts:
        place += f", in {listing(facts['tensors'], most=3) or 'the place in the data or the seed'}"
    return place


_UNITS = {"step": "step", "tokens": "point", "time": "point"}


def _place(x: str, place: float) -> str:
    if x == "time":
        return units.duration(place)
    return f"step {place:,}" if x == "step" else f"{units.count(place)} tokens"


def _extent(curve: Mapping[float, float], x: str) -> str:
    if x == "step":
        return f"{units.counted(len(curve), 'step')}, {min(curve):,} to {max(curve):,}"
    return f"{units.counted(len(curve), 'point')}, {_place(x, min(curve))} to {_place(x, max(curve))}"


def _draw(
    file: Path,
    names: Mapping[str, str],
    curves: Mapping[str, Points],
    pairs: Sequence[_Pair],
    arguments: argparse.Namespace,
    tolerance: float,
) -> None:
    # Costly to import, for a plot alone.
    from shardwise.base.registered import optional_library
    from shardwise_watch.plot import STYLE, draw_curves, finish_axes

    matplotlib, figures = (
        optional_library(name, "--plot needs", "plot") for name in ("matplotlib", "matplotlib.figure")
    )
    x, log = arguments.x, arguments.log or ""
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        draw_curves(above, {names[name]: curve for name, curve in curves.items()}, arguments.smooth, broad=1)
        finish_axes(above, "training loss", x, log)
        above.set_xlabel("")
        if len(pairs) > 1:
            # A label with this beginning has no place in a legend: the colours are those above.
            draw_curves(below, {f"_{pair.name}": pair.signed for pair in pairs}, first=1)
            finish_axes(below, "loss minus A", x, log.replace("y", ""))
        else:
            differences = pairs[0].differences
            largest = max(differences, key=differences.__getitem__)
            draw_curves(below, {"": differences}, first=2)
            label = f"largest: {differences[largest]:.3g} at {_place(x, largest)}"
            below.plot([largest], [differences[largest]], "o", color=below.lines[0].get_color(), label=label)
            below.axhline(tolerance, color=_GREY, linestyle="--", label=f"tolerance: {tolerance:g}")
            finish_axes(below, "|A − B| / |B|", x, log.replace("y", "") + "y" * (differences[largest] > 0))
        try:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})
        except OSError as error:
            raise ConfigError(f"--plot ({file}) cannot be written: {files.reason_of(error)}") from None


def _draw_in_terminal(
    names: Mapping[str, str], curves: Mapping[str, Points], pairs: Sequence[_Pair], arguments: argparse.Namespace
) -> None:
    # Costly to import, for a drawing alone.
    from rich.console import Console

    from shardwise_watch.screen.drawing import OVERLAY_COLOURS, draw_curve_overlay

    console = Console(highlight=False, markup=False)
    log = arguments.log or ""
    minus_a = {"A": {}, **{pair.name: pair.signed for pair in pairs}}
    shown = [("training loss", curves, log), ("minus A", minus_a, log.replace("y", ""))]
    for title, shown_curves, logarithmic in shown:
        for line in draw_curve_overlay(title, shown_curves, console.width, arguments.x, logarithmic):
            console.print(line, no_wrap=True, crop=True)
    for number, name in enumerate(names.values()):
        console.print(f" {printable(name)}", style=OVERLAY_COLOURS[number % len(OVERLAY_COLOURS)], soft_wrap=True)
