"""What a job asks SLURM for, what SLURM answers, and its scripts, in which texts of the user stay one word."""

import itertools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError, RunError
from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.config.launch import LaunchConfig
from shardwise_jobs import script, slurm_commands
from shardwise_jobs.script import JobPlan, compile_script, job_script, ranks_per_node
from shardwise_jobs.slurm_commands import _own_words, allocation, devices_of
from shardwise_jobs.submission import check_node_counts, check_run_folder, reserved, rows, write_inputs


def config(*overrides: str) -> Config:
    return load_config("llama2-tiny", overrides)


def launch(*overrides: str) -> LaunchConfig:
    return config(*overrides).launch


def as_it_is(one: Config, _world: int) -> Config:
    return one


def test_accelerators_and_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"gpu": "gpu|gpu:h100:8(S:0-1)\ngpu|gpu:8\n", "trn": "trn|neuron:trn2:16(S:0-1)\n", None: "cpu*|(null)\n"}
    answers = {tuple(f"--partition={name}" for name in [name] if name): text for name, text in rows.items()}
    monkeypatch.setattr(
        slurm_commands, "_run", lambda command: subprocess.CompletedProcess(command, 0, answers[tuple(command[3:])])
    )
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert reserved(launch()) is None
    assert reserved(launch("launch.partition=gpu")) == "gpu:8"
    assert reserved(launch("launch.partition=trn")) == "neuron:trn2:16"
    assert reserved(launch("launch.partition=gpu", "launch.gres=gpu:4")) == "gpu:4"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert reserved(launch("launch.partition=gpu")) is None, "where SLURM is not at hand nothing is known"
    assert (ranks_per_node(3, 1, 2, "gpu:8"), ranks_per_node(None, 1, 2, "gpu:h100:8")) == (3, 8)
    assert ranks_per_node(None, 1, 2, "neuron:trn1:16") == 32
    assert ranks_per_node(None, 4, 2, None) == 2
    with pytest.raises(ConfigError, match=r"launch\.ranks_per_node must be set, .*\(2 ranks\) cannot be cut into 3"):
        ranks_per_node(None, 2, 3, None)
    for given, gres, says in (
        (None, "neuron:1.5", r"launch\.gres \(neuron:1\.5\) must name a whole number of devices"),
        (None, "gpu:", r"launch\.gres \(gpu:\) must name a whole number of devices, such as gpu:8 or neuron:trn2:16"),
        (40, "neuron:trn1:16", r"launch\.ranks_per_node \(40\) must be at most the devices .*, of which there are 32"),
    ):
        with pytest.raises(ConfigError, match=f"^{says}"):
            ranks_per_node(given, 1, 2, gres)
    ranks = ranks_per_node(None, 8, 1, "neuron:trn2:3")
    with pytest.raises(ConfigError, match=r"\(12\) must be a multiple of parallel\.tensor \(8\)"):
        check_node_counts(config("parallel.tensor=8"), (1, 1), ranks, as_it_is)


def test_numbers_of_nodes_that_the_layout_does_not_fill_are_told() -> None:
    layout, notes = check_node_counts(config("train.global_batch=8", "train.micro_batch=2"), (1, 3), 2, as_it_is)
    assert layout.world == 4
    assert notes == ["the layout fills 1 and 2 nodes; of another number from 1 to 3 a part is used"]
    layout, notes = check_node_counts(config("train.global_batch=8"), (3, 4), 1, as_it_is)
    assert layout.world == 4
    assert notes == ["the layout fills 2 and 4 nodes; of another number from 3 to 4 a part is used"]
    with pytest.raises(ConfigError, match=r"train\.global_batch \(8\) must be a multiple"):
        check_node_counts(config("train.global_batch=8"), (5, 7), 1, as_it_is)


def test_a_folder_whose_log_slurm_could_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be without '%' and '\\\\': SLURM replaces them in the path of the"):
        check_run_folder(tmp_path / "50%\\x")
    with pytest.raises(ConfigError, match=r"^--run-dir \('.*a\\nb'\) must be without line breaks"):
        check_run_folder(tmp_path / "a\nb")
    check_run_folder(tmp_path / "a #b")


