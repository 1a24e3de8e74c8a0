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
MOST_CALLS = {"--help": 26_000, "recipes": 261_000, "train quickstart --dry-run": 405_000, "ls": 75_000}
"""Of functions, compiled before; with Python 3.11 there are a few thousand fewer."""
OF_NEWER_PYTHONS = 14_000
"""From Python 3.14 on argparse also asks for the colours of a terminal."""
SLOW = ("torch", "numpy", "tokenizers", "safetensors", "fsspec", "transformers", "rich", "multiprocessing", "asyncio")


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the script, and for the bytecode that all commands share."""
    return tmp_path_factory.mktemp("start")


def started(arguments: list[str], at: Path) -> tuple[int, set[str]]:
    """How many functions a command calls, and which packages it imports."""
    script = at / "start.py"
    script.write_text(COUNTED)
    command = [sys.executable, str(script), *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = str(at / "bytecode")
    for _ in range(2):  # the first run compiles to bytecode, as the first one after an installation does
        run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    calls, modules = json.loads(run.stderr)
    return calls, {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(command, marks=pytest.mark.slow if command in ("recipes", "ls") else ()) for command in MOST_CALLS],
)
def test_a_command_starts_with_little(arguments: str, at: Path) -> None:
    calls, packages = started(arguments.split(), at)
    most = MOST_CALLS[arguments] + (OF_NEWER_PYTHONS if sys.version_info >= (3, 14) else 0)
    assert calls <= most, f"{calls:,} calls of functions"
    assert not packages & set(SLOW), "what takes long is imported"


@pytest.mark.slow
def test_a_dry_run_that_looks_at_data_imports_what_reads_them_alone(at: Path) -> None:
    (at / "corpus.jsonl").write_text('{"text": "some text"}\n')
    command = ["train", "quickstart", f"data.path={at / 'corpus.jsonl'}", "model.vocab_size=257", "--dry-run"]
    _, packages = started(command, at)
    assert "shardwise" in packages
    assert not packages & {*SLOW, "huggingface_hub", "datasets", "pyarrow", "h5py"} - {"numpy", "tokenizers"}
