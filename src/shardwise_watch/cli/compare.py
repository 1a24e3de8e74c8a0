"""Compare the training losses of two runs, or of a run and a golden curve, over the steps that both have.

A and B are each a run's folder or a file with a loss curve: metrics.jsonl; text, CSV or JSON with one loss a line (from
step 1 on), or with steps and losses; trainer_state.json of transformers; Megatron-LM's golden values; TensorBoard's
event files, or the folder with them. If a step occurs twice, as in a run that was resumed, the last one counts.

The difference of a step is |A - B| / |B|. Exit code 0: no difference is greater than the tolerance; 1: a difference is
greater; 2: there is nothing to compare. With --bits, 1: a loss or a gradient norm differs in any bit, or a hash of the
state if both runs have hashes (log.state_hash_every). Without --bits the hashes are only shown.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import files, parsing, units
from shardwise.base.errors import ConfigError, listing, see
from shardwise.cli import output
from shardwise.runs.events import last_event
from shardwise.runs.failure import failure_of
from shardwise.runs.folder import RunDirectory, last_that_counts, read_config
from shardwise.runs.layout_spans import layout_spans, spans_text
from shardwise_watch.report.numbers import config_differences, difference

if TYPE_CHECKING:
    from shardwise.runs.state_records import StateRecords

_TOLERANCE = 0.01
_ROUNDING = 1e-5
"""Greatest relative difference of the losses of two layouts in float32, before training amplifies it."""
_JUMP = 1e-3
"""Difference at the first step beyond `_ROUNDING` from which on it is no rounding that has grown."""
_LEAST_AGREEING = 3
"""Steps at the beginning that must agree, so that a growth can be told from a difference that was always there."""
_FORMATS = (".png", ".svg")
# Okabe and Ito's blue, vermilion and green, which colour-blind eyes tell apart; a grey for lines that only help.
_COLORS = ("#0072b2", "#d55e00")
_GREEN = "#009e73"
_GREY = "#77797d"
_STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    # Ids of the picture are hashed with this salt, not with a random one: equal curves give equal files.
    "svg.hashsalt": "shardwise",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a run's folder, or a file with a loss curve")
    parser.add_argument("b", metavar="B", type=Path, help="a run's folder or a file that A is compared with")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help=f"the greatest difference allowed (default: {_TOLERANCE})"
    )
    parser.add_argument(
        "--loss", metavar="NAME", help="the column, key or scalar of B with the loss (default: one of the usual names)"
    )
    parser.add_argument(
        "--shift", metavar="N", type=int, default=0, help="add N to the steps of B: 1 if B counts them from 0"
    )
    parser.add_argument(
        "--bits",
        action="store_true",
        help="allow no difference in any bit, of losses, gradient norms and state hashes",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw both curves and their difference (.png, .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    paths = (arguments.a, arguments.b)
    tolerance = _tolerance(arguments)
    plot: Path | None = arguments.plot
    if plot is not None and plot.suffix not in _FORMATS:
        raise ConfigError(f"--plot ({plot}) must end in {listing(_FORMATS, 'or')}")
    a = read_curve(paths[0])
    b = {step + arguments.shift: loss for step, loss in read_curve(paths[1], arguments.loss).items()}
    differences = {step: difference(loss, b[step]) for step, loss in a.items() if step in b}
    if not differences:
        raise ConfigError(f"A and B must have steps in common: {paths[0]} has {_steps(a)}; {paths[1]} has {_steps(b)}")
    if plot is not None:
        _draw(plot, [(f"A: {paths[0]}", a), (f"B: {paths[1]}", b)], differences, tolerance)
    facts = _facts(arguments, a, b, differences, tolerance)
    # The states are shown where both runs have them, and count with --bits.
    if not facts["states"]["steps"] and not arguments.bits:
        del facts["states"]
    if arguments.json:
        output.json(facts)
    else:
        steps = [("A", f"{paths[0]}: {_steps(a)}"), ("B", f"{paths[1]}: {_steps(b)}"), ("both", _steps(differences))]
        output.table([*steps, *_rows(facts, differences)])
    return int(not facts["within"])


def _facts(
    arguments: argparse.Namespace,
    a: Mapping[int, float],
    b: Mapping[int, float],
    differences: Mapping[int, float],
    tolerance: float,
) -> dict[str, Any]:
    """The object of --json; it has "norms" with --bits alone."""
    paths = (arguments.a, arguments.b)
    largest = max(differences, key=differences.__getitem__)
    beyond = [step for step, difference in differences.items() if difference > tolerance]
    runs = [RunDirectory(path) for path in paths]
    are_runs = all(run.config.is_file() for run in runs)
    configs = [read_config(run) for run in runs] if are_runs else []
    may_be_rounding = bool(beyond) and not arguments.bits and not (configs and all(map(_is_bitwise, configs)))
    layouts = [spans_text(layout_spans(run.events("start", "resume"))) for run in runs] if are_runs else None
    records = (None, None) if arguments.shift else tuple(map(_records_of, runs))
    compared = {"norms": _compare_norms(*records)} if arguments.bits else {}
    compared["states"] = _compare_states(*records)
    is_equal = all(result["first_difference"] is None for result in compared.values())
    return {
        "a": str(paths[0]),
        "b": str(paths[1]),
        "steps": len(differences),
        "largest": {"difference": differences[largest], "step": largest, "a": a[largest], "b": b[largest]},
        "tolerance": tolerance,
        "beyond": beyond,
        "within": not beyond and (is_equal or not arguments.bits),
        "final": {name: {"step": max(curve), "loss": curve[max(curve)]} for name, curve in (("a", a), ("b", b))},
        "keys": config_differences(*configs) if are_runs else None,
        "grows_from": _first_of_growth(differences) if may_be_rounding else None,
        "failures": {name: _failure(run) for name, run in zip("ab", runs, strict=True)},
        "layouts": None if layouts is None else dict(zip("ab", layouts, strict=True)),
        **compared,
    }


def _rows(facts: Mapping[str, Any], differences: Mapping[int, float]) -> Iterator[tuple[str, str]]:
    final = ", ".join(
        f"loss {end['loss']:.8g} at step {end['step']:,} in {name.upper()}" for name, end in facts["final"].items()
    )
    largest = "{difference:.3g} at step {step:,}: loss {a:.8g} in A, {b:.8g} in B".format(**facts["largest"])
    yield from (("final", final), ("largest", largest))
    beyond = facts["beyond"]
    if "norms" in facts:
        firsts = [facts[name]["first_difference"] for name in ("norms", "states")]
        differing = [step for step in (*beyond[:1], *firsts) if step is not None]
        counts = f"losses of {units.counted(facts['steps'], 'step')}, gradient norms of {facts['norms']['steps']:,}"
        equal = f"equal to the bit: {counts}, states of {facts['states']['steps']:,}"
        yield "result", f"not equal to the bit, first at step {min(differing):,}" if differing else equal
        yield "norms", _compared_text(facts["norms"], "of both")
    elif beyond:
        steps = units.counted(len(beyond), "step")
        yield "result", f"beyond the tolerance ({facts['tolerance']:g}) at {steps}, first at step {beyond[0]:,}"
    else:
        yield "result", f"within the tolerance ({facts['tolerance']:g})"
    if facts["grows_from"] is not None:
        yield "growth", _growth(differences, facts["grows_from"])
    if "states" in facts:
        yield "states", _compared_text(facts["states"], "with hashes in both")
    yield from (("failed", f"{name.upper()} {failure}") for name, failure in facts["failures"].items() if failure)
    layouts = facts["layouts"] or {"a": "", "b": ""}
    if all(layouts.values()) and layouts["a"] != layouts["b"]:
        yield "layout", f"{layouts['a']} in A; {layouts['b']} in B"
    if facts["keys"] is not None:
        texts = [f"{key}: {_shown(json.dumps(a))} in A, {_shown(json.dumps(b))} in B" for key, a, b in facts["keys"]]
        # A run whose layout changed had other keys before.
        has_changed = any(", then " in text for text in layouts.values())
        none = "no key differs at the last starts" if has_changed else "no key differs"
        yield from (("" if number else "keys", text) for number, text in enumerate(texts or [none]))


def _tolerance(arguments: argparse.Namespace) -> float:
    """Return the greatest difference of a loss that is allowed: 0 with --bits."""
    tolerance: float | None = arguments.tolerance
    if arguments.bits and tolerance is not None:
        raise ConfigError(f"--tolerance ({tolerance}) must be left out with --bits, which allows no difference")
    if tolerance is None:
        return 0.0 if arguments.bits else _TOLERANCE
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance ({tolerance}) must be a number from 0, such as 0.01 for 1 %")
    return tolerance


def _first_of_growth(differences: Mapping[int, float]) -> int | None:
    """Return the step from which a difference grows that was no more than rounding before; None if none does so.

    A difference that begins with a jump, or that is no larger at the end than where it began, has another cause.
    """
    steps = sorted(differences)
    first = next((number for number, step in enumerate(steps) if differences[step] > _ROUNDING), 0)
    if first < _LEAST_AGREEING or differences[steps[first]] > _JUMP:
        return None
    return steps[first] if max(differences[step] for step in steps[first:]) > differences[steps[first]] else None


def _growth(differences: Mapping[int, float], grows_from: int) -> str:
    agreeing = [step for step in differences if step < grows_from]
    return (
        f"steps {min(agreeing):,} to {max(agreeing):,} agree within {_ROUNDING:g}, and the difference grows from step "
        f"{grows_from:,}: rounding that training amplifies looks like this; train.bitwise=true tells it from a fault"
        f"{see('training#difference-grows')}"
    )


def _failure(run: RunDirectory) -> str | None:
    """Say where and why the last start of a run failed; None without a failure, or if it is no run's folder."""
    failure = failure_of(run.recorded_failure(), last_event(run.path, "start") or {})
    return None if failure is None else failure.sentence


