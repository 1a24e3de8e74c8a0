"""The command as a user runs it: in a process of its own, in a folder of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import yaml

from shardwise.cli import main
from tests.arch.source import ROOT
from tests.e2e import warm

ALONE = (sys.executable, "-m", "shardwise")
UNDER_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardwise")
_JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

MINIATURE = Path(__file__).with_name("miniature.yaml").read_text(encoding="utf-8")
"""A recipe that trains in a moment."""
CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
Process: TypeAlias = subprocess.Popen[str] | warm.Job


@dataclass(frozen=True)
class Outcome:
    """What a finished command left: exit code and output."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Outcome:
        """Assert that all went well, in silence."""
        assert self.code == 0, f"exit code {self.code}\n{self.err}"
        assert not self.complaint, "a healthy run prints nothing on standard error:\n" + self.err
        return self

    def failed(self, code: int) -> str:
        """Assert the exit code, and that the user reads no traceback; returns what the user does read."""
        assert self.code == code, f"exit code {self.code} instead of {code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.out + self.err, f"the user must not read a traceback:\n{self.err}"
        return self.complaint

    @property
    def complaint(self) -> str:
        """Standard error without lines on data that is prepared for the first time, and on how far long work is."""
        lines = self.err.splitlines(keepends=True)
        return "".join(line for line in lines if not re.match(r"preparing the data |[a-z ]+: .* of .*, \d+%, ", line))


@functools.cache
def _cache() -> str:
    """Prepared data, which the tests of one session share; never the user's own."""
    folder = tempfile.mkdtemp(prefix="shardwise-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(**variables: str) -> dict[str, str]:
    """A user's environment: no job around it, no accelerator but the one to test, one thread a process."""
    hidden = {} if os.environ.get("TEST_DEVICE", "strict") not in ("cpu", "strict") else {"CUDA_VISIBLE_DEVICES": ""}
    inherited = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    fixed = {"OMP_NUM_THREADS": "1", "SHARDWISE_CACHE": _cache(), **hidden}
    return {**inherited, **fixed, **variables}


def _devices(arguments: list[str]) -> dict[str, str]:
    """As many strict devices as the command has ranks on CPUs: on accelerators it has a rank for each by default."""
    if os.environ.get("TEST_DEVICE") != "strict":
        return {}
    if named := re.search(r"--nproc(?:_per_node)?[ =](\d+)", " ".join(arguments)):
        return {"STRICT_DEVICES": named[1]}
    cut = [int(found[1]) for one in arguments if (found := re.fullmatch(r"parallel\.(?:tensor|pipeline)=(\d+)", one))]
    return {"STRICT_DEVICES": str(math.prod(cut))}


def start(
    *arguments: str | Path, at: Path, program: tuple[str, ...] = ALONE, stdin: Path = Path(os.devnull), **variables: str
) -> Process:
    """The command, under way in the folder `at`; it reads the file `stdin`."""
    command = [*program, *map(str, arguments)]
    environment_ = environment(**_devices(command) | variables)
    if warm.can_run(program):
        return warm.Job(command, at=at, variables=environment_, stdin=stdin)
    with stdin.open() as file:
        return subprocess.Popen(
            command, cwd=at, env=environment_, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def outcome(process: Process, timeout: float = 240.0) -> Outcome:
    """Wait for the command to end."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the command did not end within {timeout:.0f} s\n{out}\n{err}") from None
    return Outcome(process.returncode, out, err)


def shardwise(*arguments: str | Path, at: Path, timeout: float = 240.0, **options: Any) -> Outcome:
    """Run the command to its end; options as of `start`."""
    return outcome(start(*arguments, at=at, **options), timeout)


def within(*arguments: str | Path, at: Path, **variables: str) -> Outcome:
    """Run the command inside this process: much faster, for what is refused and for what only reads files."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(at),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        mock.patch("os.isatty", return_value=False),  # `train` would print past `out` on a terminal
        mock.patch("shardwise.train.run.run", side_effect=AssertionError("a training needs its own process")),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main([*map(str, arguments)])
    return Outcome(code, out.getvalue(), err.getvalue())


def python(code: str, *arguments: str, **variables: str) -> str:
    """What a program of its own prints: the client of an object store has threads, and reads its environment once."""
    command = [sys.executable, "-c", code, *arguments]
    env = environment(**variables)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_IN_RANKS = """
import os, sys
def _again():
    if "RANK" in os.environ and not hasattr(sys, "was_imported_in_a_rank"):
        sys.was_imported_in_a_rank = True
        with open(__file__) as file:
            exec(compile(file.read().partition("# In ranks")[0], __file__, "exec"), globals())
os.register_at_fork(after_in_child=_again)
"""
"""What makes a rank, a fork of a Python that had none, run the program too."""


def imported_first(code: str, folder: Path) -> dict[str, str]:
    """Write a program that every Python and every rank of a command runs first; returns the variable that says so."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"{code}\n# In ranks{_IN_RANKS}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def miniature(folder: Path) -> Path:
    """A folder's own copy of the recipe that trains in a moment."""
    recipe = folder / "miniature.yaml"
    recipe.write_text(MINIATURE)
    return recipe


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The run's metrics.jsonl; only one kind of event if it is named."""
    return [line for line in json_lines(run / "metrics.jsonl") if event in (None, line["event"])]
