"""Compare the training losses of two runs, or of a run and a golden curve, over the steps that both have.

A and B are each a run's folder or a file with a loss curve: metrics.jsonl; text, CSV or JSON with one loss a line (from
step 1 on), or with steps and losses; trainer_state.json of transformers; Megatron-LM's golden values; TensorBoard's
event files, or the folder with them. Where a step occurs twice, as in a run that was resumed, the last one counts.

The difference of a step is |A - B| / |B|. Exit code 0: none is greater than the tolerance; 1: one is; 2: there is
nothing to compare.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import reason_of
from shardwise.base.units import counted
from shardwise.cli import output
from shardwise.cli.curve import read_curve
from shardwise.runs.report.numbers import difference

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
    "svg.hashsalt": "shardwise",  # equal curves give equal files
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a run's folder, or a file with a loss curve")
    parser.add_argument("b", metavar="B", type=Path, help="what A is compared with, likewise")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, default=0.01, help="the greatest difference allowed (default: 0.01)"
    )
    parser.add_argument(
        "--loss", metavar="NAME", help="the column, key or scalar of B with the loss (default: one of the usual names)"
    )
    parser.add_argument(
        "--shift", metavar="N", type=int, default=0, help="add N to the steps of B: 1 where B counts them from 0"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw both curves and their difference (.png, .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    paths = (arguments.a, arguments.b)
    tolerance = arguments.tolerance
    plot = arguments.plot
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance ({tolerance}) must be a number from 0, such as 0.01 for 1 %")
    if plot is not None and plot.suffix not in _FORMATS:
        raise ConfigError(f"--plot ({plot}) must end in {listing(_FORMATS, 'or')}")
    a = read_curve(paths[0])
    b = {step + arguments.shift: loss for step, loss in read_curve(paths[1], arguments.loss).items()}
    differences = {step: difference(loss, b[step]) for step, loss in a.items() if step in b}
    if not differences:
        raise ConfigError(f"A and B must have steps in common: {paths[0]} has {_steps(a)}; {paths[1]} has {_steps(b)}")
    largest = max(differences, key=differences.__getitem__)
    beyond = [step for step, difference in differences.items() if difference > tolerance]
    if plot is not None:
        _draw(plot, [(f"A: {paths[0]}", a), (f"B: {paths[1]}", b)], differences, tolerance)
    largest_difference = {"difference": differences[largest], "step": largest, "a": a[largest], "b": b[largest]}
    if arguments.json:
        names = {"a": str(paths[0]), "b": str(paths[1]), "steps": len(differences)}
        output.json(
            {**names, "largest": largest_difference, "tolerance": tolerance, "beyond": beyond, "within": not beyond}
        )
        return int(bool(beyond))
    result = f"within the tolerance ({tolerance:g})"
    if beyond:
        result = f"beyond the tolerance ({tolerance:g}) at {counted(len(beyond), 'step')}, first at step {beyond[0]:,}"
    rows = [
        ("A", f"{paths[0]}: {_steps(a)}"),
        ("B", f"{paths[1]}: {_steps(b)}"),
        ("both", _steps(differences)),
        ("largest", "{difference:.3g} at step {step:,}: loss {a:.8g} in A, {b:.8g} in B".format(**largest_difference)),
        ("result", result),
    ]
    output.table(rows)
    return int(bool(beyond))


def _steps(curve: Mapping[int, float]) -> str:
    return f"{counted(len(curve), 'step')}, {min(curve):,} to {max(curve):,}"


def _draw(
    file: Path, curves: list[tuple[str, Mapping[int, float]]], differences: Mapping[int, float], tolerance: float
) -> None:
    """Draw the curves and, below them, their difference on a logarithmic scale."""
    from shardwise.data.reading.content import optional_library  # costly to import, for a plot alone

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
            raise ConfigError(f"--plot ({file}) cannot be written: {reason_of(error)}") from None


def _marker(curve: Mapping[int, float]) -> str:
    """Dots where steps are few: of a single step a line shows nothing."""
    return "." if len(curve) < 60 else ""
