"""The texts of a plan: its cells in a table, its sentences, and its facts as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardwise.base import units
from shardwise.base.errors import listing
from shardwise.base.terminal import wrap_words
from shardwise.cli import output
from shardwise_plan.device_specs import pipeline_warnings
from shardwise_plan.goodput import best_checkpoint_interval
from shardwise_plan.plan import Plan

_COLUMNS = 80  # columns that a plan is printed in, also into a file
_LEAST_WHOLE_COST = 100  # price from which on hundredths are not shown
_ACCURACY_PAGE = "docs/planner.md#how-far-off-it-is"
_PUBLISHED_ERROR = 0.14
"""Size of the error, relative to the measured step, that nine in ten published runs do not exceed: see the page."""
_PUBLISHED_ACCURACY = (
    f"nine in ten published steps on A100 to GB300 and Trainium1 were predicted within {_PUBLISHED_ERROR:.0%}"
)
_SPARSE_ACCURACY = (
    "48 published steps of sparse models on H100 to GB300 were predicted within 21% in the mean, nine in ten of them "
    "within 40%; releases of one program differ as much"
)
_NOT_COMPARED = "no published run on this device was compared; `shardwise plan RUN` compares one of yours"


def print_prose(text: str, indent: str = "") -> None:
    """Print a sentence of a plan in lines of 80 columns; `indent` begins all of them but the first."""
    for line in wrap_words(text, _COLUMNS, indent):
        output.line(line)


def print_blocks(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str], str]], title: str, indent: int) -> None:
    """Print plans in lines of 80 columns: a title with figures to its right, and below it what else there is to say.

    `rows`: title, figures and further text of each; `title` and `head` are the names of titles and figures.
    """
    widths = [max(map(len, column)) for column in zip(head, *(cells for _, cells, _ in rows), strict=True)]
    room = _COLUMNS - sum(widths) - 2 * len(widths)
    for text, cells, further in ((title, head, ""), *rows):
        if len(text) > room:
            output.line(text)
            text = ""
        figures = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        output.line(f"{text:<{room}}{figures}")
        margin = " " * indent
        print_prose(f"{margin}{further}", margin)


# ---- cells


def duration(seconds: float) -> str:
    return units.duration(seconds) if math.isfinite(seconds) else "forever"


def _cost_cell(plan: Plan) -> str:
    if plan.cost is None:
        return ""
    return f"{plan.cost:,.0f}" if plan.cost >= _LEAST_WHOLE_COST else f"{plan.cost:,.2f}"


def _currency(plan: Plan) -> str:
    price = plan.cluster.device.price
    return "" if price is None else price.currency


def cost_text(plan: Plan) -> str:
    """The price of a planned training with its currency; empty if that of the device is unknown."""
    return f"{_cost_cell(plan)} {_currency(plan)}".strip()


def plan_cells(plan: Plan) -> tuple[str, ...]:
    """The cells of a plan, under the head of `plan_columns`."""
    cells = (
        units.step_duration(plan.time.total),
        "" if plan.mfu is None else f"{plan.mfu:.1%}",
        f"{'!' if plan.is_tight else ''}{units.size(plan.headroom)}",
        duration(plan.calendar.seconds),
    )
    return cells if plan.cost is None else (*cells, _cost_cell(plan))


def plan_columns(plan: Plan) -> tuple[str, ...]:
    names = ("step", "MFU", "free", "time")
    return names if plan.cost is None else (*names, _currency(plan))


def hours_text(plan: Plan) -> str:
    return f"{plan.device_hours:,.0f} device-hours"


# ---- sentences


def price_text(plan: Plan) -> str:
    """Return what the price of a plan is for, in words; empty if it is unknown."""
    machines = plan.cluster
    price = machines.device.price
    if price is None:
        return ""
    return (
        f"Price: {price.amount:,.10g} {price.currency} an hour for a {price.unit}, {machines.price_per_hour:,.10g} "
        f"{price.currency} an hour for {units.counted(machines.priced_units, price.unit)}. A node has "
        f"{units.counted(machines.per_node, 'device')}."
    )


def network_text(plan: Plan) -> str:
    device = plan.cluster.device
    inside = f"{device.node.bandwidth / 1e9:g} GB/s inside a node ({device.node.topology})"
    if device.network is None or plan.cluster.nodes == 1:
        return inside
    return f"{device.network.bandwidth / 1e9:g} GB/s between nodes ({device.network.topology}) and {inside}"


def calendar_text(plan: Plan) -> str:
    """Return the assumptions of a plan's time on the calendar: checkpoints and failures."""
    calendar = plan.calendar
    source = "as the recipe says" if calendar.is_given else "the interval that costs least"
    if calendar.write > calendar.interval + calendar.stall:
        source += f"; storing one takes {units.duration(calendar.write)}, for which the next one waits"
    has_failures = math.isfinite(calendar.between_failures)
    if has_failures and calendar.is_given:
        least = best_checkpoint_interval(calendar.stall, calendar.write, calendar.between_failures)
        source += f"; every {units.duration(least)} costs least"
    text = f"checkpoints every {units.duration(calendar.interval)} ({source})"
    if calendar.interval >= calendar.steps + calendar.evaluations:
        text = "one checkpoint after the last step"
    if not has_failures:
        return f"{text}, no failures: goodput {calendar.goodput:.1%}"
    return (
        f"{text}, a failure every {units.duration(calendar.between_failures)}: goodput {calendar.goodput:.1%}. "
        f"Assumed are {plan.cluster.device.reliability.text()}"
    )


