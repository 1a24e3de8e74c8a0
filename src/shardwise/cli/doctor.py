"""Examine this machine: what is wrong for trainings, and how to mend it.

Python, torch, packages and extras against the supported versions; devices, network, threads, memory, limits; a write to
the run folder and to the cache; a collective of two ranks. The exit code is 1 where something is wrong. What is printed
can be pasted into a bug report: it holds no secrets, and paths of your home begin with ~.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.base.errors import ConfigError
from shardwise.base.redaction import recorded_variables, redacted
from shardwise.cli import output
from shardwise.data.hub import is_url
from shardwise.launch.environment import RANK_PROCESS
from shardwise.runs.folder import RUNS
from shardwise.verify.collective_check import collective
from shardwise.verify.machine_checks import Check, machine, software

_MARKS = {"ok": "ok", "warning": "warning", "wrong": "WRONG"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are to be written (default: {RUNS}/)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    run_dir: str = arguments.run_dir
    if is_url(run_dir):
        raise ConfigError(f"--run-dir ({run_dir}) must be a folder and no URL: checkpoint.path may be one")
    checks = [_shown(check) for check in chain(software(), machine(Path(run_dir)), _collective())]
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    facts = _facts()
    if arguments.json:
        output.json({**facts, "counts": counts, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, counts, facts)
    return 1 if counts["wrong"] else 0


def _collective() -> Iterator[Check]:
    yield collective()


def _shown(check: Check) -> Check:
    """A check without secrets and without the name of the user's home."""
    return Check(check.name, check.status, _plain(check.found), _plain(check.mend))


def _plain(text: str) -> str:
    return redacted(text).replace(str(Path.home()), "~") if str(Path.home()) != "/" else redacted(text)


def _facts() -> dict[str, Any]:
    """The facts that a bug report needs beside the checks."""
    variables = recorded_variables({name: value for name, value in os.environ.items() if name != RANK_PROCESS})
    return {
        "shardwise": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "variables": {name: _plain(value) for name, value in variables.items()},
    }


def _print(checks: Sequence[Check], counts: dict[str, int], facts: dict[str, Any]) -> None:
    output.line(f"shardwise {facts['shardwise']}, Python {facts['python']}, {facts['platform']}")
    for line in _lines(checks):
        output.line(line)
    for name, value in facts["variables"].items():
        output.line(f"{name}={value}")
    output.line()
    output.line(", ".join(f"{number} {status}" for status, number in counts.items()))
    output.line("For a bug report, paste all of this: it holds no secrets.")


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    """A line of each check, and below it how to mend it."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        first, *further_lines = check.found.splitlines() or [""]
        yield f"{_MARKS[check.status]:<8} {check.name:<{width}}  {first}"
        for line in [*further_lines, *([f"→ {check.mend}"] if check.mend else [])]:
            yield f"{'':<{width + 11}}{line}"
