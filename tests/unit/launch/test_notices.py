"""Notices: what a target is told, and that none of them ends or delays a run, or shows its secret."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.base.errors import ConfigError, RunError
from shardwise.config import check_layout, load_config
from shardwise.launch import notices
from shardwise.launch.environment import NODE, Rank
from shardwise.launch.failed_run import failure_text
from shardwise.launch.first_failure import Failure
from shardwise.launch.rank_process import failure_recorded
from tests.arch.source import ROOT
from tests.e2e import processes
from tests.loopback_hooks import SECRET, Hooks, serve
from tests.monitor_runs import FIRST, Start, write_run
from tests.unit.train.test_report import record, reporter

FIELDS = ["event", "run", "step", "loss", "reason", "exit_code", "time", "text"]


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    with serve() as server:
        notices._known_problems.clear()
        yield server
        notices.set_up([])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [Start(0, 25, None)])


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The problems that a process prints at its end."""
    notices.wait()
    return capsys.readouterr().err.splitlines()


def test_an_address_and_a_command_are_told(hooks: Hooks, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "a notice.json"
    notices.set_up([hooks.address(), f"tee '{file}'"])
    notices.end(run, "finished")
    notices.wait()
    (notice,) = hooks.notices
    assert list(notice) == FIELDS
    assert (notice["event"], notice["run"], notice["step"], notice["exit_code"]) == ("end", "run", 25, 0)
    assert notice["text"] == f"run: end at step 25, loss {notice['loss']:.4f}: finished"
    assert json.loads(file.read_text()) == notice


def test_the_page_shows_each_field_no_record_an_address_and_what_a_target_may_be() -> None:
    page = (ROOT / "docs/notices.md").read_text(encoding="utf-8")
    assert re.findall(r'^    "(\w+)":', page, re.MULTILINE) == FIELDS
    assert tuple(re.findall(r"^- `(\w+)`:", page, re.MULTILINE)) == get_args(notices.Event)
    commands = (f"curl https://h/{SECRET}", f"curl https://h/a,{SECRET}", f"curl http://[::1]/a]{SECRET}")
    config = keys(f"https://hooks.example.org/{SECRET}", f"http://localhost:8/{SECRET}", *commands)
    recorded = config.recorded()
    assert SECRET not in json.dumps(recorded)
    assert recorded["log"]["notify"][:2] == ["https://hooks.example.org/(redacted)", "http://localhost:8/(redacted)"]
    again = load_config("llama2-tiny", [f"log.notify={json.dumps(recorded['log']['notify'])}"])
    assert again.recorded() == recorded
    for target in [
        "http POST localhost:8",
        "https-notify",
        "http.py",
        "https://h",
        "https://[::1]:8/x",
        "HTTPS://h:65535?x",
    ]:
        check_layout(keys(target), 1)


def test_a_run_before_its_first_step_has_no_numbers(hooks: Hooks, tmp_path: Path) -> None:
    notices.set_up([hooks.address()])
    notices.send("failure", tmp_path / "new", "s3://me:5ecret@bucket is full", 1)
    notices.wait()
    (notice,) = hooks.notices
    assert (notice["step"], notice["loss"], notice["text"]) == (None, None, f"new: failure: {notice['reason']}")
    assert "5ecret" not in notice["reason"]


@pytest.mark.parametrize(
    ("reason", "job", "events"),
    [
        ("finished", False, [("end", 0)]),
        ("stop_after", False, [("end", 0)]),
        ("stopped by SIGTERM", False, [("end", 75)]),
        ("failed: OSError: x", False, []),
        ("next stage", False, []),
        ("finished", True, []),
    ],
)
def test_the_end_is_told_by_who_sees_it(
    reason: str, job: bool, events: list[tuple[str, int]], hooks: Hooks, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is told by who shows it to the user, and all of a job by its supervisor."""
    if job:
        monkeypatch.setenv(NODE, "{}")
    notices.set_up([hooks.address()])
    notices.end(run, reason)
    notices.wait()
    assert [(notice["event"], notice["exit_code"]) for notice in hooks.notices] == events


def test_a_failure_is_told_once_for_all_ranks(hooks: Hooks, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices.set_up([hooks.address()])
    for rank in (1, 0):
        failure_text(Failure(rank, f"rank {rank} was killed\nmore", 1), run, FIRST, None, steps=27)
    notices.wait()
    (notice,) = hooks.notices
    assert (notice["event"], notice["step"], notice["exit_code"]) == ("failure", 27, 1)
    assert notice["reason"] == "rank 1 was killed"
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    (run / "failure.json").unlink()
    failure_text(Failure(0, "torchrun starts it again", 1), run, FIRST, None)
    notices.wait()
    assert len(hooks.notices) == 1


def test_ranks_record_a_failure_before_rank_0_tells_it(
    hooks: Hooks, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without targets none of them waits."""

    def fail(rank: int) -> None:
        with pytest.raises(RunError, match="nan"), failure_recorded(Rank(rank, rank, 3), run):
            raise RunError(f"rank {rank}: the loss is nan")

    def sleep(seconds: float) -> None:
        if seconds:
            assert seconds > 2
            turns.append(json.loads((run / "failure.json").read_text())["rank"])
            if turns == [1]:
                fail(0)

    turns: list[int] = []
    monkeypatch.setattr(time, "sleep", sleep)
    fail(1)
    assert turns == []
    notices.set_up([hooks.address()])
    fail(1)
    notices.wait()
    os.utime(run / ".failure-told", (FIRST, FIRST))
    fail(2)
    notices.wait()
    assert turns == [1, 2]
    assert [notice["reason"] for notice in hooks.notices] == [f"rank {rank}: the loss is nan" for rank in (0, 2)]


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restarts_by_launchers_are_told(name: str, hooks: Hooks, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices.set_up([hooks.address()])
    for count in ("0", "1"):
        monkeypatch.setenv(name, count)
        notices.begin(run)
    notices.wait()
    (notice,) = hooks.notices
    assert (notice["event"], notice["exit_code"]) == ("restart", None)
    assert f"({name}=1)" in notice["reason"]


def test_what_cannot_be_told_is_a_warning_once_for_each_reason_and_shows_no_secret(
    hooks: Hooks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK", hooks.address("404"))
    monkeypatch.setenv("PLAIN", f"http://example.org/{SECRET}")
    host = f"http://localhost:{hooks.port}/(redacted)"
    (script := tmp_path / "no-script").touch(0o755)
    expected = {
        hooks.address("404"): (host, "HTTP Error 404: Not Found"),
        hooks.address("moved"): (host, "it sends to another address, where a notice does not arrive"),
        f"http://127.0.0.1:1/{SECRET}": ("http://127.0.0.1:1/(redacted)", "connection refused"),
        f"http://localhost:1/é{SECRET}": ("http://localhost:1/(redacted)", "it cannot be told (UnicodeEncodeError)"),
        "https://h/(redacted)": (
            "https://h/(redacted)",
            "config.yaml keeps no path of an address: give log.notify again, or an address by env:NAME",
        ),
        "env:HOOK": ("env:HOOK", "HTTP Error 404: Not Found"),
        "env:UNSET": ("env:UNSET", "the variable must be set to an https address without a log-in"),
        "env:PLAIN": ("env:PLAIN", "the variable must be set to an https address without a log-in"),
        "false": ("false", "it ended with exit code 1"),
        f"sh -c 'kill -9 $$' https://x/{SECRET}": (
            "sh -c 'kill -9 $$' https://x/(redacted)", "it was killed by SIGKILL",
        ),
        "/no/such -x": ("/no/such -x", "no program /no/such"),
        "no-such-program": ("no-such-program", "no program no-such-program on the PATH"),
        "./told.json": ("./told.json", "no program ./told.json"),
        str(script): (str(script), f"exec format error: '{script}'"),
    }  # fmt: skip
    notices.set_up([*expected])
    early = ("no program", "the variable", "config.yaml")
    known = [f"log.notify: {name}: {why}" for name, why in expected.values() if why.startswith(early)]
    assert len(known) == 6
    assert notices.problems([*expected]) == known
    for _ in range(2):
        notices.send("spike", run, "the loss is high")
        notices.wait()
    err = told(capsys)
    late = {f"log.notify: {name}: {why}" for name, why in expected.values()} - {*known}
    assert sorted(err) == sorted(f"warning: {problem}" for problem in late)
    assert hooks.notices == []


def test_hanging_targets_hold_nothing_up(
    hooks: Hooks, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and what it has started end with the time that it had."""
    monkeypatch.setattr(notices, "SECONDS", 0.3)
    pid = tmp_path / "pid"
    notices.set_up([hooks.address("hang"), f"sh -c 'sleep 600 & echo $! > {pid}; wait'"])
    notices.send("end", run, "finished", 0)
    err = told(capsys)
    assert len(err) == 2
    assert all(line.endswith(": no answer within 0.3 s") for line in err), err
    assert SECRET not in str(err)
    assert processes.wait_for(lambda: not processes.alive(int(pid.read_text())), 20)


def test_a_spike_is_told_while_the_run_goes_on(hooks: Hooks, tmp_path: Path) -> None:
    notices.set_up([hooks.address()])
    made, _ = reporter(tmp_path)
    with made:
        made.start()
        for step, spike in enumerate([7.0, 8.0, 0.0], 1):
            made.step(record(step, loss_spike=spike))
    other, _ = reporter(tmp_path, rank=3)
    with other:
        other.start()
        other.step(record(1, loss_spike=7.0))
    notices.wait()
    (notice,) = hooks.notices
    assert (notice["event"], notice["step"], notice["exit_code"]) == ("spike", 1, None)
    assert notice["reason"] == "7 standard deviations above the mean of 20 steps before"


def keys(*targets: str) -> Any:
    return load_config("llama2-tiny", [f"log.notify={json.dumps(targets)}"])


@pytest.mark.parametrize(
    "target",
    [
        f"http://localhost.example.org/{SECRET}", f"ftp://host/{SECRET}", f"https://me:{SECRET}@host/x",
        f"https:///{SECRET}", f"https://host/a,{SECRET}", "env:A-B", "env:SHARDWISE_HOOK", " ", f"notify '{SECRET}",
        f"https:h.org/{SECRET}", f" HTTPS//h.org/{SECRET}", f"'https://h.org/{SECRET}'", f"https://h:abc/{SECRET}",
        f"https://h:65536/{SECRET}", f"https://./{SECRET}", f"https://[::/{SECRET}",
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_used_is_refused_in_one_sentence(target: str) -> None:
    with pytest.raises(ConfigError, match=r"^log\.notify \(.*\) must be a command, an https address") as error:
        check_layout(keys(target), 1)
    assert SECRET not in str(error.value) or target.startswith("notify")
