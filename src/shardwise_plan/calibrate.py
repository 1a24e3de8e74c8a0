"""A calibration of this machine: its ranks measure for a minute, and the device file is written."""

from __future__ import annotations

import datetime
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.base.files import write_new
from shardwise.base.hardware import accelerators
from shardwise.launch.environment import joined
from shardwise.verify.rank_calls import call_on_ranks, join_called_ranks
from shardwise_plan.calibration_fit import Measurements, measured_device_file, measured_rows
from shardwise_plan.device_specs import require_device_suffix

_CPU_RANKS = 2


def calibrate(target: Path) -> list[tuple[str, str]]:
    """Measure this machine, and write the planner's device file of it to `target`; return the figures in short lines.

    It takes about a minute where nothing else runs. ConfigError: the file cannot be written, or ranks cannot be started
    here.
    """
    require_device_suffix(target, "-o")
    # Only making the file tells for sure, before the minute of work, that it can be made. A calibration that fails
    # leaves nothing.
    write_new(target, "", "-o")
    target.unlink(missing_ok=True)
    if joined() is not None:
        raise ConfigError("--calibrate starts ranks of its own: call it outside of torchrun and srun")
    start = time.time()
    ranks = accelerators()[1] or _CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="shardwise-calibration-", ignore_cleanup_errors=True) as folder:
        measurements: Measurements = call_on_ranks(_measure, ranks=ranks, folder=Path(folder)).single()
    today = datetime.datetime.now(datetime.UTC).date()
    write_new(target, measured_device_file(measurements, today), "-o")
    return [*measured_rows(measurements), ("time", f"{time.time() - start:.0f} s")]


def _measure() -> Iterator[Measurements]:
    """Measure on this rank. It imports torch, which the process that calibrates does without."""
    from shardwise.distributed import devices
    from shardwise_plan.calibration_measure import measure_machine

    device = devices.local_device()
    with join_called_ranks(device) as world:
        yield measure_machine(world, device)