def job(tmp_path: Path, *overrides: str, ranks: int) -> tuple[JobPlan, Layout]:
    one = load_config("llama2-7b", overrides)
    planned = JobPlan(one, "llama2-7b", overrides, tmp_path / "run", tmp_path, (1, 1), ranks, one.launch.gres)
    return planned, check_layout(one, ranks)


def test_what_costs_steps_or_time_is_told_before_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(slurm_commands, "configuration", lambda: "PreemptMode             = REQUEUE\n")
    planned, layout = job(tmp_path, "parallel.tensor=8", "train.global_batch=8", "train.micro_batch=1", ranks=8)
    told = dict(rows(replace(planned, ranks_per_node=4, nodes=(2, 2)), layout, ()))
    assert told["warning"].startswith("parallel.tensor (8) does not divide the ranks of a node (4)")
    assert "lack preempt_send_user_signal" in told["note"]
    monkeypatch.setattr(slurm_commands, "configuration", lambda: "PreemptMode = OFF\n")
    assert "note" not in dict(rows(planned, layout, ()))


def test_fault_15_a_script_has_the_bytes_of_paths_under_any_locale(tmp_path: Path) -> None:
    under_ascii = "é".encode().decode("ascii", "surrogateescape")
    planned, _ = job(tmp_path, "launch.gres=gpu:h100:8", ranks=8)
    text = job_script(replace(planned, directory=Path(f"/home/{under_ascii}")))
    path = write_inputs(planned, text, "")
    assert b"/home/\xc3\xa9" in path.read_bytes()
    assert slurm_commands._run(["cat"], text).stdout == text.replace(under_ascii, "é")


@pytest.mark.parametrize("target", ["https://h.org/x", "curl https://h.org?x", "https://h.org", "env:X", "tee x"])
def test_files_that_name_a_target_by_its_secret_are_read_by_the_user_alone(target: str, tmp_path: Path) -> None:
    """However the recipe writes it: YAML has escapes and anchors too."""
    planned, _ = job(tmp_path, "launch.gres=gpu:h100:8", f"log.notify=[{target}]", ranks=8)
    folder = write_inputs(planned, "#!/bin/sh\n", "log: {notify: *it}\n").parent
    modes = {path.stat().st_mode & 0o077 == 0 for path in (folder / "job.sh", folder / "recipe.yaml")}
    assert modes == {target.endswith("x") and "h.org" in target}


def plan(*overrides: str, nodes: tuple[int, int] = (2, 4)) -> JobPlan:
    config = load_config("llama2-7b", overrides)
    return JobPlan(config, "llama2-7b", overrides, Path("/runs/a b"), Path("/home/me"), nodes, 8, config.launch.gres)


def test_the_script_has_what_slurm_and_the_reader_want_to_know() -> None:
    keys = ("launch.partition=gpu", "launch.gres=gpu:h100:8", "launch.time=90", "launch.sbatch=[--qos=high]")
    text = job_script(plan(*keys, "launch.environment={NCCL_DEBUG: WARN, GREETING: it's}"))
    lines = text.splitlines()
    assert {
        "#!/usr/bin/env bash", '#SBATCH --job-name="a b"', '#SBATCH --comment="shardwise:/runs/a b"',
        '#SBATCH --output="/runs/a b/logs/job-%j.log"', "#SBATCH --chdir=/home/me", "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:h100:8", "#SBATCH --time=01:30:00", "#SBATCH --exclusive --mem=0", "#SBATCH --nodes=2-4",
        "#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --signal=B:USR1@300", "#SBATCH --qos=high",
        "export NCCL_DEBUG=WARN", """export GREETING='it'"'"'s'""",
    } <= {*lines}  # fmt: skip
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [number for number, line in enumerate(lines) if line and line[0] != "#"]
    assert max(options) < min(commands), "sbatch reads no later ones"
    (command,) = (line for line in lines if "-m shardwise supervise " in line)
    assert "-P -m shardwise supervise llama2-7b launch.partition=gpu" in command
    assert command.endswith("--run-dir '/runs/a b' --ranks-per-node 8 \"$@\") &")


