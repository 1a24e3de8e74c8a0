"""Watching a run of 1,024 ranks and 100,000 steps from its folder, and ten small runs: time and memory.

The folders are synthetic (tests/monitor_runs.py). Of a rank's file the beginning and the end are there: between them is
a hole, as no reader may read what is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import median
from report import ROOT, Report, Table, target

sys.path.insert(0, str(ROOT))

RANKS, STEPS = 1024, 100_000
REPORT = "shardwise report, the large run"
"""Not asked for while one waits: it has no limit."""
READING = """
import json, resource, sys, time
from pathlib import Path
from shardwise_watch.json_lines import last_lines
from shardwise_watch.run import RunView
from shardwise_watch.run_snapshot import snapshot
from shardwise.runs.folder import json_text

path, ranks = Path(sys.argv[1]), int(sys.argv[2])
lines = [next(last_lines(path / f"ranks/rank-{rank:04d}.jsonl", 4096)) for rank in range(ranks)]
began = time.perf_counter()
run = RunView(path, all_steps=True)
found = snapshot(run)
first = time.perf_counter() - began
assert len(found["ranks"]) == ranks, len(found["ranks"])
refreshes = []
for turn in range(5):
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json_text({**run.last, "step": run.step + 1}) + "\\n")
    for rank in range(ranks):
        with (path / f"ranks/rank-{rank:04d}.jsonl").open("ab") as file:
            file.write(json_text(lines[rank]).encode() + b"\\n")
    began = time.perf_counter()
    assert run.refresh()
    snapshot(run)
    refreshes.append(time.perf_counter() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"first": first, "refresh": sorted(refreshes)[2], "peak": peak, "steps": len(run.series.steps)}))
"""
SCREEN = """
import asyncio, json, resource, sys, time
from pathlib import Path

began = time.perf_counter()
from shardwise_watch.screen.app import Panel, Top
from shardwise_watch.screen.frame import Reader

reader = Reader(Path(sys.argv[1]))
found = {}

async def show():
    app = Top(reader.read, 0)
    async with app.run_test(size=(160, 48)) as pilot:
        while app.frame is None:
            await pilot.pause(0.005)
        found["first"] = time.perf_counter() - began
        while not app.frame.has_history:
            await pilot.pause(0.005)
        found["whole"] = time.perf_counter() - began
        now = time.perf_counter()
        for panel in app.query(Panel):
            if panel.is_on_screen:
                panel.render()
        found["draw"] = time.perf_counter() - now

asyncio.run(show())
found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(found))
"""


def run(rounds: int) -> Report:
    """Each measurement in a fresh process, on folders whose files the system has in memory."""
    with tempfile.TemporaryDirectory() as folder:
        big = _folders(Path(folder))
        variables = dict(os.environ, PYTHONPYCACHEPREFIX=f"{folder}/bytecode")
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        commands = {
            "shardwise ls, ten runs": ["ls"],
            "shardwise ls --json, ten runs": ["ls", "--json"],
            "shardwise monitor --once, the large run": ["monitor", str(big), "--once"],
            "shardwise top --once, the large run": ["top", str(big), "--once"],
            REPORT: ["report", str(big), "--output", f"{folder}/report.html"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(1 + 3 * rounds):
            for name, arguments in commands.items():
                began = time.perf_counter()
                command = [sys.executable, "-m", "shardwise", *arguments]
                subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=True)
                if turn:  # the first run compiles to bytecode
                    seconds[name].append(time.perf_counter() - began)
        found: dict[str, list[dict[str, float]]] = {SCREEN: [], READING: []}
        for code, told in found.items():  # READING adds steps, so it comes last
            for _ in range(rounds):
                command = [sys.executable, "-c", code, str(big), str(RANKS)]
                done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
                told.append(json.loads(done.stdout))
        readings, screens = found[READING], found[SCREEN]
    first, refresh = (median([one[name] for one in readings]) for name in ("first", "refresh"))
    frame, whole, draw = (median([one[name] for one in screens]) for name in ("first", "whole", "draw"))
    peak, screen_peak = (max(one["peak"] for one in ones) for ones in (readings, screens))
    rows = [
        ["all steps and ranks, read for the first time", f"{first:.2f} s"],
        ["a new step of all ranks", f"{refresh * 1000:.0f} ms"],
        ["peak memory of the process", f"{peak / 2**20:.0f} MiB"],
    ]
    rows += [
        ["shardwise top: the first frame at 160 × 48, imports too", f"{frame:.2f} s"],
        ["shardwise top: the curves of all steps", f"{whole:.2f} s"],
        ["shardwise top: a frame drawn", f"{draw * 1000:.0f} ms"],
        ["shardwise top: peak memory", f"{screen_peak / 2**20:.0f} MiB"],
    ]
    rows += [[name, f"{median(found) * 1000:.0f} ms"] for name, found in seconds.items()]
    return Report(
        "watching",
        "Watching a run",
        [Table(("what", "found"), rows)],
        {"readings": readings, "screens": screens, "commands": seconds},
        targets=[
            target("seconds of the first reading", first, 2.0, at_least=False),
            target("seconds of a refresh", refresh, 0.2, at_least=False),
            target("peak memory in MiB", peak / 2**20, 300, at_least=False),
            target("seconds of the first frame of `top`", frame, 2.0, at_least=False),
            target("seconds of a frame drawn", draw, 0.2, at_least=False),
            target("peak memory of `top` in MiB", screen_peak / 2**20, 300, at_least=False),
            *(
                target(f"seconds of `{name}`", median(found), 0.5, at_least=False)
                for name, found in seconds.items()
                if name != REPORT
            ),
        ],
        notes=[
            f"The large run has {RANKS:,} ranks, {STEPS:,} steps and four starts; the system has its files in memory.",
            "Commands are whole processes, from their start to their end.",
        ],
    )


def _folders(folder: Path) -> Path:
    """Write ten small runs to runs/ there, and the large one beside it, whose folder is returned."""
    from tests.monitor_runs import Start, write_big, write_run

    for number in range(10):
        starts = [Start(0, 270, "failed: RunError: a rank ended"), Start(200, 400)] if number % 2 else [Start(0, 400)]
        write_run(folder / f"runs/gpt3-tiny-20260101-00000{number}", starts)
    return write_big(folder / "big", ranks=RANKS, steps=STEPS)
