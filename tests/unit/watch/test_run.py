"""What a run's folder tells: its steps, its ranks, its state; from old, damaged and unreadable folders too."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.runs.failure_record import FailureRecord
from shardwise.runs.folder import FORMAT, JsonLines, RunDirectory, RunLock, json_text
from shardwise_watch.report.numbers import report_numbers
from shardwise_watch.run import RunView, UnreadableRun, open_run, run_folders, runs_at
from shardwise_watch.run_snapshot import run_snapshot
from shardwise_watch.screen.frame import FrameReader, make_frame
from shardwise_watch.screen.panels import event_line
from tests.command_line import CommandLine
from tests.monitor_runs import FIRST, GIB, Mesh, Start, ending, loss_of, stamp, write_run
from tests.unit.watch.pages import events_of, set_written, write_events

RESTARTED = [Start(0, 27, "failed: RunError: a rank ended"), Start(20, 25, None), Start(20, 130)]


def opened(run: Path, *, whole: bool = False) -> RunView:
    return RunView(run, all_steps=whole)


def append(run: Path, *records: dict[str, Any], end: str = "\n") -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(map(json_text, records)) + end)


def after(run: RunView, *records: dict[str, Any]) -> tuple[str, str]:
    """The state of a run, and which start it is in, once it has written more."""
    if records:
        append(run.path, *records)
    run.refresh()
    return run.state, run.restart


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", RESTARTED, compiles=True, straggler=3, spike=15)


@pytest.mark.parametrize("whole", [True, False])
def test_both_ways_of_reading_tell_the_same(whole: bool, restarted: Path) -> None:
    run, all_of_it = opened(restarted, whole=whole), opened(restarted, whole=True)
    for name in ("state", "step", "steps", "step_seconds", "last", "events", "evaluations", "goodput", "reason"):
        assert getattr(run, name) == getattr(all_of_it, name), name
    assert run.lost.by_cause == all_of_it.lost.by_cause
    assert (run.step, run.steps, run.lost.starts) == (130, 130, 3)
    assert run.lost.steps == 7 + 5
    assert (run.series.steps[-1], run.series.numbers["loss"][-1]) == (130, loss_of(130))
    series = all_of_it.series
    assert list(series.steps) == list(range(1, 131)), "steps that were undone are left out"
    assert all(len(column) == 130 for column in (*series.numbers.values(), *series.parts.values()))
    assert [one["step"] for one in all_of_it.evaluations] == list(range(10, 131, 10))


@pytest.mark.parametrize("whole", [True, False])
def test_steps_that_were_undone_are_gone_before_others_are_taken(whole: bool, tmp_path: Path) -> None:
    run = opened(write_run(tmp_path / "run", [Start(0, 27, None), Start(20, 20, None)]), whole=whole)
    assert (run.step, run.evaluations[-1]["step"], run.lost.steps) == (20, 20, 7)
    assert max(run.series.steps, default=0) == (20 if whole else 0)
    assert run.step_seconds is None, "what it took before the restart may not come again"


def test_a_growing_run_is_read_on(restarted: Path) -> None:
    text = (restarted / "metrics.jsonl").read_text()
    for whole in (True, False):
        (restarted / "metrics.jsonl").write_text("")
        run = opened(restarted, whole=whole)
        for length in range(0, len(text), 7000):
            (restarted / "metrics.jsonl").write_text(text[:length])
            run.refresh()
        (restarted / "metrics.jsonl").write_text(text)
        assert run.refresh()
        assert not run.refresh()
        assert run.lost.by_cause == opened(restarted, whole=True).lost.by_cause
        assert (run.step, run.state) == (130, "finished")


def test_a_run_that_was_replaced_forgets_what_was_there(tmp_path: Path) -> None:
    run = opened(write_run(tmp_path / "run", [Start(0, 50)]), whole=True)
    (tmp_path / "run/metrics.jsonl").unlink()
    write_run(tmp_path / "run", [Start(0, 12)], first=FIRST + 1000)
    assert run.refresh()
    assert (run.step, len(run.series.steps), run.lost.starts) == (12, 12, 1)
    assert len([one for one in run.events if one["event"] == "start"]) == 1


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("finished", "finished"),
        ("failed: OSError: no room", "failed"),
        ("stop_after", "stopped"),
        ("closed", "stopped"),
        (None, "killed"),
    ],
)
def test_the_state_of_a_run_that_is_over(ending: str | None, state: str, tmp_path: Path) -> None:
    run = opened(write_run(tmp_path / "run", [Start(0, 5, ending)], steps=9))
    assert (run.state, run.reason, run.eta_seconds) == (state, ending or "", None)


def test_the_state_of_a_run_that_goes_on(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [Start(0, 5, "stopped by SIGTERM")], steps=9)
    with RunLock(path):
        run = opened(path)
        stop = {"event": "stop", "time": "2100-01-01T00:00:00+00:00", "reason": "stopped by SIGTERM"}
        again = "restarting (start 2)"
        assert after(run) == ("starting", again), "it goes on, and has not said so yet"
        assert after(run, stop) == ("stopped", ""), "it has not ended yet, but says that it does"
        assert after(run, {"event": "start"}) == ("starting", again)
        assert after(run, {"event": "step", "step": 6, "step_seconds": 10.0}) == ("running", "")
        assert run.eta_seconds == 30.0
        for ago, every, state in ((100, 1, "running"), (300, 1, "silent"), (300, 20, "running"), (700, 20, "silent")):
            set_written(path / "metrics.jsonl", time.time() - ago)
            (path / "config.yaml").write_text(f"train: {{steps: 9}}\nlog: {{every: {every}}}\n")
            assert after(run)[0] == state, f"{ago} s, with 10 s a step, of which each {every}. is recorded"
        after(run, stop | {"time": "2100-01-01T00:00:01+00:00", "reason": "next stage"})
        assert (run.state, run.reason) == ("starting", ""), "it goes on in the same processes"
        after(run, {"event": "start"})
        for ago, state in ((300, "starting"), (700, "silent")):
            set_written(path / "metrics.jsonl", time.time() - ago)
            assert after(run)[0] == state
    assert run.state == "killed"


@pytest.mark.parametrize("ending", [None, "failed: OSError: no room"])
def test_a_later_start_is_told_by_its_number(ending: str | None, tmp_path: Path) -> None:
    """Also of a run that was killed, whose last record is of a step, and before the new start has recorded itself."""
    path = write_run(tmp_path / "run", [Start(0, 5, None), Start(4, 8, ending)], steps=9)
    with RunLock(path):
        run, soon = opened(path), stamp(time.time() + 9)
        assert after(run) == ("starting", "restarting (start 3)")
        assert after(run, {"event": "start", "time": soon}) == ("starting", "restarting (start 3)")
        assert after(run, {"event": "step", "time": soon, "step": 5}) == ("running", "")
    new = RunDirectory(tmp_path / "new").create()
    new.write_config("train: {steps: 9}\n")
    with RunLock(new.path):
        assert after(opened(new.path)) == ("starting", "")


def test_a_job_that_starts_its_ranks_again_has_not_failed(tmp_path: Path) -> None:
    """Its supervisor has the folder's lock since the first start, and has recorded how that one ended."""
    path = write_run(tmp_path / "run", [Start(0, 5, None)], steps=9)
    stop = time.time() + 60
    with RunLock(path):
        append(path, {"event": "stop", "time": stamp(stop), "step": 5, "reason": "failed: rank 0 lost the connection"})
        (path / "restarts.jsonl").write_text(json_text(ending("failed", stop - 3600, 30.0, 5)) + "\n")
        run = opened(path)
        assert run.state == "failed", "the record is of an earlier start"
        with JsonLines(path / "restarts.jsonl") as file:
            file.write(ending("failed", stop - 30, 31.0, 5))
        assert run.state == "starting"
        FailureRecord(stamp(stop + 1), "rank 1 was killed", step=5).write(RunDirectory(path))
        assert after(run)[0] == "failed", "it is not started again"
    (path / "failure.json").unlink()
    assert after(run)[0] == "failed", "nobody is at work"


