"""A calibration of this machine: its ranks measure, and the file is written."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import sys
import tempfile
import time
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.base.hardware import accelerators
from shardwise.launch.environment import joined
from shardwise.launch.local import launch
from shardwise.planner.device_specs import require_suffix, write_new
from shardwise.runs.folder import now
from shardwise.verify.calibration.fit import device_file, rows
from shardwise.verify.calibration.probes import Found

_CPU_RANKS = 2
_SECONDS = 60  # of all that a calibration does; the ranks' end, and the fit, take the last ones
_ENDING = 5


def calibrate(target: Path) -> list[tuple[str, str]]:
    """Measure this machine for a minute, and write its device file to `target`; returns what was measured.

    Where other work leaves it less, it repeats less and says so. Only what is measured once may make it longer.

    Raises:
        ConfigError: the file cannot be written, or ranks cannot be started here.
    """
    require_writable(target, "-o")
    if joined() is not None:
        raise ConfigError("--calibrate starts ranks of its own: call it outside of torchrun and srun")
    start = time.time()
    folder = Path(tempfile.mkdtemp(prefix="shardwise-calibration-"))
    try:
        until = str(start + _SECONDS - _ENDING)
        command = [sys.executable, "-P", "-m", "shardwise.verify.calibration.worker", str(folder), until]
        launch(command, accelerators()[1] or _CPU_RANKS, folder)
        found = Found.read(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_new(target, device_file(found, datetime.date.fromisoformat(now()[:10])), "-o")
    return [*rows(found), ("time", f"{time.time() - start:.0f} s")]


def require_writable(path: Path, option: str) -> None:
    """Refuse a file before the work for it: one that is there, or that cannot be made.

    Raises:
        ConfigError: with the reason.
    """
    require_suffix(path, option)
    write_new(path, "", option)
    with contextlib.suppress(OSError):
        path.unlink()
