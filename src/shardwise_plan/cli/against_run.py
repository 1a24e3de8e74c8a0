"""A run against its prediction, and the device whose constants explain it: `shardwise plan` of a run's folder."""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base import files, units
from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.config import Config, check_layout, config_from, stages_of
from shardwise_plan import device_files, device_seconds, device_specs
from shardwise_plan import plan as plans
from shardwise_watch.run import RunView, open_run


def compare_with_run(arguments: argparse.Namespace, machines: device_specs.Cluster) -> int:
    """Print predicted and measured, and write the corrected device where `--write` names a file.

    machines: cluster on which the run was.
    """
    other_options = (
        "overrides",
        "price",
        "budget",
        "objective",
        "failures",
        "restart",
        "why",
        "html",
        "plot",
        "layout",
    )
    if any(getattr(arguments, option) for option in other_options):
        raise ConfigError(
            "a run's folder must go without key=value, --price, --budget, --objective, --failures, --restart, --why, "
            "--html, --plot and --layout: the run is as it was"
        )
    run = open_run(Path(arguments.recipe), all_steps=True)
    if not run.config:
        raise ConfigError(f"RUN ({run.path}) must hold the configuration of the run, config.yaml")
    comparison = compare_run(run, config_from(run.config), machines)
    if arguments.json:
        output.json(_comparison_facts(comparison))
    else:
        _show_comparison(run.name, comparison)
    if arguments.write is not None:
        _write_device_file(arguments.write, comparison, run.name)
    elif not arguments.json:
        output.progress("--write FILE writes the device with constants that explain this run")
    return 0


def _show_comparison(name: str, comparison: Comparison) -> None:
    plan = comparison.plan
    output.prose(f"{name} on {plan.cluster}: {plan.text()}; medians of {comparison.steps:,} steps")
    output.line()
    seconds = [*comparison.parts.items(), ("step", comparison.total)]
    rows = [(part, *_cells(pair, "{:.4f}".format)) for part, pair in seconds]
    output.table(rows, ("seconds", "predicted", "measured", "error"), right=(1, 2, 3))
    output.line()
    sizes = [*comparison.state.items(), ("peak of a rank", comparison.peak)]
    memory = [(kind, *_cells(pair, units.size)) for kind, pair in sizes]
    output.table(memory, ("memory", "predicted", "measured", "error"), right=(1, 2, 3))
    if not plan.cluster.device.is_accelerator:
        output.line("On a CPU the measured peak is the whole process's, with Python and torch.")


def _cells(pair: tuple[float, float | None], shown: Callable[[float], str]) -> tuple[str, str, str]:
    """The predicted and the measured amount, and by how much the prediction is off."""
    predicted, measured = pair
    error = f"{predicted / measured - 1:+.1%}" if measured and predicted else ""
    return shown(predicted), "" if measured is None else shown(measured), error


def _comparison_facts(comparison: Comparison) -> dict[str, Any]:
    def named(pair: tuple[float, float | None]) -> dict[str, float | None]:
        return dict(zip(("predicted", "measured"), pair, strict=True))

    return {
        "steps": comparison.steps,
        "step_seconds": named(comparison.total),
        "parts_seconds": {part: named(pair) for part, pair in comparison.parts.items()},
        "memory_bytes": {kind: named(pair) for kind, pair in comparison.state.items()},
        "peak_memory_bytes": named(comparison.peak),
        "constants": corrected(comparison),
    }


def _write_device_file(path: Path, comparison: Comparison, name: str) -> None:
    constants = corrected(comparison)
    if not constants:
        raise ConfigError("--write needs a run that recorded the parts of its steps (split_seconds), this one did not")
    device_files.require_suffix(path, "--write")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"corrected {today} by run {name}, {comparison.steps} steps"
    files.write_new(path, device_specs.described(comparison.plan.cluster.device, constants, source), "--write")
    output.progress(f"wrote {path}; plan with: shardwise plan RECIPE --device {path}")