def test_ranks_and_nodes(restarted: Path) -> None:
    run = opened(restarted)
    views = run.ranks()
    assert [view.rank for view in views] == list(range(8))
    assert [view.relative for view in views] == [2.0 if rank == 3 else 1.0 for rank in range(8)]
    assert (views[5].place, views[5].host, views[5].step) == ({"pp": 1, "dp": 0, "tp": 1}, "node-001", 130)
    assert views[1].memory_bytes == 14 * GIB + GIB // 64
    nodes = run.nodes(views)
    assert [(node.host, node.ranks) for node in nodes] == [("node-000", (0, 1, 2, 3)), ("node-001", (4, 5, 6, 7))]
    assert [(node.cpu, node.cores, node.memory_total_bytes) for node in nodes] == [(0.35, 64, 512 * GIB)] * 2


def test_a_run_that_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [Start(0, 5, None)], mesh=Mesh(1, 8, 1, 2), steps=9)
    write_run(path, [Start(5, 9)], mesh=Mesh(1, 4, 1, 1), first=FIRST + 100)
    run = opened(path)
    assert [view.rank for view in run.ranks()] == [0, 1, 2, 3]
    assert [node.host for node in run.nodes(run.ranks())] == ["node-000"]


def test_a_single_slow_step_names_no_rank(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    before = [view.relative for view in opened(path).ranks()]
    file = path / "ranks/rank-0002.jsonl"
    *lines, last = file.read_text().splitlines()
    slow = json.loads(last)
    slow["work_seconds"] *= 3
    file.write_text("\n".join([*lines, json.dumps(slow)]) + "\n")
    after = [view.relative for view in opened(path).ranks()]
    assert after == pytest.approx(before, rel=0.05)


def test_damaged_files_beside_the_metrics(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for name in ("config.yaml", "environment.json", "results.json"):
        (path / name).write_text('{"a: [')
    (path / "restarts.jsonl").write_text('{"how": "failed"}\n{"how"')
    run = opened(path)
    assert run.config == run.environment == run.results == {}
    assert (run.state, run.steps, run.ends()) == ("finished", 20, [{"event": "ended", "how": "failed"}])


VIEWS = (["top", "--once"], ["monitor", "--once"], ["report", "--json"], ["report"])


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_no_view_shows_a_secret(view: list[str], tmp_path: Path, cli: CommandLine) -> None:
    """Whatever wrote the run's files: another program, or a library whose text an error repeats."""
    secret = "https://me:hunter2@host/x?token=hunter2"
    run = write_run(tmp_path / "run", [Start(0, 5, f"failed: OSError: {secret} is gone")])
    (run / "config.yaml").write_text(f"data: {{path: '{secret}'}}\nlaunch: {{environment: {{HF_TOKEN: hunter2}}}}\n")
    (run / "environment.json").write_text(json.dumps({"command": ["shardwise", "train", "hub.token=hunter2"]}))
    (run / "restarts.jsonl").write_text(json_text(ending("failed", FIRST, 9.0, 5, text=secret)) + "\n")
    *before, stop = events_of(run)
    warning = {"event": "warning", "time": "2026-01-01T00:00:12+00:00", "step": 2, "text": secret}
    unknown = {"event": "custom", "time": "2026-01-01T00:00:12+00:00", "from": [{"url": secret}]}
    write_events(run, [*before, warning, unknown, stop])
    shown = cli(view[0], run, *view[1:]).out
    if view == ["report"]:
        shown = (run / "report.html").read_text(encoding="utf-8")
    assert "https://(redacted)@host" in shown
    assert "hunter2" not in shown
    events = FrameReader(run).read().events
    assert "hunter2" not in "".join(event_line(event, None).plain for event in events)
    assert {event["event"] for event in events} >= {"ended", "custom"}


def test_bad_input_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    newer = write_run(tmp_path / "newer")
    (tmp_path / "written").mkdir()
    for name in ("job.sh", "recipe.yaml"):
        (tmp_path / "written" / name).touch()
    (newer / "run.json").write_text(json_text({"id": "ab" * 16, "format": FORMAT + 1}))
    for path, message in (
        (None, "^no run found: runs/latest is not there"),
        (tmp_path / "none", "must be the folder of a run, it is not there"),
        (tmp_path, "it holds no run"),
        (
            tmp_path / "written",
            r"/written holds a job that was not submitted: submit it by `sbatch \S+/written/job\.sh`",
        ),
        (newer / "run.json", "it is a file"),
        (newer, "a newer one wrote it: update shardwise$"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_run(path, all_steps=False)


def test_a_refusal_of_the_system_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = write_run(tmp_path / "run")
    run = opened(path)
    with monkeypatch.context() as patched:
        patched.setattr("shardwise_watch.json_lines.open_plain", refuse)
        assert run.refresh() is False, "what was read stays"
        with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read: Permission denied"):
            open_run(path, all_steps=False)
        (unreadable,) = runs_at(str(tmp_path))
        assert isinstance(unreadable, UnreadableRun)
        assert (unreadable.name, unreadable.reason.rpartition(": ")[2]) == ("run", "Permission denied")
        patched.setattr(Path, "exists", refuse)
        with pytest.raises(ConfigError, match="it cannot be read: Permission denied"):
            open_run(path, all_steps=False)
        patched.setattr(Path, "iterdir", refuse)
        with pytest.raises(ConfigError, match="must be readable: Permission denied"):
            run_folders(tmp_path)
    assert run.step == 20


def test_runs_newest_first(tmp_path: Path) -> None:
    for name, written in (("a", 100), ("b", 300), ("c", 200)):
        path = write_run(tmp_path / name, mesh=Mesh(1, 1, 1, 1))
        set_written(path / "metrics.jsonl", written)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "reserved").mkdir()
    assert [run.name for run in runs_at(str(tmp_path))] == ["b", "c", "a"]
    with pytest.raises(ConfigError, match="must be a folder of runs, or a run's folder: there is no such folder"):
        runs_at(str(tmp_path / "none"))
    assert open_run(tmp_path / "latest", all_steps=False).name == "a"


BROKEN = ('"x"', "[1]", "1" + "0" * 400, "[" * 500 + "]" * 500)


def broken(line: str, wrong: str, turn: int) -> str:
    """A record with a wrong value in every second field, beginning with the one or the other."""
    fields = enumerate(json.loads(line).items(), turn)
    texts = (wrong if at % 2 and name != "event" else json.dumps(value) for at, (name, value) in fields)
    return (
        "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in zip(json.loads(line), texts, strict=True)) + "}"
    )


@pytest.mark.parametrize(("turn", "wrong"), [*enumerate(BROKEN)], ids=lambda value: str(value)[:5])
def test_fault_21_every_view_bears_a_field_of_any_type(turn: int, wrong: str, tmp_path: Path, cli: CommandLine) -> None:
    """The last record of each kind counts, in every file."""
    path = write_run(tmp_path / "run", RESTARTED, compiles=True)
    (path / "restarts.jsonl").write_text(json_text(ending("failed", FIRST, 9.0, 5)) + "\n")
    for file in (path / "metrics.jsonl", path / "ranks/rank-0000.jsonl", path / "restarts.jsonl"):
        lines = file.read_text().splitlines()
        for at in {json.loads(line).get("event"): at for at, line in enumerate(lines)}.values():
            lines[at] = broken(lines[at], wrong, turn)
        file.write_text("\n".join(lines) + "\n")
    run = opened(path, whole=True)
    assert report_numbers(run)["run"] == run_snapshot(run)["run"] == make_frame(run, 80).name == "run"
    assert run.step in (129, 130)
    assert len(run.ranks()) == 8
    assert f"{run.step} of 130" in cli("top", path, "--once").out
