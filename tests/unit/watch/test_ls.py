"""`shardwise ls`: the devices, the runs, and what cannot be read."""

import contextlib
import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.errors import RunError
from shardwise.base.local_devices import DeviceList, DeviceProcess, LocalDevice
from shardwise.runs.folder import FORMAT, RunLock, json_text
from shardwise_jobs import slurm_commands
from shardwise_jobs.submission import record
from shardwise_watch.cli import ls
from tests.command_line import CommandLine
from tests.e2e.test_pages import assert_shown, blocks
from tests.monitor_runs import FIRST, GIB, Mesh, Start, stamp, write_run
from tests.unit.watch.pages import set_written

LONG = "gpt3-tiny-with-a-long-name-20260101-000000"
GPUS = [
    LocalDevice(
        "nvidia",
        index,
        "NVIDIA H100 80GB HBM3",
        memory_bytes=20 * GIB,
        memory_total_bytes=80 * GIB,
        utilization=0.931,
        links=("18 NVLinks",),
        processes=(*(DeviceProcess(10 + rank, LONG, rank) for rank in (0, 1, 2, 5)), DeviceProcess(99)),
    )
    for index in range(2)
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ls.local_devices, "devices_of_machine", lambda _: DeviceList(list(GPUS)))


def write_three() -> None:
    write_run(Path(f"runs/{LONG}"), [Start(0, 20, None)], steps=1000)
    write_run(Path("runs/failed"), [Start(0, 5, "failed: OSError: no room")], mesh=Mesh(1, 1, 1, 1), steps=9)
    write_run(Path("runs/done"), mesh=Mesh(1, 1, 1, 1))
    for name, ago in ((LONG, 1), ("failed", 2), ("done", 3)):
        set_written(Path(f"runs/{name}/metrics.jsonl"), FIRST - ago)


def test_the_table(cli: CommandLine) -> None:
    write_three()
    lines = [line.split() for line in cli("ls").out.splitlines()]
    gpu = "0: NVIDIA H100 80GB HBM3 20.0 GiB of 80.0 GiB 93% 18 NVLinks ranks 0-2, 5 of"
    assert " ".join(lines[1]) == f"{gpu} {LONG}; process 99"
    assert lines[4] == ["run", "state", "step", "loss", "tok/s", "MFU", "ETA", "goodput", "heard", "parent"]
    assert lines[5][:6] == [LONG, "killed", "20/1000", "2.8944", "8.2k", "41%"]
    assert lines[6][:3] == ["failed", "failed", "5/9"]
    assert lines[7][:3] == ["done", "finished", "20/20"]


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """A process that has had a run's lock since its start: one that took it now would start the run again."""
    with RunLock(run):
        (run / ".lock").write_text(json.dumps({"host": platform.node(), "pid": 1, "started": stamp(FIRST)}))
        yield


def terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)


