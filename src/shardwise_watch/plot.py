"""Curves drawn by matplotlib: `Run.plot`, and the pictures of `compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing, nearest_name
from shardwise.base.registered import optional_library
from shardwise_watch import curve_points
from shardwise_watch.curve_points import Points
from shardwise_watch.report.chart import time_ticks
from shardwise_watch.run import open_run
from shardwise_watch.step_metrics import STEP_METRICS

# Colours of Okabe and Ito and three more, which colour-blind eyes tell apart; the ninth curve is dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#4d4d4d")
_LINES = ("-", "--", ":", "-.")
_FEW_POINTS = 60  # a curve with fewer points has dots: of a single one a line shows nothing
STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    # Ids of the picture are hashed with this salt, not with a random one: equal curves give equal files.
    "svg.hashsalt": "shardwise",
}


def plot_runs(paths: Sequence[Path], metric: str, x: str, smoothing: float, log: str | None, axes: Any) -> Any:
    """Draw a metric of runs on matplotlib's axes, which are returned (`shardwise.Run.plot`)."""
    curve_points.require_curve_options(x, smoothing, log, {"x": "x", "smoothing": "smoothing", "scale": "log"})
    metrics = {step_metric.name: step_metric for step_metric in STEP_METRICS}
    if metric not in metrics:
        near = nearest_name(str(metric), metrics, cutoff=0.5)
        raise ConfigError(f"metric ({metric!r}) must be {f'{near}, or ' if near else ''}one of {listing(metrics)}")
    folders = [path.resolve() for path in paths]
    curve_points.require_distinct_runs(paths, folders)
    names = [folder.name for folder in folders]
    curves = {}
    for path, folder in zip(paths, folders, strict=True):
        # Runs of one name are told apart by their folders.
        name = folder.name if names.count(folder.name) == 1 else str(path)
        curves[name] = curve_points.metric_points(open_run(path, all_steps=True).series, metric, x)
        if not curves[name]:
            raise ConfigError(f"{path} must record {metric} by {x}, and no step of it has a finite value")
    if axes is None:
        pyplot = optional_library("matplotlib.pyplot", "Run.plot needs", "plot")
        axes = pyplot.subplots(layout="constrained")[1]
    draw_curves(axes, curves, smoothing)
    finish_axes(axes, metrics[metric].title or metric, x, log)
    return axes


def draw_curves(
    axes: Any, curves: Mapping[str, Points], smoothing: float = 0.0, *, first: int | None = None, broad: int = 0
) -> None:
    """Draw curves by their labels; behind a smoothed one its values, pale.

    Args:
        first: number of the first curve's colour; None: that after the curves which are there.
        broad: how many of the first curves are broad and pale, so that they are seen where others cover them.
    """
    if first is None:
        first = sum(not str(line.get_label()).startswith("_") for line in axes.lines)
    shown = curve_points.smoothed_curves(curves, smoothing)
    for number, (name, points) in enumerate(curves.items()):
        look = {
            "color": COLOURS[(first + number) % len(COLOURS)],
            "linestyle": _LINES[(first + number) // len(COLOURS) % len(_LINES)],
            "marker": "." if len(points) < _FEW_POINTS else "",
        }
        if smoothing:
            axes.plot([*points], [*points.values()], **look, linewidth=0.8, alpha=0.25)
        width, alpha = (4, 0.45) if number < broad else (1.2, 1)
        axes.plot([*shown[name]], [*shown[name].values()], **look, label=name or None, linewidth=width, alpha=alpha)


def finish_axes(axes: Any, title: str, x: str, log: str | None) -> None:
    """Write the titles, the ticks and the legend of axes on which curves are drawn."""
    if "x" in (log or ""):
        axes.set_xscale("log")
    ticker = optional_library("matplotlib.ticker", "Run.plot needs", "plot")
    if "y" in (log or ""):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ticker.LogFormatter())
        axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
    axes.set_ylabel(title)
    axes.set_xlabel({"time": "time of training"}.get(x, x))
    if x == "tokens":
        axes.xaxis.set_major_formatter(ticker.EngFormatter())
    elif x == "time" and "x" not in (log or ""):
        places, texts = zip(*time_ticks(max(1e-3, axes.dataLim.x1)), strict=True)
        axes.set_xticks(places, texts)
    labels = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if labels:
        axes.legend(fontsize=None if len(labels) < 5 else "small")
