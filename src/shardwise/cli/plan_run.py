"""`shardwise plan RUN`: what was predicted of a run beside what it recorded."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

from shardwise import units
from shardwise.cli import output
from shardwise.cli.plan_comparison import Comparison, compare_run, corrected
from shardwise.config import config_from
from shardwise.devices import cluster
from shardwise.errors import ConfigError
from shardwise.monitor.run import open_run


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
    from shardwise.devices.file import described, require_suffix, write_new

    constants = corrected(found)
    if not constants:
        raise ConfigError("--write needs a run that recorded the parts of its steps (split_seconds), this one did not")
    require_suffix(path, "--write")
    source = f"corrected {datetime.datetime.now(datetime.UTC).date().isoformat()} by run {name}, {found.steps} steps"
    write_new(path, described(found.plan.cluster.device, constants, source), "--write")
    output.progress(f"wrote {path}; plan with: shardwise plan RECIPE --device {path}")
