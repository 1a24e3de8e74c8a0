"""The run directory: names, atomic files, valid JSON, redaction."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.launch.stop_requests import clear
from shardwise.runs import folder
from shardwise.runs.folder import AppendedFile, JsonLines, RunDirectory, RunLock, read_config

NOON = datetime(2026, 11, 21, 12, 0, 5, tzinfo=UTC)


def test_runs_have_names_and_what_is_replaced_has_numbers(tmp_path: Path) -> None:
    path = folder.new_run_path("/some/folder/quickstart.yml", tmp_path / "runs", now=NOON)
    assert path == tmp_path / "runs" / "quickstart-20261121-120005"
    assert path.is_dir()
    names = [folder.new_run_path("a b", tmp_path, now=NOON).name for _ in range(3)]
    assert names == ["a-b-20261121-120005", "a-b-20261121-120005-2", "a-b-20261121-120005-3"]
    run = RunDirectory(tmp_path)
    for number in (1, 2, 3):
        run.write_config(f"run: {number}\n")
        run.write_environment({"torch": str(number)}, ["cpu"], 1)
    kept = {path.name: path.read_text() for path in tmp_path.glob("config*")}
    assert kept == {"config.yaml": "run: 3\n", "config-0001.yaml": "run: 1\n", "config-0002.yaml": "run: 2\n"}
    versions = {path.name: json.loads(path.read_text())["versions"]["torch"] for path in tmp_path.glob("env*")}
    assert versions == {"environment.json": "3", "environment-0001.json": "1", "environment-0002.json": "2"}


def test_how_far_a_run_came_and_a_checkpoint_must_fit_on_the_disk(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.finished_steps() is None
    run.write_results({"steps": 12})
    assert run.finished_steps() == 12
    run.set_results_aside()
    run.set_results_aside()
    assert run.finished_steps() is None, "a run that went on is not finished, whatever it was before"
    assert json.loads((tmp_path / "results-0001.json").read_text()) == {"steps": 12}
    run = RunDirectory(tmp_path)
    run.require_room(1)
    with pytest.raises(ConfigError, match=r"free disk space under .* must be at least .* \(8192 PiB\): make room"):
        run.require_room(2**63)


@pytest.mark.parametrize(
    ("recorded", "kept"),
    [
        ([("step", 1), ("start", None), ("step", 1), ("step", 2)], [(1, 2), (2, 3)]),
        ([("step", 5), ("step", 10), ("step", 15), ("resume", 10), ("eval", 10)], [(5, 0), (10, 1)]),
        ([("step", "odd"), ("step", 5)], [(5, 1)]),
    ],
    ids=["after a failure", "resumed", "damaged"],
)
def test_a_step_counts_once(recorded: list[tuple[str, object]], kept: list[tuple[int, int]], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lines = [{"event": event, "step": step, "line": line} for line, (event, step) in enumerate(recorded)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"event": "step", "st')
    assert [(event["step"], event["line"]) for event in run.steps()] == kept
    assert len(list(run.events("step"))) == sum(event == "step" for event, _ in recorded)


HOLDER = """
import sys, time
from pathlib import Path
from shardwise.runs.folder import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_runs_in_a_folder_where_the_file_system_has_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not RunLock.is_held(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert RunLock.is_held(tmp_path)
        named = rf"--run-dir \(.*\) is in use by another run \(process {holder.pid} on \S+, since 20.*\): wait for its"
        with pytest.raises(ConfigError, match=named), RunLock(tmp_path):
            raise AssertionError("two processes hold one lock")
        holder.kill()
        holder.wait()
    assert not RunLock.is_held(tmp_path)
    for _ in range(2):
        with RunLock(tmp_path) as lock:
            assert lock.problem is None
            assert RunLock.is_held(tmp_path)
    assert not RunLock.is_held(tmp_path)

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock(tmp_path) as lock:
        assert lock.problem == "Function not implemented"
        assert RunLock.is_held(tmp_path), "it cannot be told that the run is over"


def test_latest_follows_the_newest_run(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name in ("one", "two"):
        RunDirectory(root / name).create().mark_latest(root)
    assert (root / "latest").readlink() == Path("two")
    outside = RunDirectory(tmp_path / "elsewhere").create()
    RunDirectory(root / "latest").mark_latest(root)
    assert (root / "latest").readlink() == Path("two")
    outside.mark_latest(root)
    assert (root / "latest").readlink() == outside.path
    assert sorted(path.name for path in root.iterdir()) == ["latest", "one", "two"]


def test_lines_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    """A part of a line may still have found room."""
    lines = JsonLines(tmp_path / "lines.jsonl")
    file, room = lines._file._file, [5]

    class Filled:
        def write(self, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "no space")
            taken = data[: room[0]]
            room[0] -= len(taken)
            return file.write(taken)

        close = file.close

    lines._file._file = Filled()
    lines.write({"step": 1})
    lines.write({"step": 2})
    assert (tmp_path / "lines.jsonl").read_text() == '{"ste'
    room[0] = 1000
    lines.write({"step": 3})
    lines.close()
    assert (tmp_path / "lines.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


SECRETS = {
    "HF_TOKEN": "hf_abcdef", "SLURM_JWT": "eyJhbGci", "NCCL_DEBUG": "WARN", "MY_DIARY": "private",
    "HF_ENDPOINT": "https://me:word@example.org/models",
}  # fmt: skip


def test_environment_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ["data.tokenizer=t.json", "hub.token=abc", "data.path=https://h/x?sig=5ecret"]
    monkeypatch.setattr("sys.argv", ["shardwise", "train", "quickstart", *keys])
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = RunDirectory(tmp_path / "run").create()
    run.write_environment({"shardwise": "0.1.0", "torch": "2.13.0", "numpy": None}, ["cpu", "cpu"], 2)
    text = run.environment.read_text()
    read = json.loads(text)
    assert read["versions"] == {"shardwise": "0.1.0", "torch": "2.13.0", "numpy": None}
    assert (read["devices"], read["cpus"], read["git"]) == (["cpu", "cpu"], 2, None)
    assert read["command"][3:] == ["data.tokenizer=t.json", "hub.token=(redacted)", "data.path=https://h/x?(redacted)"]
    shown = {name: value for name, value in read["variables"].items() if name in SECRETS}
    assert shown == {"NCCL_DEBUG": "WARN", "HF_ENDPOINT": "https://(redacted)@example.org/models"}
    for secret in ("hf_abcdef", "abc", "word@", "private", "eyJhbGci", "5ecret"):
        assert secret not in text

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    def recorded_git() -> Any:
        run = RunDirectory(tmp_path / "run").create()
        run.write_environment({}, [], 1)
        return json.loads(run.environment.read_text())["git"]

    (tmp_path / "file").write_text("1")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message", "first")
    monkeypatch.chdir(tmp_path)
    state = recorded_git()
    assert len(state["commit"]) == 40
    assert state["modified"] is False
    (tmp_path / "file").write_text("2")
    assert recorded_git()["modified"] is True


def test_fault_17_a_copied_folder_has_another_key_and_a_renamed_one_the_same(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a").create()
    run.id()
    key = run.key()
    copied = RunDirectory(shutil.copytree(run.path, tmp_path / "b"))
    assert copied.id() == run.id()
    assert copied.key() != key
    shutil.copytree(run.path, tmp_path / "linked", copy_function=os.link)
    assert RunDirectory(tmp_path / "linked").key() != run.key(), "of files that are one file, the folders differ"
    shutil.rmtree(tmp_path / "linked")
    key = run.key()
    assert RunDirectory(run.path.rename(tmp_path / "c")).key() == key
    restored = RunDirectory(shutil.copytree(copied.path, tmp_path / "backup"))
    key = restored.key()
    restored.identity.write_bytes(restored.identity.read_bytes())  # in the same folder, as a backup that is restored
    assert restored.key() != key


def test_fault_21_what_cannot_be_written_or_read_is_a_sentence_and_events_have_their_types(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    for path in (run.config, run.metrics, run.path / "stop.json"):
        path.mkdir()
    writers = {
        "config.yaml cannot be made: .*; start in a folder that can be written": lambda: run.write_config("a: 1\n"),
        "metrics.jsonl cannot be made: Is a directory": lambda: AppendedFile(run.metrics),
        "stop.json, by which an earlier run was asked to stop, must be removed": lambda: clear(run.path),
        "metrics.jsonl cannot be read: Is a directory": lambda: list(run.events("step")),
    }
    for problem, write in writers.items():
        with pytest.raises(ConfigError, match=problem):
            write()
    run = RunDirectory(tmp_path).create()
    run.config.write_text("model: 1\nmodel: 2\nmodel: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_config(run)
    problem = "(it, line 2: model is given twice; it, line 3: model is given twice)"
    assert str(caught.value) == f"{tmp_path} must be a run's folder: {run.config} cannot be read {problem}"
    run = RunDirectory(tmp_path / "events").create()
    lines = [
        '{"event": "start", "steps_before": [1]}',
        '{"event": "step", "step": 1e400, "loss": 1.5}',
        '{"event": "step", "step": 2, "loss": "nan", "step_seconds": "x"}',
        '{"event": "resume", "step": true}',
        '{"event": "checkpoint", "of": {"event": "step"}, "step": 1' + "0" * 5000 + "}",
        "[" * 100_000,
    ]
    run.metrics.write_text("\n".join(lines) + "\n")
    assert run.steps() == [{"event": "step", "step": 2, "loss": "nan"}]
    assert list(run.events("start", "checkpoint")) == [{"event": "start"}]
    run.results.write_text('{"steps": -5}')
    assert run.finished_steps() is None