def _is_bitwise(config: Mapping[str, Any]) -> bool:
    """True if a run adds in one order at every layout: then no difference comes from rounding."""
    train = config.get("train")
    return isinstance(train, Mapping) and train.get("bitwise") is True


def _records_of(run: RunDirectory) -> StateRecords | None:
    """The gradient norms and state hashes of a run; None for a path that is not the folder of one."""
    if not (run.path.is_dir() and run.metrics.exists()):
        return None
    # Costly to import, for folders of runs alone.
    from shardwise.runs.state_records import StateRecords

    return StateRecords.of(run)


def _compare_norms(a: StateRecords | None, b: StateRecords | None) -> dict[str, Any]:
    """The gradient norms of two runs at the steps that both recorded, to the bit."""
    if a is None or b is None:
        return {"steps": 0, "first_difference": None, "not_compared": _missing(a, b)}
    steps = [step for step in a.norms if step in b.norms]
    # A norm that is not a number in both is equal.
    pairs = {step: (repr(a.norms[step]), repr(b.norms[step])) for step in steps}
    first = next((step for step, (norm_a, norm_b) in pairs.items() if norm_a != norm_b), None)
    return {"steps": len(steps), "first_difference": first}


def _compare_states(a: StateRecords | None, b: StateRecords | None) -> dict[str, Any]:
    """The state hashes of two runs at the steps that both have."""
    steps = [] if a is None or b is None else [step for step in a.hashes if step in b.hashes]
    if a is None or b is None or not steps:
        return {"steps": 0, "first_difference": None, "tensors": [], "not_compared": _missing(a, b)}
    from shardwise.runs.state_records import differing_tensors

    first = next((step for step in steps if a.hashes[step].text != b.hashes[step].text), None)
    tensors = [] if first is None else differing_tensors(a.hashes[first], b.hashes[first])
    return {"steps": len(steps), "first_difference": first, "tensors": tensors}


