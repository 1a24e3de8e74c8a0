import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardwise.cluster import script
from shardwise.cluster.script import JobPlan, compile_script, job_script, job_set
from shardwise.config import load_config


def plan(*overrides: str, nodes: tuple[int, int] = (2, 4)) -> JobPlan:
    config = load_config("llama2-7b", overrides)
    return JobPlan(config, "llama2-7b", overrides, Path("/runs/a b"), Path("/home/me"), nodes, 8, config.launch.gres)


def test_the_script_has_what_slurm_and_the_reader_want_to_know() -> None:
    keys = ("launch.partition=gpu", "launch.gres=gpu:h100:8", "launch.time=90", "launch.sbatch=[--qos=high]")
    text = job_script(plan(*keys, "launch.environment={NCCL_DEBUG: WARN, GREETING: it's}"))
    lines = text.splitlines()
    for line in (
        "#!/usr/bin/env bash",
        '#SBATCH --job-name="a b"',
        '#SBATCH --comment="shardwise:/runs/a b"',
        '#SBATCH --output="/runs/a b/logs/job-%j.log"',
        "#SBATCH --chdir=/home/me",
        "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:h100:8",
        "#SBATCH --time=01:30:00",
        "#SBATCH --exclusive --mem=0",
        "#SBATCH --nodes=2-4",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --qos=high",
        "export NCCL_DEBUG=WARN",
        """export GREETING='it'"'"'s'""",
    ):
        assert line in lines, line
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < min(n for n, line in enumerate(lines) if line and line[0] != "#"), (
        "sbatch reads no later ones"
    )
    (command,) = (line for line in lines if "-m shardwise supervise " in line)
    assert "-P -m shardwise supervise llama2-7b launch.partition=gpu" in command
    assert command.endswith("--run-dir '/runs/a b' --ranks-per-node 8 \"$@\" &")


SUPERVISOR = """\
import os, signal, sys
from pathlib import Path
starts = Path("starts")
with starts.open("a") as file:
    file.write(" ".join(sys.argv[sys.argv.index("--ranks-per-node") + 2:]) + ";")
if starts.read_text().count(";") <= int(os.environ["KILLS"]):
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGUSR1)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("kills", "code", "starts"),
    [(0, 75, ";"), (2, 75, ";--killed-by 9;--killed-by 9;"), (9, 137, ";--killed-by 9;--killed-by 9;")],
)
def test_a_supervisor_that_is_killed_is_started_again(
    kills: int, code: int, starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script passes on the signals that it gets, and ends with the exit code of the last one."""
    (tmp_path / "supervisor.py").write_text(SUPERVISOR)
    monkeypatch.setattr(script, "_PROGRAM", (sys.executable, str(tmp_path / "supervisor.py")))
    text = job_script(plan("launch.max_restarts=2", "launch.environment={A: b}"))
    variables = {**os.environ, "KILLS": str(kills)}
    done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=variables, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "starts").read_text() == starts


def test_a_job_without_whole_machines_asks_for_a_processor_a_rank() -> None:
    text = job_script(plan("launch.exclusive=false", nodes=(1, 1)))
    assert "#SBATCH --ntasks-per-node=1 --cpus-per-task=8\n" in text
    assert "--exclusive" not in text
    assert "#SBATCH --nodes=1\n" in text


def test_the_graphs_are_compiled_for_the_fewest_ranks_on_one_machine() -> None:
    text = compile_script(plan("compile.enabled=true"))
    assert "#SBATCH --nodes=1\n" in text
    assert text.endswith("-P -m shardwise compile llama2-7b compile.enabled=true --nproc 16\n")
    assert "--requeue" not in text


def test_a_job_set_has_a_pod_for_each_machine() -> None:
    manifest = yaml.safe_load(job_set(plan("launch.gres=gpu:8", nodes=(4, 4)), "my/image:1"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"]["name"] == "a-b"
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (4, 4, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["image"] == "my/image:1"
    assert container["command"][:3] == ["torchrun", "--nnodes=4", "--nproc-per-node=8"]
    assert "--rdzv-endpoint=a-b-ranks-0-0.a-b:29500" in container["command"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
