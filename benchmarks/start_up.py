"""Processor time of commands that train nothing, beside that of importing torch: they must do without it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import median
from report import Report, Table

LIMIT = 0.3
TIMED = "import sys, time\ntry:\n    {}\nfinally:\n    sys.stderr.write(str(time.process_time()))\n"
MAIN = "from shardwise.cli import main; main()"
PROGRAMS = {
    "python -c pass": ("pass", ()),
    "shardwise --help": (MAIN, ("--help",)),
    "shardwise recipes": (MAIN, ("recipes",)),
    "shardwise train quickstart --dry-run": (MAIN, ("train", "quickstart", "--dry-run")),
    "import torch": ("import torch", ()),
}


def run(rounds: int) -> Report:
    """By turns; the first round of all compiles to bytecode, as the first run after an installation does."""
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        variables["PYTHONPYCACHEPREFIX"] = folder
        for turn in range(1 + 5 * rounds):
            for number, (name, (statement, arguments)) in enumerate(PROGRAMS.items()):
                script = Path(folder, f"program-{number}.py")
                script.write_text(TIMED.format(statement))
                command = [sys.executable, str(script), *arguments]
                done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
                if turn:
                    seconds[name].append(float(done.stderr))
    rows = [
        [name, f"{median(found):.3f}", f"{min(found):.3f}", f"{median(found) / median(seconds['import torch']):.2f}"]
        for name, found in seconds.items()
    ]
    commands = [name for name in PROGRAMS if name.startswith("shardwise")]
    worst = max(min(seconds[name]) for name in commands)
    return Report(
        "start_up",
        "Start-up",
        [Table(("program", "processor seconds", "least", "of importing torch"), rows)],
        {"seconds": seconds},
        targets=[f"a command takes {LIMIT} s at most: {'reached' if worst <= LIMIT else 'missed'} ({worst:.3f} s)"],
        notes=[
            f"Medians of {5 * rounds} runs by turns, of compiled bytecode; the least is what no neighbour disturbed."
        ],
    )
