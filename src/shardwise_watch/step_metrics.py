"""The metrics of a training step: one table that all readers of a run ask, and the steps as columns of numbers.

reader                      metrics
`monitor`, Prometheus       all of them, in the order of the table
`report`, its pictures      those with a `title`
`top`                       those of `SCREEN_CURVES`

A curve has few columns, so that a spike stays visible however many steps there are.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.runs.events import number, seconds_of


@dataclass(frozen=True)
class StepMetric:
    """A number of "step" events in `metrics.jsonl`, as reports and screens show it."""

    name: str  # key in the event and in the JSON of `monitor`; Prometheus puts `shardwise_train_` before it
    help: str  # sentence that Prometheus shows
    title: str = ""  # heading of the chart in the report; empty for a metric that has no chart
    note: str = ""  # words under the heading
    is_share: bool = False  # True if charts show the number in percent
    is_cut: bool = True  # True if the chart may leave out a steep beginning that would hide the rest of the curve
    # True if each step records the metric, so that a number that is not finite tells of a training that diverged. A
    # metric that is None or NaN in a healthy run has False.
    is_in_every_step: bool = False


STEP_METRICS = (
    StepMetric("loss", "Loss of the last step.", "Training loss", is_in_every_step=True),
    # The beginning of the next one is its warm-up, which is as telling as the rest.
    StepMetric("lr", "Learning rate.", "Learning rate", is_cut=False),
    StepMetric("grad_norm", "Norm of the gradient, before it is clipped.", "Gradient norm", is_in_every_step=True),
    StepMetric("param_norm", "Norm of the parameters.", "Parameter norm", is_cut=False),
    StepMetric("tokens", "Tokens that have been consumed."),
    StepMetric("samples", "Samples that have been consumed."),
    StepMetric("tokens_per_second", "Tokens a second, over the last steps.", "Tokens per second", "mean of 10 steps"),
    StepMetric("samples_per_second", "Samples a second, over the last steps."),
    StepMetric("tokens_per_second_per_device", "Tokens a second on each device."),
    StepMetric("peak_tokens_per_second", "The most tokens a second so far."),
    StepMetric("mfu", "Model FLOPs utilization, from 0 to 1.", "MFU", is_share=True),
    StepMetric("step_seconds", "Seconds of the last step.", "Seconds of a step"),
    StepMetric("peak_memory_bytes", "The most memory of rank 0 so far."),
    StepMetric(
        "bubble", "The share of the step in which pipeline ranks waited for others.", "Pipeline bubble", is_share=True
    ),
    StepMetric("expert_load_max", "Largest load of an expert over the mean.", "Largest load over its block's mean"),
    StepMetric("expert_idle", "The share of experts without a token.", "Experts without a token", is_share=True),
    StepMetric("expert_entropy", "Entropy of routers' scores; 1: all are equal.", "Router entropy (1: equal scores)"),
    StepMetric(
        "loss_spike",
        "Standard deviations of the loss above the mean of the last steps.",
        "Loss spike score",
        is_cut=False,
    ),
)
"""The order is that of the JSON of `monitor`, of Prometheus, and of the charts in the report."""
STEP_METRIC_NAMES = tuple(metric.name for metric in STEP_METRICS)
REPORT_CURVES = tuple(metric for metric in STEP_METRICS if metric.title)
SPARSE_METRICS = {
    "expert_load_max": "largest load ×{:.2f}", "expert_idle": "{:.1%} idle", "expert_entropy": "entropy {:.3f}",
}  # fmt: skip
"""Metrics that only sparse models record → their words in the row of `top` that shows them."""
SPARSE_ROW = "experts"
SCREEN_CURVES = ("loss", "tokens_per_second", "grad_norm")
PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Parts of a step's time (`split_seconds`), in the order in which they are shown."""