NASTY = ["a b", 'a"; touch run #', "$(touch run)", "`touch run`", "it's", "a\\tb\\", "50%", "ä\u3000ö"]


def sbatch_words(line: str) -> list[str]:
    """A line as sbatch reads it: quotes, a backslash before a sign, and # as the beginning of a comment."""
    return shlex.split(line.removeprefix("#SBATCH"), comments=True)


@pytest.mark.parametrize("text", NASTY)
def test_fault_20_texts_of_the_user_stay_one_word_in_a_script(text: str, tmp_path: Path) -> None:
    """The script's commands print their words instead of running."""
    job = replace(plan(f"log.sample_prompt={text}\n#SBATCH"), run_path=tmp_path / text, directory=tmp_path / f"{text}2")
    job = replace(job, recipe=f"{text}.yaml", gres=text)
    for made in (job_script(job), compile_script(job)):
        read = itertools.takewhile(lambda line: line[:1] in ("", "#"), made.splitlines())  # sbatch ends at a command
        options = [sbatch_words(line) for line in read if line.startswith("#SBATCH")]
        for wanted in (f"--job-name={text}", f"--comment=shardwise:{job.run_path}", f"--chdir={job.directory}"):
            assert [wanted] in options
        assert [f"--gres={text}"] in options
    probe = made.replace("exec ", "printf '%s\\0' ")
    said = subprocess.run(["bash"], input=probe, text=True, cwd=tmp_path, capture_output=True, check=True).stdout
    words = [sys.executable, "-P", "-m", "shardwise", "compile", f"{text}.yaml", *job.overrides, "--nproc", "16"]
    assert said.split("\0")[:-1] == words
    assert not list(tmp_path.iterdir()), "a part of a text ran as a command"


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"directory": Path("/a\ntouch b\n#")}, "the current directory"),
        ({"run_path": Path("/runs/a\r")}, "--run-dir"),
        ({"run_path": Path("/a\u2028b/c")}, "--run-dir"),
        ({"gres": "gpu:1\n#SBATCH --array=0-9"}, "launch.gres"),
    ],
)
@pytest.mark.parametrize("make", [job_script, compile_script])
def test_fault_20_a_line_break_is_refused(changed: dict[str, Any], name: str, make: Callable[[JobPlan], str]) -> None:
    with pytest.raises(ConfigError, match=rf"{name} \('.*'\) must be without line breaks and other control characters"):
        make(replace(plan(), **changed))


SUPERVISOR = """\
import os, signal, sys
from pathlib import Path
starts = Path("starts")
if not starts.exists():
    os.kill(os.getppid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
with starts.open("a") as file:
    file.write(" ".join(sys.argv[sys.argv.index("--ranks-per-node") + 2:]) + ";")
if starts.read_text().count(";") <= int(os.environ["KILLS"]):
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("kills", "code", "starts"),
    [(0, 75, ";"), (2, 75, ";--killed-by 9;--killed-by 9;"), (9, 137, ";--killed-by 9;--killed-by 9;")],
)
def test_fault_18_a_supervisor_hears_what_came_while_it_or_the_one_before_it_started(
    kills: int, code: int, starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed is started again; the script ends with the exit code of the last one."""
    (tmp_path / "supervisor.py").write_text(SUPERVISOR)
    monkeypatch.setattr(script, "_PROGRAM", (sys.executable, str(tmp_path / "supervisor.py")))
    text = job_script(plan("launch.max_restarts=2", "launch.environment={A: b}"))
    variables = {**os.environ, "KILLS": str(kills)}
    done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=variables, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "starts").read_text() == starts


def test_scripts_ask_for_whole_machines_or_processors() -> None:
    text = job_script(plan("launch.exclusive=false", nodes=(1, 1)))
    assert "#SBATCH --ntasks-per-node=1 --cpus-per-task=8\n" in text
    assert "--exclusive" not in text
    assert "#SBATCH --nodes=1\n" in text
    text = compile_script(plan("compile.enabled=true"))
    assert "#SBATCH --nodes=1\n" in text
    assert text.endswith("-P -m shardwise compile llama2-7b compile.enabled=true --nproc 16\n")
    assert "--requeue" not in text


