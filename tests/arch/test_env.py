"""`make env`: does nothing when it is current, and says what a machine lacks. What it installs, a fresh clone shows."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.arch.source import ROOT

INPUTS = ("Makefile", "pyproject.toml", "constraints.txt", "scripts/env.sh")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what `make env` reads, with an environment that is complete and newer than all of it."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv" / ".complete").touch()
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60)


def test_a_complete_environment_is_left_alone(checkout: Path) -> None:
    assert make(checkout, "--question", "env").returncode == 0


@pytest.mark.parametrize("name", [name for name in INPUTS if name != "Makefile"])
def test_a_changed_input_renews_the_environment(checkout: Path, name: str) -> None:
    (checkout / name).touch()
    os.utime(checkout / ".venv" / ".complete", (2, 2))
    assert make(checkout, "--question", "env").returncode == 1


def test_another_torch_is_installed_into_a_complete_environment(checkout: Path) -> None:
    assert "scripts/env.sh 2.11.0" in make(checkout, "--dry-run", "env", "TORCH=2.11.0").stdout


def test_a_missing_python_is_named(checkout: Path) -> None:
    (checkout / ".venv" / ".complete").unlink()
    result = make(checkout, "env", "PYTHON=false")
    assert result.returncode != 0
    assert "no Python >= 3.11 found (looked for: false)" in result.stderr


def test_the_quickstart_takes_arguments(checkout: Path) -> None:
    command = make(checkout, "--dry-run", "train", "ARGS=train.steps=3").stdout
    assert "shardwise train quickstart" in command
    assert "train.steps=3" in command


def test_pins_name_versions_only() -> None:
    """No addresses, no local builds: a pin means the same on every machine."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 and not set(line) & set("@:/+ ") for line in pins)