def _missing(a: StateRecords | None, b: StateRecords | None) -> str:
    """The reason why states, or gradient norms, are not compared."""
    if a is None or b is None:
        return "A and B must be folders of runs, without --shift"
    lacking = [name for name, records in (("A", a), ("B", b)) if not records.hashes]
    if not lacking:
        return "no step has hashes in both"
    has = f"{listing(lacking)} {'have' if len(lacking) > 1 else 'has'}"
    return f"{has} no hashes; log.state_hash_every=N records them"


def _compared_text(facts: Mapping[str, Any], which: str) -> str:
    """The result for gradient norms or for states; `which` says at which steps they are compared."""
    if "not_compared" in facts:
        return f"not compared: {facts['not_compared']}"
    if facts["first_difference"] is None:
        return f"equal to the bit at all {units.counted(facts['steps'], 'step')} {which}"
    place = f"differ first at step {facts['first_difference']:,}"
    if "tensors" in facts:
        place += f", in {listing(facts['tensors'], most=3) or 'the place in the data or the seed'}"
    return place


def _steps(curve: Mapping[int, float]) -> str:
    return f"{units.counted(len(curve), 'step')}, {min(curve):,} to {max(curve):,}"


def _draw(
    file: Path, curves: list[tuple[str, Mapping[int, float]]], differences: Mapping[int, float], tolerance: float
) -> None:
    """Draw the curves and, below them, their difference on a logarithmic scale."""
    # Costly to import, for a plot alone.
    from shardwise.base.libraries import optional_library

    matplotlib, figures = (
        optional_library(name, "--plot needs", "plot") for name in ("matplotlib", "matplotlib.figure")
    )
    largest = max(differences, key=differences.__getitem__)
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        # A is broad and pale: it is seen where B covers it.
        for (name, curve), color, width, alpha in zip(curves, _COLORS, (4, 1.2), (0.45, 1), strict=True):
            look = {"color": color, "linewidth": width, "alpha": alpha, "marker": _marker(curve)}
            above.plot([*curve], [*curve.values()], label=name, **look)
        above.set_ylabel("training loss")
        above.legend()
        below.plot([*differences], [*differences.values()], color=_GREEN, linewidth=1.2, marker=_marker(differences))
        label = f"largest: {differences[largest]:.3g} at step {largest:,}"
        below.plot([largest], [differences[largest]], "o", color=_GREEN, label=label)
        below.axhline(tolerance, color=_GREY, linestyle="--", label=f"tolerance: {tolerance:g}")
        if differences[largest] > 0:
            below.set_yscale("log")
        below.set_ylabel("|A − B| / |B|")
        below.set_xlabel("step")
        below.legend()
        try:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})
        except OSError as error:
            raise ConfigError(f"--plot ({file}) cannot be written: {files.reason_of(error)}") from None


