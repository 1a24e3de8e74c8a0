"""Heartbeats: the doings of each rank, written once a second, so that the missing rank of a job that hangs is named.

A thread of each rank replaces a small file in a folder of its node, which the node's launcher reads. It tells step and
phase of the run, and of each group of ranks how many collectives this rank has called. Of the ranks of a group those
with the smaller number are awaited by the others. No stack is dumped: that can deadlock with a rank that waits in a
native library.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.base.errors import listing
from shardwise.base.units import spans
from shardwise.launch.environment import HEARTBEATS, joined

SECONDS = 1.0
_SILENT_SECONDS = 5.0  # seconds without a heartbeat after which a process is stopped, or gone
_SHOWN = 4  # number of ranks that a text describes one by one


@dataclass(frozen=True)
class Beat:
    """The doings of one rank when its heartbeat was read."""

    rank: int
    pid: int
    host: str
    device: str
    stage: int
    age: float  # seconds since the heartbeat
    step: int
    doing: str  # step and phase, as the user reads them
    since: float  # seconds for which the rank has done this
    # Number of collectives that the rank has called in each group, and the kind of the last one.
    called: Mapping[str, tuple[int, str]]

    @property
    def is_silent(self) -> bool:
        return self.age > _SILENT_SECONDS


@contextmanager
def beating(describe: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Write this rank's heartbeats in a thread during the `with` statement, if its launcher reads them."""
    folder = os.environ.get(HEARTBEATS)
    place = joined()
    if folder is None or place is None:
        yield
        return
    path = Path(folder) / f"rank-{place.rank:04d}"
    fixed = {"rank": place.rank, "pid": os.getpid(), "host": platform.node()}
    ended = threading.Event()

    def beat() -> None:
        doing = None
        began = time.monotonic()
        temporary = path.with_suffix(".new")
        while not ended.is_set():
            facts = dict(describe())
            if facts["doing"] != doing:
                doing = facts["doing"]
                began = time.monotonic()
            try:
                # Replaced as a whole: the launcher may read at any moment.
                temporary.write_text(json.dumps({**fixed, **facts, "since": time.monotonic() - began}))
                temporary.replace(path)
            except FileNotFoundError:
                # The launcher has ended, and its folder with it.
                return
            except OSError:
                # The disk is full. The thread goes on: the rank must not look silent for ever.
                pass
            ended.wait(SECONDS)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def read(folder: Path, host: str | None = None) -> list[Beat]:
    """Read the last heartbeats of the ranks of a node. `host`: name of the node, if it differs from the host's."""
    beats = []
    for path in sorted(folder.glob("rank-????")):
        with contextlib.suppress(FileNotFoundError, ValueError):
            age = max(0.0, time.time() - path.stat().st_mtime)
            beat = from_plain({**json.loads(path.read_text()), "age": age})
            beats.append(beat if host is None else replace(beat, host=host))
    return beats


def from_plain(facts: Mapping[str, Any]) -> Beat:
    called = {name: (int(count), str(kind)) for name, (count, kind) in facts["called"].items()}
    return Beat(**{**facts, "called": called})


def missing(beats: Iterable[Beat], lost: Mapping[str, Iterable[int]] | None = None) -> str | None:
    """Name the ranks for which the others waited by heartbeats; None if nothing tells. `lost`: ranks by silent node."""
    beats = sorted(beats, key=lambda beat: beat.rank)
    gone = {rank for ranks in (lost or {}).values() for rank in ranks}
    answering = [beat for beat in beats if beat.rank not in gone]
    texts = [f"node {name} ({_ranks(ranks)}) does not answer" for name, ranks in (lost or {}).items()]
    silent = [beat for beat in answering if beat.is_silent]
    texts += [f"{_who(beat)} does not answer since {beat.age:.0f} s: it last was in {beat.doing}" for beat in silent]
    awaited = {} if texts else _awaited(answering)
    for beat in answering:
        if beat.rank in awaited:
            texts.append(
                f"{_who(beat)} is in {beat.doing} since {beat.since:.0f} s, and has not called {awaited[beat.rank]}"
            )
    if not texts:
        return None
    named = {beat.rank for beat in silent} | set(awaited) | gone
    waiting = [beat for beat in beats if beat.rank not in named]
    shown = "; ".join(texts[:_SHOWN]) + (f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
    return shown + (f"; {_waited(waiting)}" if waiting else "")


def _awaited(beats: Iterable[Beat]) -> dict[int, str]:
    """Return the ranks that have called fewer collectives of a group than its other ranks, with the call they lack."""
    groups: dict[str, dict[int, tuple[int, str]]] = {}
    for beat in beats:
        for name, called in beat.called.items():
            groups.setdefault(name, {})[beat.rank] = called
    late: dict[int, str] = {}
    for name, calls in groups.items():
        most, kind = max(calls.values())
        axis = name.partition("@")[0]
        callers = _ranks(rank for rank, (count, _) in calls.items() if count == most)
        for rank, (count, _) in calls.items():
            if count < most:
                late.setdefault(rank, f"{kind} {count + 1:,} of its {axis} group, which {callers} called")
    # A rank that waits in one group is late in the next one. The cause waits for nobody.
    waits = {rank for calls in groups.values() for rank in calls if calls[rank][0] > min(calls.values())[0]}
    return {rank: text for rank, text in late.items() if rank not in waits}


def _who(beat: Beat) -> str:
    return f"rank {beat.rank} (node {beat.host}, {beat.device}, pipeline stage {beat.stage}, process {beat.pid})"


def _waited(beats: list[Beat]) -> str:
    doing: dict[str, list[int]] = {}
    for beat in beats:
        doing.setdefault(beat.doing, []).append(beat.rank)
    return "; ".join(f"{_ranks(ranks)} waited in {phase}" for phase, ranks in doing.items())


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    numbers = list(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {listing(spans(numbers), most=8)}"
