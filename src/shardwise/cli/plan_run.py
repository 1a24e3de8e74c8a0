"""`shardwise plan RUN`: what was predicted of a run beside what it recorded.

A run beside its prediction: seconds of a step by part and bytes of a rank, and the device that would explain it.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.config import Config, Layout, check_layout, config_from
from shardwise.planner.device_seconds import constants_of
from shardwise.planner.device_specs import CONSTANTS, Cluster, cluster
from shardwise.planner.search import Plan, predicted
from shardwise.planner.step_time import StepTime
from shardwise.runs.run import RunView, open_run


def compare(arguments: argparse.Namespace) -> int:
    """Print predicted and measured, and write the corrected device where `--write` names a file."""
    if arguments.overrides or arguments.budget or arguments.why or arguments.plot:
        raise ConfigError("a run's folder must go without key=value, --budget, --why and --plot: the run is as it was")
    run = open_run(Path(arguments.recipe), whole=True)
    if not run.config:
        raise ConfigError(f"RUN ({run.path}) must hold the configuration of the run, config.yaml")
    on = cluster(arguments.device, 1 if arguments.nodes is None else arguments.nodes)
    found = compare_run(run, config_from(run.config), on)
    if arguments.json:
        output.json(_facts(found))
    else:
        _show(run.name, found)
    if arguments.write is not None:
        _write(arguments.write, found, run.name)
    elif not arguments.json:
        output.progress("--write FILE writes the device with constants that explain this run")
    return 0


def _show(name: str, found: Comparison) -> None:
    output.line(f"{name} on {found.plan.cluster}: {found.plan.choice.text()}; medians of {found.steps:,} steps")
    output.line()
    rows = [(part, *_pair(*both)) for part, both in found.parts.items()]
    output.table(
        [*rows, ("step", *_pair(*found.total))], ("seconds", "predicted", "measured", "error"), right=(1, 2, 3)
    )
    output.line()
    memory = [(kind, *_sizes(*both)) for kind, both in found.state.items()]
    memory.append(("peak of a rank", *_sizes(*found.peak)))
    output.table(memory, ("memory", "predicted", "measured", "error"), right=(1, 2, 3))
    if not found.plan.cluster.device.is_accelerator:
        output.line("On a CPU the measured peak is the whole process's, with Python and torch.")


def _pair(expected: float, measured: float | None) -> tuple[str, str, str]:
    known = "" if measured is None else f"{measured:.4f}"
    return f"{expected:.4f}", known, _error(expected, measured)


def _sizes(expected: int, measured: int | None) -> tuple[str, str, str]:
    known = "" if measured is None else units.size(measured)
    return units.size(expected), known, _error(expected, measured)


def _error(expected: float, measured: float | None) -> str:
    return f"{expected / measured - 1:+.1%}" if measured and expected else ""


def _facts(found: Comparison) -> dict[str, Any]:
    def both(pair: tuple[float, float | None]) -> dict[str, float | None]:
        return dict(zip(("predicted", "measured"), pair, strict=True))

    return {
        "steps": found.steps,
        "step_seconds": both(found.total),
        "parts_seconds": {part: both(pair) for part, pair in found.parts.items()},
        "memory_bytes": {kind: both(pair) for kind, pair in found.state.items()},
        "peak_memory_bytes": both(found.peak),
        "constants": corrected(found),
    }


def _write(path: Path, found: Comparison, name: str) -> None:
    from shardwise.planner.device_specs import described, require_suffix, write_new

    constants = corrected(found)
    if not constants:
        raise ConfigError("--write needs a run that recorded the parts of its steps (split_seconds), this one did not")
    require_suffix(path, "--write")
    source = f"corrected {datetime.datetime.now(datetime.UTC).date().isoformat()} by run {name}, {found.steps} steps"
    write_new(path, described(found.plan.cluster.device, constants, source), "--write")
    output.progress(f"wrote {path}; plan with: shardwise plan RECIPE --device {path}")


PARTS: Mapping[str, tuple[str, ...]] = {
    "computation": ("matmul", "attention", "memory_bound", "launch", "head", "recompute"),
    "communication": ("tensor", "messages", "bubble", "reduction", "gather"),
    "optimizer": ("optimizer",),
    "data and other": (),
}
"""What a run's `split_seconds` records together, by the parts of a prediction that it holds."""
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
    """A run's own figures beside what was predicted of it.

    Attributes:
        steps: of which the medians are.
        parts: by part, (predicted, measured) seconds; the latter None where the run recorded no parts.
        total: (predicted, measured) seconds of a step.
        state: (predicted, measured) bytes of parameters, gradients and optimizer on the first rank, by kind.
        peak: (predicted, measured) bytes of the first rank at its peak; on a CPU the measured ones are the process's.
    """

    plan: Plan
    steps: int
    parts: Mapping[str, tuple[float, float | None]]
    total: tuple[float, float]
    state: Mapping[str, tuple[int, int | None]]
    peak: tuple[int, int | None]


def compare_run(run: RunView, config: Config, cluster: Cluster) -> Comparison:
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
    config = config.with_batch_for(ranks)
    layout: Layout = check_layout(config, ranks)
    plan = predicted(config, layout, cluster)
    if plan is None:
        raise ConfigError(f"model.family ({config.model.family}) must be one whose shapes are known to be predicted")
    seconds = run.series.numbers["step_seconds"]
    total = _median(seconds)
    if total is None:
        raise ConfigError(f"RUN ({run.path}) must have recorded more than {_SKIPPED} steps, it has {len(seconds)}")
    parts = {
        part: (_of(plan.time, names), _sum([_median(run.series.parts[one]) for one in _RECORDED[part]]))
        for part, names in PARTS.items()
    }
    expected, held = dict(plan.memory.rows()), run.last.get("memory_bytes") or {}
    state = {one: (expected[one], held.get(one)) for one in ("parameters", "gradients", "optimizer")}
    peak = run.last.get("peak_memory_bytes")
    return Comparison(plan, len(seconds) - _SKIPPED, parts, (plan.time.total, total), state, (plan.memory.total, peak))


def corrected(comparison: Comparison) -> dict[str, float]:
    """Constants with which the prediction of each part would be what was measured, within what they can be."""
    constants, found = constants_of(comparison.plan.cluster.device), {}
    for part, names in _CORRECTS.items():
        expected, measured = comparison.parts[part]
        if measured is None or measured <= 0 or expected <= 0:
            continue
        longer = measured / expected
        for name, is_rate in names:
            low, high = CONSTANTS[name]
            value = getattr(constants, name) * (1 / longer if is_rate else longer)
            found[name] = min(max(float(f"{value:.4g}"), low), high)
    return found


def _of(time: StepTime, names: tuple[str, ...]) -> float:
    return float(sum(getattr(time, name) for name in names))


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in list(values)[_SKIPPED:] if math.isfinite(value)]
    return statistics.median(known) if known else None


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