def plan_warnings(plans: Iterable[Plan]) -> list[str]:
    """Return what the marks of some plans mean, and what published runs with their sharding took."""
    sentences = []
    if any(plan.is_tight for plan in plans):
        sentences.append('"!": less than 10% of the device\'s memory is free.')
    if any(plan.frees_parts for plan in plans):
        sentences.append("ZeRO-2 and ZeRO-3: published runs with them took about 10% longer than predicted.")
    return sentences


def pipeline_sentences(plans: Iterable[Plan]) -> list[str]:
    """Return warnings of pipelines that the devices of proposed plans may refuse."""
    told = [row for plan in plans for row in pipeline_warnings(str(plan.cluster), plan.layout.pipeline)]
    return [text for _, text in dict.fromkeys(told)]


def has_published_error(plan: Plan) -> bool:
    """Return whether the accuracy of a plan is that of published runs, and not that of one device alone."""
    device = plan.cluster.device
    is_sparse = plan.config.known_shapes.is_sparse
    return device.compared_runs > 0 and not is_sparse and not (device.accuracy and plan.cluster.world == 1)


def time_range_text(plan: Plan) -> str:
    """Return times and prices of a training with the error of published runs; empty if these do not count."""
    if not has_published_error(plan):
        return ""
    least, most = published_error_ratios(plan)
    text = f"{duration(plan.calendar.seconds * least)} to {duration(plan.calendar.seconds * most)}"
    if plan.cost is None:
        return text
    return f"{text} and {plan.cost * least:,.0f} to {plan.cost * most:,.0f} {_currency(plan)}"


def published_error_text(plan: Plan) -> str:
    """Return the error of a prediction for published runs, such as `-12% to +16%`."""
    least, most = published_error_ratios(plan)
    return f"{least - 1:+.0%} to {most - 1:+.0%}"


def published_error_ratios(plan: Plan) -> tuple[float, float]:
    """Return the ratios of the measured to the planned time at the two ends of the error of published runs."""
    error = plan.cluster.device.compared_error or _PUBLISHED_ERROR
    return 1 / (1 + error), 1 / (1 - error)


def accuracy_text(plan: Plan) -> str:
    """Return the errors of predictions for a plan's device."""
    device = plan.cluster.device
    if plan.config.known_shapes.is_sparse:
        return _SPARSE_ACCURACY
    published = _PUBLISHED_ACCURACY if device.compared_runs else _NOT_COMPARED
    if device.compared_error:
        runs = f"{device.compared_runs} published steps on {device.name}"
        published = f"nine in ten of {runs} were predicted within {device.compared_error:.0%}"
    if not device.accuracy:
        return published
    # The sentence of a file is on one device.
    return device.accuracy if plan.cluster.world == 1 else f"{device.accuracy}; {published}"


def accuracy_sentences(plans: Iterable[Plan], consequence: str = "", source: str = _ACCURACY_PAGE) -> list[str]:
    """Sentences on how far plans can be trusted, what it means for them, and the page that says more (`source`)."""
    names: dict[str, list[str]] = {}
    for plan in plans:
        names.setdefault(accuracy_text(plan), []).append(plan.cluster.device.name)
    sentences = [
        f"Accuracy{f' for {listing(devices)}' if len(names) > 1 else ''}: {text}" for text, devices in names.items()
    ]
    sentences[-1] += f"{consequence} ({source})"
    return sentences