def test_the_page_shows_the_table(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """In a terminal of 80 columns."""
    path = write_run(Path("runs/tiny-2"), [Start(0, 20, None)], steps=1000)
    write_run(Path("runs/tiny-1"), mesh=Mesh(1, 1, 1, 1))
    gpus = [replace(gpu, processes=(DeviceProcess(10, path.name, gpu.index),)) for gpu in GPUS]
    monkeypatch.setattr(ls.local_devices, "devices_of_machine", lambda _: DeviceList(gpus))
    terminal(80, monkeypatch)
    with held(path):
        said = cli("ls").out
    (block,) = (block for block in blocks("docs/watching.md") if block.heading == "List devices and runs")
    assert block.shown
    assert_shown(block, said)


def test_the_object_of_each_folder(cli: CommandLine) -> None:
    write_three()
    with held(Path(f"runs/{LONG}")):
        found = cli.facts("ls")
    assert (found["schema"], found["host"], found["problems"]) == (1, platform.node(), [])
    assert found["devices"][1]["processes"][4] == {"pid": 99, "run": None, "rank": None}
    assert [run["run"] for run in found["runs"]] == [LONG, "failed", "done"]
    first = found["runs"][0]
    assert set(first) == {
        *("run", "path", "state", "reason", "step", "steps", "loss", "tokens_per_second", "mfu", "eta_seconds"),
        *("goodput", "heard", "parent"),
    }
    assert (first["state"], found["runs"][1]["reason"]) == ("silent", "failed: OSError: no room")
    assert first["goodput"] == pytest.approx((31 - 10 - 0.4 - 0.5) / 31)
    write_three()
    Path("runs").rename("elsewhere")
    for folder, names in (("elsewhere", [LONG, "failed", "done"]), ("elsewhere/done", ["done"])):
        assert [run["run"] for run in cli.facts("ls", folder)["runs"]] == names
    assert cli("ls").out.endswith("no run in runs/\n")
    assert not Path("runs").exists()
    assert "DIR (nowhere) must be a folder of runs, or a run's folder" in cli.refused("ls", "nowhere")


def test_a_job_that_was_not_submitted_is_told(cli: CommandLine) -> None:
    """Folders with a job in the queue, with a run or with a script of the user's own are none of it."""
    write_three()
    for name in ("done", "waits", "written", "own"):
        Path("runs", name).mkdir(exist_ok=True)
        Path("runs", name, "job.sh").touch()
        Path("runs", name, "recipe.yaml").touch()
    Path("runs/own/recipe.yaml").unlink()
    Path("runs/waits/jobs.jsonl").touch()
    Path("runs/link").symlink_to("written")
    sentence = "runs/written holds a job that was not submitted: submit it by `sbatch runs/written/job.sh`"
    for folder in ("runs", "runs/written"):
        assert [text for text in cli.facts("ls", folder)["problems"] if "job.sh" in text] == [sentence]
    assert sentence in cli("ls").err


def test_a_submitted_job_is_listed_before_its_run_begins(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    write_three()
    for name, number in (("done", "6"), ("waits", "7"), ("starts", "8"), ("is-over", "9")):
        Path("runs", name).mkdir(exist_ok=True)
        record(Path("runs", name), number, "train")
    jobs = [
        slurm_commands._job(f"{number}|{state}|{reason}|2||0:05|1:00|gpu|N/A|T|shardwise:{Path.cwd()}/runs/{run}")
        for number, state, reason, run in (("7", "PENDING", "Priority", "waits"), ("8", "RUNNING", "None", "starts"))
    ]
    monkeypatch.setattr(slurm_commands, "jobs", lambda timeout: jobs)
    monkeypatch.setattr(slurm_commands, "restarts", lambda _, timeout: 0)
    rows = [line.split("  ")[0:1] + line.split()[1:] for line in cli("ls").out.split("\n\n")[1].splitlines()]
    assert rows[1] == ["waits", "queued", "(Priority),", "job", "7"]
    assert rows[2] == ["starts", "starting,", "job", "8"]
    assert "is-over" not in str(rows)
    found = cli.facts("ls")
    assert [(job["id"], job["state"], job["reason"], Path(job["run"]).name) for job in found["jobs"]] == [
        ("7", "queued", "Priority", "waits"),
        ("8", "starting", "", "starts"),
    ]

    def silent(timeout: float) -> None:
        raise RunError("cannot reach SLURM")

    monkeypatch.setattr(slurm_commands, "jobs", silent)
    assert cli("ls").err == "submitted jobs: cannot reach SLURM\n"


@pytest.mark.parametrize("program", ["squeue", "scontrol"])
def test_a_slurm_that_does_not_answer_holds_the_list_up_for_three_seconds_at_most(
    program: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_three()
    Path("runs", "waits").mkdir()
    record(Path("runs", "waits"), "7", "train")
    job = f"7|PENDING|Priority|2||0:05|1:00|gpu|N/A|T|shardwise:{Path('runs', 'waits').absolute()}\n"
    timeouts = []

    def hangs(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        timeouts.append(timeout)
        if command[0] == program:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0, stdout=job, stderr="")

    monkeypatch.setattr(subprocess, "run", hangs)
    shown = cli("ls")
    assert shown.err == f"submitted jobs: {program} did not answer within 3 s\n"
    assert "done" in shown.out
    assert set(timeouts) == {3}


def test_fault_21_a_run_that_cannot_be_read_is_a_row(cli: CommandLine) -> None:
    write_three()
    Path("runs/failed/run.json").write_text(json_text({"id": "ab" * 16, "format": FORMAT + 1}))
    Path("runs/done/config.yaml").write_text("train: [1]\nlog: {every: x}\n")
    Path("runs/done/ranks").rename("runs/done/elsewhere")
    Path(f"runs/{LONG}/config.yaml").write_text("&a [*a]")
    out, err = cli("ls")
    rows = {line.split()[0]: line.split()[1:] for line in out.split("\n\n")[1].splitlines()}
    assert (rows["failed"][0], rows["done"][:2]) == ("unreadable", ["finished", "20/20"])
    assert LONG in rows
    assert len(err.splitlines()) == 2
    assert f"runs/{LONG}/config.yaml is damaged: it must have at most 64 levels" in err
    found = cli.facts("ls")
    (failed,) = (run for run in found["runs"] if run["run"] == "failed")
    assert (failed["state"], failed["step"]) == ("unreadable", None)
    assert "a newer one wrote it: update shardwise" in failed["reason"]
    Path("runs/done/config.yaml").write_text("[]")
    assert "runs/done/config.yaml is damaged: it is no mapping" in cli("ls").err
