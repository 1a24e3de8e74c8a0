"""Curves of training losses: those of runs, and those in files of other programs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shardwise.base import files, units, yaml_and_json
from shardwise.base.errors import ConfigError, listing
from shardwise.base.terminal import printable
from shardwise.runs.folder import RunDirectory, last_kept_step
from shardwise_watch.curve_points import AXES, axis_places
from shardwise_watch.run import RunView
from shardwise_watch.step_metrics import StepSeries

LOSSES = ("loss", "train/loss", "reduced_train_loss", "train_loss", "step loss", "step_loss", "lm loss", "value")
"""What a curve's loss may be called; the first of these that a curve has is read."""
_STEPS = ("step", "global_step", "iteration")
_UNNAMED = {1: ("loss",), 2: ("step", "loss"), 3: ("time", "step", "loss")}
"""What the columns are that have no names, by their number; TensorBoard exports three."""

_Rows = Iterable[Mapping[str, Any]]


def read_loss(path: Path, name: str | None, x: str, shift: int = 0) -> tuple[dict[float, float], list[float]]:
    """The finite losses of a curve over an axis of `curve_points.AXES`, and the places of a run's losses that are not.

    Args:
        path, name: as for `read_curve_file`; over another axis than steps a run's folder or its metrics.jsonl.
        shift: added to the steps.

    Raises:
        ConfigError: as for `read_curve_file`, or the places on the axis are not known.
    """
    folder = path.parent if path.name == RunDirectory(path).metrics.name else path
    series = StepSeries()
    if name is None and RunDirectory(folder).metrics.exists():
        series = RunView(folder, all_steps=True).series
    elif x != "step":
        raise ConfigError(
            f"{path} must be a run's folder for --x {x}, without --loss: a curve in a file has steps alone"
        )
    pairs = zip(axis_places(series, x), series.numbers["loss"], strict=True)
    placed = [(place + shift, loss) for place, loss in pairs if math.isfinite(place)]
    points = {place: loss for place, loss in placed if math.isfinite(loss)}
    if x != "step" and not points:
        raise ConfigError(f"{path} must record {AXES[x]} and finite losses for --x {x}, and it does not")
    # A run without a loss is refused in the words for other curves.
    points = points or {step + shift: loss for step, loss in read_curve_file(path, name).items()}
    return points, [place for place, loss in placed if not math.isfinite(loss)]


def read_curve_file(path: Path, name: str | None = None) -> dict[int, float]:
    """The loss of each step in a curve's file; of a step that is there twice the last one, and none that was undone.

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
            kept = last_kept_step(fields | {"step": step})
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
        has = listing(map(beginning, names), most=10)
        raise ConfigError(
            f"{path} must call its loss {listing(loss_names, 'or')}, and it has {has}: for B, --loss says another name"
        )
    return {step: _finite(loss, f"{path}: the loss of step {step:,}") for step, loss in sorted(curves[chosen].items())}


def beginning(text: str) -> str:
    """The beginning of a text from a curve's file, for a message."""
    return printable(text[:40])


def _finite(value: object, quantity: str) -> float:
    number = _float(str(value))
    if number is None or not math.isfinite(number):
        raise ConfigError(f"{quantity} ({beginning(str(value))}) must be a finite number")
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
        value = yaml_and_json.json_value(text)
    except ValueError:
        value = _of_lines(path, text)
    if isinstance(value, Mapping) and isinstance(value.get("log_history"), list):
        # The trainer_state.json of transformers has its rows under this key.
        value = value["log_history"]
    for number, entry in enumerate(_of_columns(value) if isinstance(value, Mapping) else value, 1):
        numbers = entry if isinstance(entry, list) else [entry]
        if not isinstance(entry, Mapping) and (len(numbers) not in _UNNAMED or None in numbers):
            raise ConfigError(
                f"{path}: entry {number:,} ({beginning(json.dumps(entry))}) must be a loss, [step, loss], "
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
                yield yaml_and_json.json_value(line)
        except ValueError as error:
            # A crash may have cut the last line of a run short.
            if is_run:
                continue
            raise ConfigError(
                f"{path} must be JSON, or have JSON in each line: line {number:,} ({beginning(line)}) is cut "
                f"short or is none ({error})"
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