@dataclass
class StepSeries:
    """The steps of a run as columns, which take little memory; steps that were undone are left out."""

    steps: array[int] = field(default_factory=lambda: array("q"))  # numbers of the steps, growing
    # Time at which each step was recorded, in seconds since the epoch; NaN if it is unknown.
    seconds: array[float] = field(default_factory=lambda: array("d"))
    # Seconds of training up to each step, without those between two starts and of steps that were undone.
    elapsed: array[float] = field(default_factory=lambda: array("d"))
    began: float = math.nan  # time of the last start, in seconds since the epoch; NaN if it is unknown
    # Values of each metric of `STEP_METRICS` by its name, one for each step; NaN if a step has none.
    numbers: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in STEP_METRIC_NAMES})
    # Seconds of each of `PARTS`, one for each step; NaN if a step has none.
    parts: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PARTS})
    # Loss of each source of a mixture by its name, one for each step; NaN if a step has none.
    sources: dict[str, array[float]] = field(default_factory=dict)
    balance: dict[str, array[float]] = field(default_factory=dict)  # balance losses of routers, likewise

    def add(self, event: Mapping[str, Any]) -> None:
        """Add a "step" event; known steps from its number on are undone."""
        step = event["step"]
        if self.steps and self.steps[-1] >= step:
            self.undo_after(step - 1)
        self.steps.append(step)
        at = seconds_of(event)
        # After the record before, only the time since the last start counts.
        since = max((time for time in (self.began, *self.seconds[-1:]) if time <= at), default=at)
        self.elapsed.append((self.elapsed[-1] if self.elapsed else 0.0) + at - since)
        self.seconds.append(at)
        _append_fields(self.numbers, event)
        split = event.get("split_seconds")
        _append_fields(self.parts, split if isinstance(split, dict) else {})
        if (sources := event.get("sources")) or self.sources:
            named = sources.items() if isinstance(sources, dict) else ()
            self._add(self.sources, {name: source.get("loss") for name, source in named if isinstance(source, dict)})
        if (losses := event.get("balance_losses")) or self.balance:
            self._add(self.balance, losses if isinstance(losses, dict) else {})

    def _add(self, columns: dict[str, array[float]], fields: Mapping[str, Any]) -> None:
        for name in fields:
            # A branch may have a source that its parent had not.
            columns.setdefault(name, array("d", [math.nan]) * (len(self.steps) - 1))
        _append_fields(columns, fields)

    def undo_after(self, step: int) -> None:
        """Forget the steps after `step`: the run went back to it."""
        kept_count = len(self.steps)
        while kept_count and self.steps[kept_count - 1] > step:
            kept_count -= 1
        if kept_count < len(self.steps):
            del self.steps[kept_count:]
            for columns in (
                self.numbers,
                self.parts,
                self.sources,
                self.balance,
                {"": self.seconds, "elapsed": self.elapsed},
            ):
                for values in columns.values():
                    del values[kept_count:]

    def mean_parts(self, begin: int, stop: int | None = None) -> dict[str, float]:
        means = {name: mean_of_known(finite_values(values[begin:stop])) for name, values in self.parts.items()}
        return {name: seconds for name, seconds in means.items() if seconds is not None}


def _append_fields(columns: Mapping[str, array[float]], fields: Mapping[str, Any]) -> None:
    for name, values in columns.items():
        value = fields.get(name)
        # A long run has millions of values, nearly all of them floats: these skip the call of a function.
        values.append(value if type(value) is float else number(value))


class CurveColumn(NamedTuple):
    """The values of consecutive steps in a column of a drawn curve."""

    step: float  # last step of the column
    # least, mean, largest: figures of the finite values in the column.
    least: float
    mean: float
    largest: float


@dataclass(frozen=True)
class StepCurve:
    """A number over the steps of a run, to be drawn."""

    columns: Sequence[CurveColumn | None]  # columns in the order of steps; None for one without a finite value
    dots: Sequence[tuple[float, float]] = ()  # (step, value) of single values, such as evaluations
    breaks: tuple[float, float] | None = None  # first and last step at which the number is not finite
    span: tuple[int, int] = (0, 0)  # first and last step that the columns cover

    @property
    def known(self) -> list[CurveColumn]:
        """Columns with a finite value."""
        return [column for column in self.columns if column is not None]


def ranges_of_equal_counts(length: int, count: int) -> list[tuple[int, int]]:
    """Cut `length` positions of a curve into at most `count` ranges of equal length; returns begin and stop of each."""
    count = min(length, count)
    return [(column * length // count, (column + 1) * length // count) for column in range(count)]


def ranges_of_equal_widths(steps: Sequence[int], span: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Cut the positions of a curve's growing `steps` within `span` into `count` ranges of equally many steps.

    A range is empty if no step was recorded in it, as with `log.every=10`.
    """
    first, last = span
    width = column_width(span, count)
    ranges = []
    begin = bisect_left(steps, first)
    for column in range(count):
        # The last column ends with the span: the rounding of its width must lose no step.
        end = first + (column + 1) * width if column + 1 < count else last + 1
        stop = bisect_left(steps, end, begin)
        ranges.append((begin, stop))
        begin = stop
    return ranges


def column_width(span: tuple[int, int], count: int) -> float:
    """Steps of each of `count` columns that cover a span."""
    first, last = span
    return max(1, last - first + 1) / count


def reduce_to_columns(
    steps: Sequence[float], values: Sequence[float], ranges: Sequence[tuple[int, int]]
) -> list[CurveColumn | None]:
    """Reduce each range of positions to its last step and to the least, mean and largest finite value in it."""
    columns: list[CurveColumn | None] = []
    for begin, stop in ranges:
        finite = finite_values(values[begin:stop])
        if not finite:
            columns.append(None)
            continue
        least = min(finite)
        largest = max(finite)
        # Rounding may put the mean outside of the two.
        mean = min(max(sum(finite) / len(finite), least), largest)
        columns.append(CurveColumn(steps[stop - 1], least, mean, largest))
    return columns


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the recorded values of a watched run that are known; None without one."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def finite_values(values: Sequence[float]) -> Sequence[float]:
    # The first test runs at the speed of C, and nearly all parts of a curve pass it.
    return values if all(map(math.isfinite, values)) else [value for value in values if math.isfinite(value)]
