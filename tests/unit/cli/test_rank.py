"""How a rank ends: what it says, and with which exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.launch.environment import ERROR_FILE
from shardwise.launch.failure import Failure, read_failure

SCRIPT = """
import os, signal, sys, types
from pathlib import Path
from shardwise.cli import rank
from shardwise.config import load_config
from shardwise.errors import ConfigError, RunError
from shardwise.launch.environment import joined

def run(*arguments):
{body}
    return 0

sys.modules["shardwise.train"] = types.SimpleNamespace(run=run)
config, path = load_config("llama2-tiny"), Path(sys.argv[1])
place = joined()
sys.exit(rank.run_alone(config, "r", path) if place is None else rank.run_rank(config, "r", path, place))
"""
PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
SENTENCES = [
    ("pass", 0, ""),
    ("raise RunError('loss is nan at step 3')", 1, "loss is nan at step 3"),
    ("raise ConfigError(['a', 'b'])", 2, "2 errors\n- a\n- b"),
    ("1 / 0", 1, "rank {rank} failed: ZeroDivisionError: division by zero\ntraceback: {log}"),
    ("os.kill(os.getpid(), signal.SIGINT)", 1, "the run was stopped by Ctrl-C (SIGINT); no checkpoint was saved"),
]


def train(body: str, path: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.replace("{body}", f"    {body}")
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], env=variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("body", "code", "text"), SENTENCES, ids=[body for body, _, _ in SENTENCES])
def test_alone(body: str, code: int, text: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0000.log"
    result = train(body, tmp_path, {})
    shown = text.format(rank=0, log=log)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", f"shardwise: {shown}\n" if shown else "")
    if "traceback" in text:
        assert "in run\n" in log.read_text()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_alone_and_stopped(name: str, tmp_path: Path) -> None:
    result = train(f"os.kill(os.getpid(), signal.{name})", tmp_path, {})
    assert result.returncode == 1
    assert result.stderr == f"shardwise: the run was stopped by {name}; no checkpoint was saved\n"


@pytest.mark.parametrize(("body", "code", "text"), SENTENCES, ids=[body for body, _, _ in SENTENCES])
def test_launched(body: str, code: int, text: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0001.log"
    error_file = tmp_path / "error.json"
    result = train(body, tmp_path, {**PLACE, ERROR_FILE: str(error_file)})
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")
    shown = text.format(rank=1, log=log)
    assert read_failure(error_file) == (Failure(1, shown, code) if code else None)
    assert log.exists()