def _marker(curve: Mapping[int, float]) -> str:
    """Dots where steps are few: of a single step a line shows nothing."""
    return "." if len(curve) < 60 else ""


LOSSES = ("loss", "train/loss", "reduced_train_loss", "train_loss", "step loss", "step_loss", "lm loss", "value")
"""What a curve's loss may be called; the first of these that a curve has is read."""
_STEPS = ("step", "global_step", "iteration")
_UNNAMED = {1: ("loss",), 2: ("step", "loss"), 3: ("time", "step", "loss")}
"""What the columns are that have no names, by their number; TensorBoard exports three."""

_Rows = Iterable[Mapping[str, Any]]


def read_curve(path: Path, name: str | None = None) -> dict[int, float]:
    """The loss of each step, in their order; where a step occurs twice, the last one counts, and none that was undone.

    Args:
        path: a run's folder, a file, or TensorBoard's events.
        name: what the loss is called; None: one of `LOSSES`.

    Raises:
        ConfigError: there is no curve, or a loss of it is no finite number.
    """
    loss_names = LOSSES if name is None else (name.strip().lower(),)
    curves: dict[str, dict[int, object]] = {}
    names: dict[str, None] = {}
    last = 0
    try:
        for number, row in enumerate(_recorded(path), 1):
            fields = {str(key).strip().lower(): value for key, value in row.items()}
            # A dict in place of a set: a message lists the names in the order of the file.
            names |= dict.fromkeys(fields)
            losses = {loss: fields[loss] for loss in loss_names if fields.get(loss) not in (None, "")}
            # An evaluation, or another scalar of TensorBoard.
            if not losses and fields.get("event") != "resume":
                continue
            at = next((fields[key] for key in _STEPS if key in fields), number)
            step = _whole(at, f"{path}: the step of row {number:,}")
            # A run that was resumed undid the steps after its checkpoint: they leave the curve.
            kept = last_that_counts(fields | {"step": step})
            if kept is not None and kept < last:
                curves = {loss: {at: curve[at] for at in curve if at <= kept} for loss, curve in curves.items()}
            last = step
            for loss, value in losses.items():
                curves.setdefault(loss, {})[step] = value
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {files.reason_of(error)}") from None
    except (UnicodeDecodeError, csv.Error):
        raise ConfigError(f"{path} must be text or JSON with numbers") from None
    chosen = next((loss for loss in loss_names if loss in curves), None)
    if not names or (chosen is not None and not curves[chosen]):
        raise ConfigError(f"{path} must hold a loss curve, and it has no values")
    if chosen is None:
        has = listing(map(_shown, names), most=10)
        raise ConfigError(
            f"{path} must call its loss {listing(loss_names, 'or')}, and it has {has}: for B, --loss says another name"
        )
    return {step: _finite(loss, f"{path}: the loss of step {step:,}") for step, loss in sorted(curves[chosen].items())}


def _shown(text: str) -> str:
    """The beginning of a text from the file, for a message."""
    return output.printable(text[:40])


def _finite(value: object, quantity: str) -> float:
    number = _float(str(value))
    if number is None or not math.isfinite(number):
        raise ConfigError(f"{quantity} ({_shown(str(value))}) must be a finite number")
    return number


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(value: object, quantity: str) -> int:
    number = _finite(value, quantity)
    if not number.is_integer():
        raise ConfigError(f"{quantity} ({value}) must be a whole number")
    return int(number)


