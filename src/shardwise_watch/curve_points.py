"""Curves of several runs over one axis: places on it, smoothing, and how far each is from the first."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

from shardwise.base.errors import ConfigError, listing, nearest_name
from shardwise_watch.step_metrics import StepSeries

AXES = {"step": "step", "tokens": "tokens", "time": "seconds of training"}
"""Titles of the axes by their names. The time is that of steps that count, without that between two starts."""
SCALES = ("x", "y", "xy")

Points = Mapping[float, float]
"""Finite values by their places on the axis, which grow."""


def require_curve_options(x: object, smoothing: object, scale: str | None, names: Mapping[str, str]) -> None:
    """Refuse an axis, a smoothing or a logarithmic scale of drawn curves that there is not.

    `names`: what the caller's user calls `x`, `smoothing` and `scale`.
    """
    if x not in AXES:
        near = nearest_name(str(x), AXES, cutoff=0.5)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{names['x']} ({x}) must be {listing(AXES, 'or')}{hint}")
    if not (isinstance(smoothing, int | float) and 0 <= smoothing < 1):
        raise ConfigError(f"{names['smoothing']} ({smoothing}) must be at least 0 and below 1; 0 smooths nothing")
    if scale and scale not in SCALES:
        raise ConfigError(f"{names['scale']} ({scale}) must be {listing(SCALES, 'or')}, the logarithmic axes")


def require_distinct_runs(paths: Sequence[object], runs: Sequence[object]) -> None:
    """Refuse a run that is named twice; `runs`: the same for two names of one run."""
    twice = next((path for number, path in enumerate(paths) if runs[number] in runs[:number]), None)
    if twice is not None:
        raise ConfigError(f"RUN ({twice}) must be named once: it is there twice")


def axis_places(series: StepSeries, x: str) -> Sequence[float]:
    """Return the place of each step of a run on the axis of a curve; NaN where it is unknown."""
    if x == "step":
        return series.steps
    return series.elapsed if x == "time" else series.numbers["tokens"]


def metric_points(series: StepSeries, metric: str, x: str) -> dict[float, float]:
    """Return the finite values of a metric over an axis; those at unknown places are left out."""
    pairs = zip(axis_places(series, x), series.numbers[metric], strict=True)
    return {place: value for place, value in pairs if math.isfinite(place) and math.isfinite(value)}


def smoothed_curves(curves: Mapping[str, Points], smoothing: float) -> dict[str, Points]:
    """Return the exponential moving mean of each curve that TensorBoard shows, divided by the sum of its weights.

    A value weighs `smoothing` times less at each further step of the first curve, as long as it is on the axis: curves
    with other distances between their points, such as runs of other batch sizes over tokens, are smoothed alike.
    """
    first = next(iter(curves.values()), {})
    spacing = statistics.median([b - a for a, b in pairwise(first)] or [1.0]) or 1.0
    result: dict[str, Points] = {}
    for name, points in curves.items():
        total = weight = 0.0
        before = math.inf
        means = {}
        for place, value in points.items():
            kept = smoothing ** min(1e3, max(0.0, place - before) / spacing)
            total = kept * total + (1 - smoothing) * value
            weight = kept * weight + (1 - smoothing)
            means[place] = total / weight
            before = place
        result[name] = means if smoothing else points
    return result


def curve_differences(points: Points, first: Points, x: str) -> dict[float, float]:
    """Return `points` minus the first curve where both are.

    Over steps these are the steps of both. Over another axis few places are in both: there the first curve is the line
    between its neighbouring points.
    """
    if x == "step":
        return {place: value - first[place] for place, value in points.items() if place in first}
    places = [*first]
    signed = {}
    for place, value in points.items():
        after = bisect_left(places, place)
        if after < len(places) and (after or places[0] == place):
            left, right = places[max(0, after - 1)], places[after]
            share = (place - left) / (right - left) if right > left else 1.0
            signed[place] = value - (first[left] + share * (first[right] - first[left]))
    return signed


def curve_label(number: int) -> str:
    """Return the letters of a curve: A to Z, then AA, AB and so on."""
    return (curve_label(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)
