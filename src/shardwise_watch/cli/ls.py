"""List this machine's devices (and who uses them) and the runs in a folder, newest first.

Devices are the GPUs that NVML reports, the chips of AWS that neuron-ls reports, or else the CPU. If a process is a rank
of a listed run, the rank is shown.
"""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.base import local_devices, units
from shardwise.base.errors import ShardwiseError
from shardwise.base.registered import provided
from shardwise.base.terminal import printable
from shardwise.cli import output
from shardwise.runs.events import number
from shardwise.runs.folder import RUNS, RunDirectory
from shardwise_watch import run_snapshot
from shardwise_watch.run import RunView, UnreadableRun, live_ranks_by_process, runs_at, unsubmitted_job

_DEVICES = ("device", "memory", "busy", "links", "process")
RUN_COLUMNS = ("run", "state", "step", "loss", "tok/s", "MFU", "ETA", "goodput", "heard", "parent")
_SHORTEST = 16
_SLURM_SECONDS = 3.0  # the list of runs does not need SLURM


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", default=str(RUNS), help=f"a folder of runs, or a run (default: {RUNS})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every field")


def run(arguments: argparse.Namespace) -> int:
    listed_runs = runs_at(arguments.folder)
    ranks = live_ranks_by_process(run for run in listed_runs if isinstance(run, RunView))
    machine_devices = local_devices.devices_of_machine(ranks)
    jobs: list[Any] = []
    problems = [problem for run in listed_runs for problem in run.problems] + machine_devices.problems
    folder = Path(arguments.folder)
    inside = sorted(path for path in folder.glob("*/") if not path.is_symlink())
    problems += filter(None, map(unsubmitted_job, [folder, *inside]))
    try:
        waiting = {path.parent.resolve() for path in folder.glob("*/jobs.jsonl")}
        waiting = {path for path in waiting if not RunDirectory(path).holds_run}
        states = provided("job_states")(folder, timeout=_SLURM_SECONDS) if waiting else []
        jobs = [state for state in states if state.job is not None and state.run.resolve() in waiting]
    except ShardwiseError as error:
        problems.append(f"submitted jobs: {error}")
    if arguments.json:
        machine = {
            "schema": run_snapshot.SCHEMA,
            "host": platform.node(),
            "devices": [asdict(device) for device in machine_devices.devices],
        }
        machine["jobs"] = [{**asdict(job), "run": str(job.run)} for job in jobs]
        output.json({**machine, "runs": [run_snapshot.run_row(run) for run in listed_runs], "problems": problems})
        return 0
    _table([_device(device) for device in machine_devices.devices], _DEVICES, (2,), widest=4)
    output.line()
    if listed_runs or jobs:
        rows = [(job.run.name, f"{job.text}, job {job.id}", *[""] * (len(RUN_COLUMNS) - 2)) for job in jobs]
        _table([*rows, *map(run_cells, listed_runs)], RUN_COLUMNS, (2, 3, 4, 5, 6, 7, 8), widest=0)
    else:
        output.line(f"no run in {arguments.folder.rstrip('/')}/")
    for problem in problems:
        output.progress(problem)
    return 0


def _device(device: local_devices.LocalDevice) -> tuple[str, ...]:
    memory = "" if device.memory_total_bytes is None else units.size(device.memory_total_bytes)
    if memory and device.memory_bytes is not None:
        memory = f"{units.size(device.memory_bytes)} of {memory}"
    cores = "" if device.cores is None else f", {units.counted(device.cores, 'core')}"
    name = f"{'' if device.kind == 'cpu' else f'{device.index}: '}{device.name}{cores}"
    return name, memory, _share(device.utilization), "; ".join(device.links), _processes(device.processes)


def _processes(processes: Sequence[local_devices.DeviceProcess]) -> str:
    """The ranks of each run together; of other processes the numbers."""
    ranks: dict[str, list[int]] = {}
    for process in processes:
        if process.run is not None and process.rank is not None:
            ranks.setdefault(process.run, []).append(process.rank)
    named = [
        f"{'ranks' if len(rank_numbers) > 1 else 'rank'} {', '.join(units.spans(rank_numbers))} of {run}"
        for run, rank_numbers in ranks.items()
    ]
    return "; ".join([*named, *(f"process {process.pid}" for process in processes if process.run is None)])


def run_cells(run: RunView | UnreadableRun) -> tuple[str, ...]:
    fields = run_snapshot.run_row(run)
    speed = number(fields["tokens_per_second"])
    parent = fields["parent"]
    steps = "?" if fields["steps"] is None else fields["steps"]
    return (
        run.name,
        fields["state"],
        "" if fields["step"] is None else f"{fields['step']}/{steps}",
        "" if fields["loss"] is None else f"{number(fields['loss']):.4f}",
        units.count(speed).replace(" ", "") if math.isfinite(speed) else "",
        _share(fields["mfu"]),
        _short(fields["eta_seconds"]),
        _share(fields["goodput"]),
        _short(None if run.heard is None else max(0.0, time.time() - run.heard)),
        "" if parent is None else f"{parent['run']}@{parent['step']}",
    )


def _share(value: Any) -> str:
    return "" if value is None else f"{number(value):.0%}"


def _short(seconds: float | None) -> str:
    """A duration in its largest unit: `50s`, `3min`, `2.5h`, `14d`."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            count = seconds / length
            return f"{count:.0f}{unit}" if count >= 10 or unit == "min" else f"{count:.1f}{unit}"
    return f"{seconds:.0f}s"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str], right: Sequence[int], *, widest: int) -> None:
    """A table as wide as the terminal at most: its column `widest` gives way. Elsewhere nothing is left out."""
    if not sys.stdout.isatty():
        output.table(rows, head, right=right)
        return
    kept = [i for i in range(len(head)) if any(line[i] for line in rows)]
    lines = [[printable(line[i]) for i in kept] for line in (head, *rows)]
    # A column without any text is left out, and then the first one gives way.
    at = kept.index(widest) if widest in kept else 0
    width = shutil.get_terminal_size().columns
    other_widths = sum(max(map(len, column)) for i, column in enumerate(zip(*lines, strict=True)) if i != at)
    full = other_widths + max(len(line[at]) for line in lines)
    gap = 2 if full + 2 * (len(kept) - 1) <= width else 1
    room = max(_SHORTEST, width - other_widths - gap * (len(kept) - 1))
    first, *cut_rows = [[_cut(cell, room) if i == at else cell for i, cell in enumerate(line)] for line in lines]
    output.table(cut_rows, first, right=[i for i, column in enumerate(kept) if column in right], gap=gap)


def _cut(text: str, room: int) -> str:
    """`text` without its middle: a run's name tells most at its ends."""
    end = (room - 1) // 2
    return text if len(text) <= room else f"{text[: room - 1 - end]}…{text[len(text) - end :]}"
