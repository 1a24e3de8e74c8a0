"""The curves of a report as PNG files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.runs.step_metrics import REPORT_CURVES


def draw(reports: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw each curve that has a value into `folder`; returns the files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("--png needs matplotlib, which is not installed: pip install 'shardwise[plot]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for metric in REPORT_CURVES:
        name = metric.name
        curves = {str(report["run"]): report["curves"][name] for report in reports if report["curves"][name]}
        if not curves:
            continue
        figure = figures.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for label, rows in curves.items():
            steps, least, mean, largest = zip(*rows, strict=True)
            (line,) = axes.plot(steps, mean, label=label, lw=1.2, marker="." if len(rows) == 1 else "")
            axes.fill_between(steps, least, largest, color=line.get_color(), alpha=0.2, lw=0)
        axes.set_xlabel("step")
        axes.set_ylabel(metric.axis_label)
        axes.grid(alpha=0.25)
        if len(curves) > 1:
            axes.legend()
        file = folder / f"{name}.png"
        figure.savefig(file, dpi=150)
        files.append(file)
    return files
