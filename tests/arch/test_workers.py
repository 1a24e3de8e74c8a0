"""`--workers`: tests in forks of the process that collected them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.arch.source import ROOT

CONFTEST = """\
from tests.workers import Workers

def pytest_configure(config):
    config.pluginmanager.register(Workers(2, lambda nodeid: nodeid.partition("::")[0]))
"""
ENDS = """\
import os, pathlib, pytest, time

@pytest.fixture(scope="session", autouse=True)
def kept(tmp_path_factory):
    yield tmp_path_factory.mktemp("kept")
    pathlib.Path(f"torn-down-{os.getpid()}").touch()

def test_before(kept): assert kept.parent.is_dir()
def test_ends(): os._exit(3)
@pytest.mark.timeout(0.2)
def test_waits(): time.sleep(10)
def test_after(): print("not told, as it passes")
"""
FAILS = (
    "def test_fails():\n    print('printed by the test')\n    assert 1 == 2, 'told by the test'\ndef test_next(): ...\n"
)


def run(at: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("conftest", CONFTEST), ("test_a", ENDS), ("test_b", FAILS), ("test_c", "def test(): ...\n")):
        (at / f"{name}.py").write_text(text)
    (at / "pytest.ini").touch()
    command = [sys.executable, "-P", "-m", "pytest", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        cwd=at,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
    )


def test_each_test_is_told_once_and_the_one_that_ends_its_worker_has_failed(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "3 failed, 4 passed" in ended.stdout
    assert "the worker ended in this test, with exit code 3" in ended.stdout
    assert "Failed: Timeout (>0.2s) from pytest-timeout" in ended.stdout
    assert "AssertionError: told by the test" in ended.stdout
    assert ended.stdout.count("printed by the test") == 2, "the line of the source, and what it printed"
    assert "not told" not in ended.stdout
    assert len(list(tmp_path.glob("torn-down-*"))) == 1, "of the worker that went on; test_b has no such fixture"


def test_the_first_failure_may_end_all(tmp_path: Path) -> None:
    ended = run(tmp_path, "-x", "test_b.py")
    assert ended.returncode == 1, ended.stderr
    assert "stopping after 1 failures" in ended.stdout
    assert "1 failed in" in ended.stdout, "test_next is not told"


def test_a_worker_that_ends_between_tests_is_an_error(tmp_path: Path) -> None:
    """As tests may have been left out."""
    (tmp_path / "test_d.py").write_text("import atexit, os\ndef test_registers(): atexit.register(os._exit, 7)\n")
    ended = run(tmp_path, "test_d.py")
    assert ended.returncode == 3, ended.stdout
    assert "a worker ended between two tests, with exit code 7" in ended.stdout + ended.stderr


def test_a_test_that_hears_the_signal_itself_ends_with_the_run(tmp_path: Path) -> None:
    hears = (
        "import signal, time\ndef test_hears():\n    signal.signal(signal.SIGINT, lambda *_: None)\n    time.sleep(2)\n"
    )
    (tmp_path / "test_d.py").write_text(hears + "def test_more(): ...\n")
    fails = "import time\ndef test_fails():\n    time.sleep(0.5)\n    assert False\n"
    (tmp_path / "test_e.py").write_text(fails)
    ended = run(tmp_path, "-x", "test_d.py", "test_e.py")
    assert (ended.returncode, "1 failed in" in ended.stdout) == (1, True), ended.stdout


def test_an_exit_keeps_its_sentence_and_code(tmp_path: Path) -> None:
    (tmp_path / "test_d.py").write_text("import pytest\ndef test_exits(): pytest.exit('no device', returncode=4)\n")
    ended = run(tmp_path, "test_d.py")
    assert (ended.returncode, "Exit: no device" in ended.stdout) == (4, True), ended.stdout


def test_a_terminals_interrupt_tears_fixtures_down(tmp_path: Path) -> None:
    """All processes hear it, and the workers once more from the one that collected."""
    interrupts = "def test_interrupts(kept):\n    os.killpg(0, signal.SIGINT)\n    time.sleep(20)\n"
    (tmp_path / "test_d.py").write_text(f"import signal\n{ENDS.partition('def test_before')[0]}{interrupts}")
    ended = run(tmp_path, "test_d.py")
    assert ended.returncode == 2, ended.stdout
    assert len(list(tmp_path.glob("torn-down-*"))) == 1