PARTS: Mapping[str, tuple[str, ...]] = {
    "computation": ("matmul", "attention", "memory_bound", "accumulation", "launch", "head", "recompute"),
    "communication": ("tensor", "context", "messages", "bubble", "reduction", "gather"),
    "optimizer": ("optimizer",),
    "data and other": (),
}
"""The parts of a prediction that a run's `split_seconds` records together, under each name that is shown."""
# The keys of `split_seconds` under the same names.
_RECORDED: Mapping[str, tuple[str, ...]] = {
    "computation": ("forward", "backward"),
    "communication": ("communication",),
    "optimizer": ("optimizer",),
    "data and other": ("data", "checkpoint", "other"),
}
# The first steps of a start compile, and fill caches.
_SKIPPED = 2
# By part, the constants to correct and whether they are rates: a larger rate takes less time.
_CORRECTS: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "computation": (("matmul", True), ("memory", True), ("fused_attention", True), ("host", False)),
    "communication": (("node", True), ("network", True)),
    "optimizer": (("update", True), ("step", False)),
}


@dataclass(frozen=True)
class Comparison:
    """A run's own figures and what was predicted of it, each as (predicted, measured).

    Attributes:
        plan: the prediction.
        steps: number of steps whose medians are compared.
        parts: seconds by part; measured is None where the run recorded no parts.
        total: seconds of a step.
        state: bytes of parameters, gradients and optimizer on the first rank, by kind.
        peak: bytes of the first rank at its peak; on a CPU the measured ones are the process's.
    """

    plan: plans.Plan
    steps: int
    parts: Mapping[str, tuple[float, float | None]]
    total: tuple[float, float]
    state: Mapping[str, tuple[int, int | None]]
    peak: tuple[int, int | None]


def compare_run(run: RunView, config: Config, cluster: device_specs.Cluster) -> Comparison:
    """Compare the steps that a run recorded with what is predicted of it on a cluster.

    Raises:
        ConfigError: it recorded too few steps, or is of a model whose shapes are not known.
    """
    ranks = run.start.get("ranks")
    if not isinstance(ranks, int) or ranks != cluster.world:
        raise ConfigError(
            f"--device must name as many devices as the run had ranks ({ranks}), and with --nodes it names "
            f"{cluster.world}: add :N to the device"
        )
    if len(stages_of(config)) > 1:
        raise ConfigError(f"RUN ({run.path}) must have steps of one size to be compared, and data.stages changes them")
    # A batch that is given by a rule depends on the number of ranks.
    config = config.with_batch_for(ranks)
    plan = plans.predicted(config, check_layout(config, ranks), cluster)
    if plan is None:
        raise ConfigError(f"model.family ({config.model.family}) must be one whose shapes are known to be predicted")
    seconds = run.series.numbers["step_seconds"]
    total = _median(seconds)
    if total is None:
        raise ConfigError(f"RUN ({run.path}) must have recorded more than {_SKIPPED} steps, it has {len(seconds)}")
    parts = {}
    for part, names in PARTS.items():
        predicted_seconds = float(sum(getattr(plan.time, name) for name in names))
        recorded = [_median(run.series.parts[key]) for key in _RECORDED[part]]
        parts[part] = (predicted_seconds, _sum_of_known(recorded))
    predicted_bytes = dict(plan.memory.rows())
    recorded_bytes = run.last.get("memory_bytes") or {}
    state = {
        kind: (predicted_bytes[kind], recorded_bytes.get(kind)) for kind in ("parameters", "gradients", "optimizer")
    }
    peak = (plan.memory.total, run.last.get("peak_memory_bytes"))
    return Comparison(plan, len(seconds) - _SKIPPED, parts, (plan.time.total, total), state, peak)


def corrected(comparison: Comparison) -> dict[str, float]:
    """Return constants with which the prediction of each part would be what was measured, within their ranges."""
    current = device_seconds.constants_of(comparison.plan.cluster.device)
    constants = {}
    for part, names in _CORRECTS.items():
        predicted_seconds, measured = comparison.parts[part]
        if measured is None or measured <= 0 or predicted_seconds <= 0:
            continue
        longer = measured / predicted_seconds
        for name, is_rate in names:
            low, high = device_specs.CONSTANTS[name]
            # A part takes longer by a smaller rate, or by a larger constant that is a time.
            value = getattr(current, name) * (1 / longer if is_rate else longer)
            # Four digits are more than the medians of a run support.
            constants[name] = min(max(float(f"{value:.4g}"), low), high)
    return constants


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in list(values)[_SKIPPED:] if math.isfinite(value)]
    return statistics.median(known) if known else None


def _sum_of_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