def _recorded(path: Path) -> _Rows:
    if not path.exists():
        raise ConfigError(f"there is no {path}: name a run's folder or a file with a loss curve")
    if path.is_dir() and (path / "metrics.jsonl").exists():
        return (event for event in RunDirectory(path).events("step", "resume") if event.get("step") is not None)
    if any(path.glob("*tfevents*")) if path.is_dir() else "tfevents" in path.name:
        return _scalars(path)
    if path.is_dir():
        raise ConfigError(f"{path} must be a run's folder, which has metrics.jsonl, or hold TensorBoard's event files")
    text = path.read_text(encoding="utf-8-sig")
    return _of_json(path, text) if text.lstrip()[:1] in ("[", "{") else _of_table(path, text)


def _scalars(path: Path) -> _Rows:
    # Imported here, which takes two seconds.
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        SCALARS,
        EventAccumulator,
    )

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0}).Reload()
    for tag in events.Tags()[SCALARS]:
        yield from ({"step": event.step, tag: event.value} for event in events.Scalars(tag))


def _of_json(path: Path, text: str) -> _Rows:
    """Rows of one JSON value, or of a JSON object in each line, of which a run's metrics.jsonl has other events too."""
    try:
        value = parsing.json_value(text)
    except ValueError:
        value = _of_lines(path, text)
    if isinstance(value, Mapping) and isinstance(value.get("log_history"), list):
        # The trainer_state.json of transformers has its rows under this key.
        value = value["log_history"]
    for number, entry in enumerate(_of_columns(value) if isinstance(value, Mapping) else value, 1):
        numbers = entry if isinstance(entry, list) else [entry]
        if not isinstance(entry, Mapping) and (len(numbers) not in _UNNAMED or None in numbers):
            raise ConfigError(
                f"{path}: entry {number:,} ({_shown(json.dumps(entry))}) must be a loss, [step, loss], "
                "[time, step, loss] or an object with names"
            )
        row = entry if isinstance(entry, Mapping) else dict(zip(_UNNAMED[len(numbers)], numbers, strict=True))
        if row.get("event", "step") in ("step", "resume"):
            yield row


def _of_lines(path: Path, text: str) -> Iterator[Any]:
    is_run = text.startswith('{"event": ')
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                yield parsing.json_value(line)
        except ValueError as error:
            # A crash may have cut the last line of a run short.
            if is_run:
                continue
            raise ConfigError(
                f"{path} must be JSON, or have JSON in each line: line {number:,} ({_shown(line)}) is cut short or is "
                f"none ({error})"
            ) from None


def _of_columns(value: Mapping[str, Any]) -> _Rows:
    """Rows of an object with a list for each name, or a value for each step as in Megatron-LM's golden values."""
    columns = {name: entry for name, entry in value.items() if isinstance(entry, list)}
    if columns:
        return (dict(zip(columns, entries, strict=True)) for entries in zip_longest(*columns.values()))
    by_step = {name: entry.get("values", entry) for name, entry in value.items() if isinstance(entry, Mapping)}
    if value and all(name.isdigit() for name in value):
        by_step = {"loss": value}
    rows: list[Mapping[str, Any]] = [
        {"step": step, name: number}
        for name, steps in by_step.items()
        if isinstance(steps, Mapping)
        for step, number in steps.items()
    ]
    return rows or [value]


def _of_table(path: Path, text: str) -> _Rows:
    """Rows of lines with commas, semicolons, tabs or spaces between values; the first line may name them."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    mark = next((mark for mark in ",;\t" if lines and mark in lines[0]), None)
    table = [line.split() for line in lines] if mark is None else list(csv.reader(lines, delimiter=mark))
    names: Sequence[str] = _UNNAMED.get(len(table[0]), ()) if table else ()
    # The first row names the columns unless it begins with a number.
    if table and _float(table[0][0]) is None:
        names = table.pop(0)
    for number, cells in enumerate(table, 1):
        if len(cells) != len(names):
            needs = "a loss, or a step and a loss"
            if names:
                needs = f"{units.counted(len(names), 'value')}, as its first row has"
            raise ConfigError(
                f"{path}: row {number:,} ({units.counted(len(cells), 'value')}) must have {needs}: a loss curve is a "
                "run's folder, its metrics.jsonl, TensorBoard's events, JSON, or a table whose rows are equally long"
            )
        yield dict(zip(names, cells, strict=True))
