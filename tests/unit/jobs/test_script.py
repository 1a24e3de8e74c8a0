import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import load_config
from shardwise_jobs import script
from shardwise_jobs.script import JobPlan, compile_script, job_script


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