def test_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for resources, devices in (
        ("gpu:8", 8),
        ("gpu:h100:8", 8),
        ("gpu", 1),
        ("gpu:h100:4(S:0-1),gpu:a100:2", 6),
        ("shard:8,gpu:2(IDX:0,1)", 2),
        ("neuron:16", 64),
        ("neuron:trn2:16(S:0-1)", 64),
        ("neuron:trn1:16", 32),
        ("(null)", 0),
        ("nic:2", 0),
    ):
        assert devices_of(resources) == devices
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (devices_of("neuron:trn2:16"), devices_of("neuron:trn1:16")) == (128, 32)


def test_words_and_jobs_of_slurm_are_read() -> None:
    said = "sbatch: error: invalid partition specified: none\nsbatch: error: Batch job submission failed: Invalid qos\n"
    assert _own_words(said) == "invalid partition specified: none; Batch job submission failed: Invalid qos"
    assert _own_words("") == "it gives no reason"
    fatal = "squeue: fatal: Could not establish a configuration source\n"
    said = f"squeue: error: fetch_config: DNS SRV lookup failed\n{fatal}"
    assert _own_words(said) == "Could not establish a configuration source"
    line = "7|PENDING|Resources|2||0:00|1-00:00:00|gpu|N/A|2026-11-23T16:00:00|shardwise:/runs/a|b, c"
    job = slurm_commands._job(line)
    assert (job.id, job.state, job.reason, job.nodes, job.starts) == ("7", "PENDING", "Resources", 2, "")
    assert job.run == "/runs/a|b, c"
    assert slurm_commands._job(line.replace("shardwise:", "my ")).run is None
    for limit, seconds in (
        ("01:30:00", 5400),
        ("90:00", 5400),
        ("2-00:00:00", 172_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
    ):
        assert slurm_commands.seconds(limit) == seconds


def answers(monkeypatch: pytest.MonkeyPatch, *said: str | None) -> list[Sequence[str]]:
    """Have SLURM's commands print these in turn, None: not answer; returns where the commands are put."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], **_options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        text = said[len(asked) - 1]
        if text is None:
            raise subprocess.TimeoutExpired(command, 60)
        return subprocess.CompletedProcess(command, 1 if "error" in text else 0, stdout=text, stderr=text)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_slurm_fails_or_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "_REQUEUE_PAUSE", 0)
    asked = answers(monkeypatch, None, "slurm_requeue error: Unable to contact slurm controller", "")
    assert slurm_commands.requeue("7") is None
    assert len(asked) == 3
    answers(monkeypatch, *["scontrol: error: Job is pending"] * 6)
    assert slurm_commands.requeue("7") == "Job is pending"
    answers(monkeypatch, *["slurm: error: Unable to contact slurm controller"] * 2)
    with pytest.raises(RunError, match=r"cannot reach SLURM \(squeue: Unable to contact slurm controller\)"):
        slurm_commands.jobs()
    with pytest.raises(RunError, match="SLURM cannot cancel the job 7: Unable to contact slurm controller"):
        slurm_commands.cancel("7")
    answers(monkeypatch, None, None)
    assert not slurm_commands.binds_nothing()
    assert slurm_commands._end_of_time_limit("7") is None


def test_an_allocation_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a time limit would be taken for a preemption, which is not counted."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    asked = answers(monkeypatch, "1-00:10:00\n", "UNLIMITED\n")
    ends = allocation(variables).ends
    assert ends == pytest.approx(time.time() + 87_000, abs=60)
    assert "--jobs=7" in asked[0]
    assert allocation(variables).ends is None
    monkeypatch.setattr(slurm_commands, "_end_of_time_limit", lambda _job: None)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[2-4]"}
    here = allocation({**variables, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1000"})
    assert (here.job, here.requeues, here.nodes, here.first, here.ends) == ("7", 2, 3, "n2", 1000.0)
    assert allocation(variables).requeues == 0
    with pytest.raises(ConfigError, match="SLURM_JOB_ID must be set"):
        allocation({})
