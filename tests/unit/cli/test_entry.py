"""The command line as a user meets it: exit codes, one text per mistake, and a quick start."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import __version__
from shardwise.base.terminal import fit_to_terminal
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.cli import main
from shardwise.launch import first_failure
from shardwise.launch.environment import ERROR_FILE
from shardwise.launch.first_failure import read_first_failure
from tests.command_line import CommandLine
from tests.monitor_runs import Start, write_run


def rank(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make this process one of a job; what it adds to its environment is undone too."""
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in {"SHARDWISE_RANK_PROCESS": "", **place}.items():
        monkeypatch.setenv(name, str(value))


def test_fault_19_a_command_ended_by_user_code_has_failed(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr("shardwise.cli.recipes.run", lambda _: sys.exit(0))
    told = "shardwise: shardwise recipes was ended before it was done: sys.exit(0) was called ("
    assert cli("recipes", code=1).err.startswith(told)


def test_the_version_and_mistakes_are_told_once(cli: CommandLine) -> None:
    assert cli("--version").out == f"shardwise {__version__}\n"
    for arguments, text in (
        (["plan", "quickstart", "--device=--"], "argument --device: expected one argument"),
        (["ls", 300 * "x"], f"the path {300 * 'x'} cannot be used: File name too long"),
        (["data", "inspect", "~no-such-user/x"], "(~no-such-user/x) does not exist"),
    ):
        captured = cli(*arguments, code=2)
        assert captured.out == ""
        assert captured.err.startswith("shardwise: ")
        assert captured.err.count(text) == 1


@pytest.mark.parametrize("arguments", [["train", "quickstart", "a=b"], ["train", "quickstart", "--bad"]])
def test_in_torchrun_rank_0_tells_an_error_first(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """torchrun ends the others once it has spoken and exited; one that lives on met what rank 0 did not."""
    waited: list[float] = []
    monkeypatch.setattr(first_failure.time, "sleep", waited.append)
    rank(monkeypatch, 0)
    assert cli.refused(*arguments).startswith("shardwise: ")
    assert waited == []
    rank(monkeypatch, 1)
    assert cli.refused(*arguments).startswith("shardwise: rank 1: ")
    assert sum(waited) > 1


def test_a_launched_rank_records_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    rank(monkeypatch, 0)
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    assert cli.refused("train", "quickstart", "a=b") == ""
    found = read_first_failure(tmp_path / "error.json")
    assert found.exit_code == 2
    assert found.text.startswith("a: unknown key")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m shardwise recipes quickstart | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert result.stderr == ""


def on_ascii_terminal(arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code of a command, and all that it shows."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    code = main(arguments.split())
    terminal.flush()
    terminal.seek(0)
    return code, terminal.read()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("train llama2-tiny train.steps=×", "shardwise: train.steps ('?') must be a whole number"),
        ("data inspect à.txt --samples 1", "?.txt: text, 24 B"),
    ],
)
def test_fault_15_an_ascii_terminal_shows_replacements(
    arguments: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("à.txt").write_text("× – …\n" * 2 + "ok", encoding="utf-8")
    code, said = on_ascii_terminal(arguments, monkeypatch)
    assert code == (2 if "×" in arguments else 0)
    assert text in said


SCRIPT = """
import atexit, sys, threading, time, types
from shardwise.cli import main

class Kept:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.1)
    print("thread")

if sys.argv.pop(1) == "torch":
    sys.modules["torch"] = types.ModuleType("torch")
sys.modules["kept"] = Kept()
atexit.register(print, "handler")
threading.Thread(target=work).start()
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("command", "code", "torch", "last"), [("--version", 0, "torch", []), ("no-command", 2, "none", ["taken apart"])]
)
def test_threads_and_handlers_end_before_the_process(command: str, code: int, torch: str, last: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, torch, command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-2 - len(last) :] == ["thread", "handler", *last]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prose_is_fitted_to_a_terminal_and_commands_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 40
    assert fit_to_terminal(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in fit_to_terminal(text, Terminal()).splitlines())
    for beginning, margin in (("name  ", "    "), ("  name  ", "      "), ("#   name  ", "#       ")):
        _, continued = fit_to_terminal(beginning + "word " * 16, Terminal()).splitlines()
        assert continued.startswith(f"{margin}word")
    monkeypatch.setenv("COLUMNS", "40")
    command = "shardwise train llama2-tiny train.steps=40 --run-dir 'runs/a b' --nproc 2"
    assert fit_to_terminal(f"resume: {command}", Terminal()) == f"resume: {command}"


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


@pytest.mark.parametrize(
    "line",
    [
        "plan llama2-tiny --device h100:2",
        "train llama2-7b --dry-run --nproc 128",
        "top --once runs/run",
        "report runs/run runs/other",
    ],
)
def test_what_a_command_prints_fits(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """With the words that a file gets; a dry run stays YAML."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("run", "other"):
        write_run(Path("runs", name), [Start(0, 24)], experts=True)
    whole = cli(*line.split()).out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = cli(*line.split()).out
    # No word is cut, such as the path of a folder.
    assert max(len(row) for row in shown.splitlines() if " " in row.strip()) <= 80
    if "--dry-run" in line:
        # The host's free memory differs from moment to moment.
        first, second = (re.sub(r"#|[\d.]+", "", text).split() for text in (shown, whole))
        assert first == second
        assert parse_yaml(shown, "shown") == parse_yaml(whole, "whole")
