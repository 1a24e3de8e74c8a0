"""The file of each rank: its place in the job, its steps, and the use of its machine."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict
from typing import Any

import psutil

from shardwise.base.files import open_plain
from shardwise.base.hardware import cpu_count
from shardwise.config import Layout
from shardwise.distributed import devices
from shardwise.launch.environment import joined
from shardwise.runs.folder import JsonLines, RunDirectory, now
from shardwise.runs.json_records import record_of_json
from shardwise.train.step_record import StepRecord


class WarningOnce:
    """A warning to the user of a training, given once when a state begins, and again only after it had ended.

    Args:
        begin_score: score from which on the state is present.
        end_score: lower score, below which it is over: a score that swings between the two is told once.
    """

    def __init__(self, begin_score: float, end_score: float) -> None:
        self._begin_score = begin_score
        self._end_score = end_score
        self._present: object = None

    def begins(self, score: float | None, subject: object = True) -> bool:
        """Return whether the state begins with this score; for another subject it begins anew."""
        if score is None or score < self._end_score:
            self._present = None
        elif score >= self._begin_score and subject != self._present:
            self._present = subject
            return True
        return False


class RankFile:
    """`ranks/rank-NNNN.jsonl` of this rank. The first rank of a node also records its use of processors and memory."""

    def __init__(self, run: RunDirectory, rank: int, layout: Layout, device_name: str) -> None:
        self._file = JsonLines(run.rank_metrics(rank))
        self._rank = rank
        self._layout = layout
        self._device = device_name
        if _local_rank() == 0:
            # The first call returns 0 and only begins the measurement.
            psutil.cpu_percent()

    def start(self) -> None:
        """Record this rank's node, process and device, and its place in the mesh."""
        layout = self._layout
        rank = self._rank
        self._file.write(
            {
                "event": "start",
                "time": now(),
                "rank": rank,
                "host": platform.node(),
                "pid": os.getpid(),
                "local_rank": _local_rank(),
                "device": self._device,
                "place": layout.coordinates(rank),
                "cores": cpu_count(),
                "memory_total_bytes": psutil.virtual_memory().total,
            }
        )

    def step(self, record: StepRecord) -> None:
        """Record a step, and where the model is cut the work on each stage of this rank."""
        facts: dict[str, Any] = {"step": record.step, "time": now(), "step_seconds": record.seconds}
        facts |= {"input_seconds": record.input_seconds, "peak_memory_bytes": record.peak_memory_bytes}
        if record.split:
            facts |= {"split_seconds": dict(record.split), "work_seconds": record.work_seconds}
        if record.memory:
            facts["memory_in_use_bytes"] = sum(record.memory.values())
        if (utilization := devices.utilization()) is not None:
            facts["device_utilization"] = utilization
        if _local_rank() == 0:
            memory = psutil.virtual_memory()
            facts |= {"host_cpu": psutil.cpu_percent() / 100, "host_memory_bytes": memory.total - memory.available}
        if record.allocator:
            facts["allocator_bytes"] = dict(record.allocator)
        if record.timing is not None:
            facts["stage_seconds"] = [asdict(stage) for stage in record.timing.stages]
            facts["bubble"] = record.timing.bubble
        self._file.write(facts)

    def close(self) -> None:
        self._file.close()


def place_of_rank(run: RunDirectory, rank: int) -> str:
    """The node, device and stage of a training's rank, by the file that it writes; empty where it cannot be read."""
    try:
        with open_plain(run.rank_metrics(rank)) as file:
            start = record_of_json(file.readline())
    except (OSError, ValueError):
        return ""
    return f" ({start.get('host')}, {start.get('device')}, stage {(start.get('place') or {}).get('pp')})"


def process_seconds() -> float:
    """Seconds since the process of this rank of a training began."""
    # By the clock of the machine, as the system records it: Python's own counters begin after its imports.
    return time.time() - psutil.Process().create_time()


def _local_rank() -> int:
    place = joined()
    return 0 if place is None else place.local_rank
