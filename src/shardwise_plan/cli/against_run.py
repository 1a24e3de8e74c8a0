"""A run against its prediction, and the device whose constants explain it: `shardwise plan` of a run's folder."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.base.files import write_new
from shardwise.cli import output
from shardwise.config import Config, check_layout, config_from_sections, size_stages_of
from shardwise_plan import device_seconds, device_specs
from shardwise_plan.plan import Plan, predict_layout
from shardwise_plan.step_time import COMMUNICATION
from shardwise_watch.run import RunView, open_run

Pair = Mapping[str, float | None]
"""An amount as `predicted` and as `measured`, which is None where the run did not record it."""

_COMPUTATION = ("matmul", "attention", "memory_bound", "accumulation", "launch", "head", "recompute")
# By part of a step: the parts of a prediction, and the keys of a run's `split_seconds`.
PARTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "computation": (_COMPUTATION, ("forward", "backward")),
    "communication": ((*COMMUNICATION, "bubble"), ("communication",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "data and other": ((), ("data", "checkpoint", "other")),
}
# The first steps of a start compile, and fill caches.
_SKIPPED = 2
# By part, the constants to correct and whether they are rates: a larger rate takes less time.
_CORRECTS: Mapping[str, tuple[tuple[str, bool], ...]] = {
    "computation": (("matmul", True), ("memory", True), ("fused_attention", True), ("host", False)),
    "communication": (("node", True), ("network", True)),
    "optimizer": (("update", True), ("step", False)),
}


def compare_with_run(folder: Path, machines: device_specs.Cluster, *, as_json: bool, write: Path | None) -> None:
    """Print predicted and measured steps of a run, and write the corrected device to a file where `write` names one.

    machines: cluster on which the run was.
    """
    run = open_run(folder, all_steps=True)
    if not run.config:
        raise ConfigError(f"RUN ({run.path}) must hold the configuration of the run, config.yaml")
    plan = _predicted(run, config_from_sections(run.config), machines)
    facts = _measured_pairs(run, plan)
    facts["constants"] = _corrected_constants(facts["parts_seconds"], machines.device)
    if as_json:
        output.json(facts)
    else:
        _show(run.name, plan, facts)
    if write is not None:
        _write_device_file(write, machines.device, facts, run.name)
    elif not as_json:
        output.progress("--write FILE writes the device with constants that explain this run")


def _show(name: str, plan: Plan, facts: Mapping[str, Any]) -> None:
    output.prose(f"{name} on {plan.cluster}: {plan.text()}; medians of {facts['steps']:,} steps")
    seconds = facts["parts_seconds"] | {"step": facts["step_seconds"]}
    memory = facts["memory_bytes"] | {"peak of a rank": facts["peak_memory_bytes"]}
    for title, pairs, shown in (("seconds", seconds, "{:.4f}".format), ("memory", memory, units.size)):
        output.line()
        rows = [(part, *_cells(pair, shown)) for part, pair in pairs.items()]
        output.table(rows, (title, "predicted", "measured", "error"), right=(1, 2, 3))
    if not plan.cluster.device.is_accelerator:
        output.line("On a CPU the measured peak is the whole process's, with Python and torch.")


def _cells(pair: Pair, shown: Callable[[float], str]) -> tuple[str, str, str]:
    predicted, measured = pair["predicted"] or 0.0, pair["measured"]
    error = f"{predicted / measured - 1:+.1%}" if measured and predicted else ""
    return shown(predicted), "" if measured is None else shown(measured), error


def _write_device_file(path: Path, device: device_specs.Device, facts: Mapping[str, Any], name: str) -> None:
    if not facts["constants"]:
        raise ConfigError("--write needs a run that recorded the parts of its steps (split_seconds), this one did not")
    device_specs.require_device_suffix(path, "--write")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"corrected {today} by run {name}, {facts['steps']} steps"
    write_new(path, device_specs.changed_device_text(device, facts["constants"], source), "--write")
    output.progress(f"wrote {path}; plan with: shardwise plan RECIPE --device {path}")


def _predicted(run: RunView, config: Config, cluster: device_specs.Cluster) -> Plan:
    ranks = run.start.get("ranks")
    if not isinstance(ranks, int) or ranks != cluster.world:
        raise ConfigError(
            f"--device must name as many devices as the run had ranks ({ranks}), and with --nodes it names "
            f"{cluster.world}: add :N to the device"
        )
    if len(size_stages_of(config)) > 1:
        raise ConfigError(f"RUN ({run.path}) must have steps of one size to be compared, and data.stages changes them")
    # A batch that is given by a rule depends on the number of ranks.
    config = config.with_batch_for(ranks)
    plan = predict_layout(config, check_layout(config, ranks), cluster)
    if plan is None:
        raise ConfigError(f"model.family ({config.model.family}) must be one whose shapes are known to be predicted")
    return plan


def _measured_pairs(run: RunView, plan: Plan) -> dict[str, Any]:
    """Return the medians of the steps that a run recorded beside their prediction, each as a `Pair`.

    `memory_bytes` are those of the first rank; on a CPU its measured peak is the process's. ConfigError: the run
    recorded too few steps.
    """
    seconds = run.series.numbers["step_seconds"]
    total = _median(seconds)
    if total is None:
        raise ConfigError(f"RUN ({run.path}) must have recorded more than {_SKIPPED} steps, it has {len(seconds)}")
    parts = {}
    for part, (predicted_parts, recorded_parts) in PARTS.items():
        known = [median for key in recorded_parts if (median := _median(run.series.parts[key])) is not None]
        prediction = float(sum(getattr(plan.time, name) for name in predicted_parts))
        parts[part] = _pair(prediction, sum(known) if known else None)
    sizes = dict(plan.memory.rows())
    recorded = run.last.get("memory_bytes") or {}
    kinds = ("parameters", "gradients", "optimizer")
    return {
        "steps": len(seconds) - _SKIPPED,
        "step_seconds": _pair(plan.time.total, total),
        "parts_seconds": parts,
        "memory_bytes": {kind: _pair(sizes[kind], recorded.get(kind)) for kind in kinds},
        "peak_memory_bytes": _pair(plan.memory.total, run.last.get("peak_memory_bytes")),
    }


def _pair(predicted: float, measured: float | None) -> Pair:
    return {"predicted": predicted, "measured": measured}


def _corrected_constants(parts: Mapping[str, Pair], device: device_specs.Device) -> dict[str, float]:
    current = device_seconds.device_constants(device)
    constants = {}
    for part, names in _CORRECTS.items():
        predicted, measured = parts[part]["predicted"], parts[part]["measured"]
        if not measured or not predicted or measured < 0:
            continue
        longer = measured / predicted
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
