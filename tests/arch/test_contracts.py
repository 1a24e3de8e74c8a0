"""The import contracts of pyproject.toml, and the same promise measured: what starts without torch."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.arch.source import CASES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TORCH_FREE = PROJECT["tool"]["importlinter"]["contracts"][1]["source_modules"]
"""The modules below the torch line; those of a room that is wholly below it end in `.**`."""

CURVE = str(ROOT / "tests/golden/curves/llama2-tiny.json")
COMMANDS = [*CASES["commands without torch"], ["compare", CURVE, CURVE]]
RUN_EACH = """
import contextlib, io, json, sys
from shardwise.cli import main
for command in json.loads(sys.argv[1]):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            code = main(command)
        except SystemExit as exit:
            code = exit.code
    assert code == 0, (command, code)
    assert shown.getvalue().strip(), command
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "torch")
    assert not loaded, f"torch was imported by {command}: {loaded[:5]}"
"""


def python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_import_contracts() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = python(code, "--no-cache", cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_needs_no_torch_imports_none(tmp_path: Path) -> None:
    code = """
import sys, shardwise
loaded = [name for name in sys.modules if name.startswith(("torch", "shardwise."))]
assert not loaded, f"importing the package loads {loaded}"
config = shardwise.load_recipe("llama2-tiny", train={"steps": 5})
assert shardwise.plan(config, "h100:2", best=1).plans
shardwise.export_checkpoint, shardwise.save_checkpoint, shardwise.Run, shardwise.train
assert "torch" not in sys.modules
"""
    result = python(code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_modules_below_the_torch_line_import_no_torch(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
for name in sys.argv[1:]:
    module = importlib.import_module(name.removesuffix(".**"))
    for below in pkgutil.walk_packages(module.__path__, f"{module.__name__}.") if name.endswith(".**") else ():
        importlib.import_module(below.name)
"""
    result = python(code, *TORCH_FREE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_commands_run_without_torch(tmp_path: Path) -> None:
    result = python(RUN_EACH, json.dumps(COMMANDS), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir()), "a command must leave nothing behind"
