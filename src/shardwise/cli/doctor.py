"""Check this machine and suggest fixes.

The command checks Python, torch, packages and extras against the supported versions; devices, network, threads, memory,
limits; a write to the run folder and to the cache; and a collective of two ranks. The exit code is 1 if something is
wrong. You can paste the output into a bug report: it holds no secrets, and paths in your home folder begin with ~.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from shardwise import __version__
from shardwise.base.errors import ConfigError
from shardwise.base.redaction import recorded_variables, redacted
from shardwise.checkpoint.storage.root import is_url
from shardwise.cli import output
from shardwise.cli.help import add_json
from shardwise.launch.environment import RANK_PROCESS
from shardwise.runs.folder import RUNS
from shardwise.verify import collective_check, machine_checks

_MARKS = {"ok": "ok", "warning": "warning", "wrong": "WRONG"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", metavar="DIR", default=str(RUNS), help=f"where runs are to be written (default: {RUNS}/)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    run_dir: str = arguments.run_dir
    if is_url(run_dir):
        raise ConfigError(f"--run-dir ({run_dir}) must be a folder and no URL: checkpoint.path may be one")
    with collective_check.prepared_check():
        checks = [
            *machine_checks.check_software(),
            *machine_checks.check_machine(Path(run_dir)),
            collective_check.check_collective(),
        ]
    checks = [replace(check, found=_plain(check.found), mend=_plain(check.mend)) for check in checks]
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    versions = {"shardwise": __version__, "python": platform.python_version(), "platform": platform.platform()}
    if arguments.json:
        checked = {"counts": counts, "checks": [asdict(check) for check in checks]}
        output.json({**versions, "variables": _variables(), **checked})
    else:
        _print(checks, counts, versions)
    return 1 if counts["wrong"] else 0


def _plain(text: str) -> str:
    """A text without secrets and without the name of the user's home."""
    home = str(Path.home())
    # In a container the home may be `/`, which begins every path.
    return redacted(text).replace(home, "~") if home != "/" else redacted(text)


def _variables() -> dict[str, str]:
    # RANK_PROCESS is of this package's own making, and different in every process.
    variables = recorded_variables({name: value for name, value in os.environ.items() if name != RANK_PROCESS})
    return {name: _plain(value) for name, value in variables.items()}


def _print(checks: Sequence[machine_checks.Check], counts: dict[str, int], versions: dict[str, str]) -> None:
    output.line("shardwise {shardwise}, Python {python}, {platform}".format(**versions))
    for line in _lines(checks):
        output.line(line)
    for name, value in _variables().items():
        output.line(f"environment variable  {name}={value}")
    output.line()
    output.line(", ".join(f"{number} {status}" for status, number in counts.items()))
    output.line("For a bug report, paste all of this: it holds no secrets.")


def _lines(checks: Sequence[machine_checks.Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        first, *further_lines = check.found.splitlines() or [""]
        yield f"{_MARKS[check.status]:<8} {check.name:<{width}}  {first}"
        for line in [*further_lines, *([f"→ {check.mend}"] if check.mend else [])]:
            yield f"{'':<{width + 11}}{line}"
