"""What a command does before it does what it is for: it may take 0.3 s of processor time (`make bench ARGS=start_up`).

Time depends on the machine and on what else it does; what is called and imported does not.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNTED = """
import cProfile, json, pstats, sys
from io import StringIO
profile = cProfile.Profile()
profile.enable()
from shardwise.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    profile.disable()
    counts = [pstats.Stats(profile, stream=StringIO()).total_calls, sorted(sys.modules)]
    sys.stderr.write(json.dumps(counts))
"""
MOST_CALLS = {"--help": 26_000, "train quickstart --dry-run": 405_000}
"""Of functions, compiled before; with Python 3.11 there are a few thousand fewer."""
OF_NEWER_PYTHONS = 14_000
"""From Python 3.14 on argparse also asks for the colours of a terminal."""
SLOW = ("torch", "numpy", "tokenizers", "safetensors", "fsspec", "transformers", "rich", "multiprocessing", "asyncio")


def run(command: list[str], at: Path) -> str:
    """What a Python program writes to standard error; all of them share their bytecode in this folder."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = str(at / "bytecode")
    program = [sys.executable, *command]
    return subprocess.run(program, env=variables, capture_output=True, text=True, timeout=120, check=True).stderr


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and with bytecode, which the first command after an installation writes."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "start.py").write_text(COUNTED)
    for command in MOST_CALLS:
        run(["-m", "shardwise", *command.split()], folder)
    return folder


@pytest.mark.parametrize("arguments", ["--help", "train quickstart --dry-run"])
def test_a_command_starts_with_little(arguments: str, at: Path) -> None:
    calls, modules = json.loads(run([str(at / "start.py"), *arguments.split()], at))
    packages = {name.partition(".")[0] for name in modules}
    most = MOST_CALLS[arguments] + (OF_NEWER_PYTHONS if sys.version_info >= (3, 14) else 0)
    assert calls <= most, f"{calls:,} calls of functions"
    assert not packages & set(SLOW), "what takes long is imported"
