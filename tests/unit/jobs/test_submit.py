"""`shardwise submit` before and after SLURM's answer, which is played."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, RunError
from shardwise.cli import main
from shardwise.config import recipe_text
from shardwise.runs.folder import RunDirectory
from shardwise_jobs import slurm_commands
from shardwise_jobs.cli import jobs, submit
from tests.command_line import CommandLine

TWO = ("submit", "llama2-tiny", "data.dataset=tiny", "--nodes", "2", "launch.ranks_per_node=1", "train.global_batch=8")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda *_: None)
    monkeypatch.setattr(slurm_commands, "require", lambda: None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)


def with_path(path: str) -> list[str]:
    return [f"data.path={path}" if word == "data.dataset=tiny" else word for word in TWO]


def dry(cli: CommandLine, *words: object) -> str:
    return cli(*TWO, *words, "--dry-run").out


def made() -> list[str]:
    return [path.name for path in Path("runs").iterdir()] if Path("runs").exists() else []


def test_no_folder_is_left_without_a_job(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr("builtins.input", lambda _question: "n")
    assert main(TWO) == 0
    assert made() == []
    wrong = with_path("nowhere")
    assert "nowhere" in cli.refused(*wrong, "-y")
    assert made() == []
    out = cli(*wrong, "--dry-run").out
    assert re.search(r"^warning +data\.path \(nowhere\) does not exist", out, re.M)
    assert "#SBATCH --nodes=2" in out
    assert re.search(r"^memory +.* on CPUs; --device h100:8 sizes it for GPUs$", out, re.M)


def test_pipelines_on_chips_of_aws_and_resumes_are_told(cli: CommandLine) -> None:
    """Their library of April 2026 has no messages from rank to rank."""

    def warned(*options: str, stages: int = 2) -> int:
        command = ["submit", "llama2-tiny", "data.dataset=tiny", "--nodes", "1", f"parallel.pipeline={stages}"]
        out = cli(*command, "train.global_batch=64", *options, "--dry-run").out
        return len(re.findall(r"^warning +parallel\.pipeline \(2\) is refused by T", out, re.M))

    assert warned("--gres", "neuron:trn2:4") == warned("--device", "trn1:16") == 1
    assert warned("--gres", "neuron:4", "--device", "trn2:16") == 1
    assert warned("--gres", "neuron:4", stages=1) == warned("--gres", "gpu:h100:8", "--device", "h100:8") == 0

    def told(*keys: str) -> str:
        return next((line for line in dry(cli, *keys).splitlines() if line.startswith("resumes ")), "")

    assert "on the disk; set checkpoint.memory_every=100 to resume from a copy" in told()
    assert "from a copy in the nodes' memory, made every 20 steps (" in told("checkpoint.every=20")
    assert "more than 50% of a node" in told("checkpoint.memory_every=1", "checkpoint.memory_share=0.5")


def test_a_dry_run_warns_of_the_disk_of_this_machine(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """The job may run elsewhere: its script is printed. To submit it from here is refused."""
    monkeypatch.setattr("shardwise.base.files.free_bytes", lambda _path: 1000)
    out = dry(cli)
    assert re.search(r"^warning +on this machine: the free disk space under \S+ \(1000 B\) must be at least", out, re.M)
    assert "#SBATCH --nodes=2" in out
    assert "must be at least what one checkpoint takes" in cli.refused(*TWO, "-y")


def test_a_dry_run_shows_the_script_that_would_be_written_and_says_that_it_writes_nothing(cli: CommandLine) -> None:
    out = dry(cli)
    assert re.search(r"^files +recipe.yaml, job.sh and logs/ in .* llama2-tiny-…; a dry run writes none, ", out, re.M)
    assert re.search(r"supervise \S+/runs/llama2-tiny/recipe\.yaml data\.dataset=tiny", out)
    assert made() == []
    shown = dry(cli, "--run-dir", "one")
    assert not Path("one").exists()
    out = cli(*TWO, "--write-only", "--run-dir", "one").out
    assert out.endswith(f"nothing was submitted; submit it by: sbatch {Path('one/job.sh').absolute()}\n")
    assert Path("one/job.sh").read_text(encoding="utf-8").rstrip("\n") in shown
    assert Path("one/recipe.yaml").read_text(encoding="utf-8") == recipe_text("llama2-tiny")
    assert Path("one/logs").is_dir()


def test_files_alone_are_written_without_slurm(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr(slurm_commands, "require", lambda: pytest.fail("SLURM was asked for"))
    cli(*TWO, "--write-only")
    (name,) = made()
    assert re.fullmatch(r"llama2-tiny-\d{8}-\d{6}", name)
    assert f"/runs/{name}/logs/job-%j.log" in Path("runs", name, "job.sh").read_text(encoding="utf-8")
    said = cli(*TWO, "data.path=/cluster/corpus.jsonl", "--write-only", "--run-dir", "two").out
    assert "warning" in said, "the cluster may have the data"
    assert "data.path=/cluster/corpus.jsonl" in Path("two/job.sh").read_text(encoding="utf-8")
    said = cli.refused("submit", "acme/tiny", "--nodes", "2", "--write-only")
    assert "it is a model: `shardwise recipes acme/tiny --write my.yaml` writes " in said
    said = cli.refused(*TWO, "--write-only", "--precompile", "--dry-run")
    assert "--write-only must go without --dry-run and --precompile" in said


def test_all_problems_and_what_does_not_fit_are_told(cli: CommandLine) -> None:
    missing = ["data.path=nowhere", "data.tokenizer=none.json", "--time", "04:00", "--dry-run"]
    other = ("launch.warning_seconds (300) must be less than launch.time (04:00, 240 s)", "data.path (nowhere)")
    for words, named in (
        ("llama2-tiny --nodes 2 parallel.tensor=3 launch.ranks_per_node=3", "parallel.tensor (3) must "),
        ("llama2-7b --nodes 1 --gres gpu:t4:8 parallel.tensor=1", "the memory expected on each rank ("),
        ("llama2-tiny", "--nodes must be given"),
    ):
        out, err = cli("submit", *words.split(), *missing, code=2)
        assert out == ""
        assert [text for text in (named, *other, "data.tokenizer (none") if f"\n- {text}" not in err] == []
    large = ["submit", "llama2-7b", "data.dataset=python", "parallel.pipeline=1", "--nodes", "4", "--dry-run"]
    too_large = r"^warning +memory does not fit: \d+ GiB are needed beside a reserve of 6% of the device's 74\.5 GiB"
    fewer = r"^warning +launch\.gres \(gpu:4\) reserves fewer devices on a node than --device \(h100:8\) names"
    for options, is_large, are_fewer in (
        (["--device", "h100:8", "parallel.tensor=1", "train.micro_batch=8"], True, False),
        (["--device", "h100:8", "--gres", "gpu:4", "parallel.tensor=4"], False, True),
        (["--device", "h100", "--gres", "gpu:4", "parallel.tensor=4"], False, False),
    ):
        out = cli(*large, *options).out
        assert (bool(re.search(too_large, out, re.M)), bool(re.search(fewer, out, re.M))) == (is_large, are_fewer)


@pytest.mark.parametrize("fails", [False, True])
def test_without_an_answer_of_sinfo_a_job_asks_for_the_devices_that_the_user_names(
    fails: bool, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails:
        (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "sinfo").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for options, gres in (
        ("--device h100:8", "gpu:8"),
        ("--device h100:8 launch.ranks_per_node=4", "gpu:8"),
        ("--device h100 launch.ranks_per_node=4", "gpu:4"),
        ("--device trn2:64 launch.ranks_per_node=64", "neuron:16"),
        ("--device h100:8 --gres gpu:h100:4", "gpu:h100:4"),
        ("--device cpu:4", None),
        ("launch.ranks_per_node=8", None),
    ):
        few = "submit llama2-tiny data.dataset=tiny --nodes 2 train.global_batch=128 train.micro_batch=1"
        out = cli(*few.split(), *options.split(), "--dry-run").out
        assert re.findall(r"^#SBATCH --gres=(\S+)$", out, re.M) == ([gres] if gres else [])
        notes = re.findall(r"^note +no sinfo answers here.*: the job asks for (.*)$", out, re.M)
        told = "no accelerators; --gres gpu:8 or --device h100:8 names those of a node"
        if gres:
            told = f"{gres} on each node, by --device; --gres names other ones"
        assert notes == ([] if "--gres" in options else [told])


def test_a_warmup_of_much_of_the_run_is_warned_of(cli: CommandLine) -> None:
    """The warmup of a recipe is that of its own steps."""
    long = ["llama3.1-8b", "train.steps=300B"]
    told = "optimizer.warmup_steps (8,000) is 45% of train.steps (17,881): optimizer.warmup_steps=357 is 2%"
    out = cli("submit", *long, "--nodes", "4", "--device", "h100:8", "--dry-run").out
    assert re.search(rf"^warning +{re.escape(told)}$", out, re.M)
    train = ["train", *long, "--nproc", "8", "--dry-run"]
    assert re.search(rf"^# warning +{re.escape(told)}$", cli(*train).out, re.M)
    for key in ("optimizer.warmup_steps=1788", "train.steps=894070"):
        out = cli(*train, key).out
        assert "warmup" not in re.sub(r"(?m)^ *warmup_steps: .*", "", out)


@pytest.mark.parametrize(
    ("where", "folder"), [("login", None), ("login:~/my project", "my project"), ("login:/data", "/data")]
)
def test_another_machine_is_asked(
    where: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 5)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["submit", "llama2-tiny", "--ssh", where, "launch.environment={A: it's}"]
    monkeypatch.setattr("sys.argv", ["shardwise", *arguments])
    assert main(arguments) == 5
    ((*ssh, command),) = ran
    assert ssh == ["ssh", "-t", "--", "login"]
    changed = ["cd", "--", folder or str(tmp_path), "&&"]
    assert shlex.split(command) == [*changed, "shardwise", *arguments[:2], arguments[-1]]


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "user@-oProxyCommand=x", "a\nb"])
def test_fault_20_options_of_ssh_are_no_hosts(host: str, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ssh was started"))
    arguments = ["submit", "llama2-tiny", f"--ssh={host}"]
    monkeypatch.setattr("sys.argv", ["shardwise", *arguments])
    assert re.match(r"shardwise: --ssh \('.*'\) must be (one word|without line breaks)", cli.refused(*arguments))


def test_a_rehearsal_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run").create().path
    monkeypatch.setattr(submit, "_POLL_SECONDS", 0.0)
    waiting = slurm_commands._job("7|PENDING||1||0:00|1:00|gpu||T|shardwise:/x")
    for seconds, present, told in (
        (0.0, [waiting], "did not take a first step within 0 s"),
        (60.0, [], "ended before"),
    ):
        monkeypatch.setattr(submit, "_TRAIN_SECONDS", seconds)
        monkeypatch.setattr(slurm_commands, "jobs", lambda present=present, **_: present)
        with pytest.raises(RunError, match=f"job 7 {told}"):
            submit.rehearse("7", run)


def test_a_rehearsal_that_resumes_too_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, cancelled = RunDirectory(tmp_path / "run").create(), list[str]()
    monkeypatch.setattr(submit, "last_recorded_step", lambda _: 12)
    monkeypatch.setattr(submit, "newest_checkpoint", lambda _: 10)
    monkeypatch.setattr(slurm_commands, "warn", lambda _: None)
    monkeypatch.setattr(slurm_commands, "restarts", lambda _: 1)
    monkeypatch.setattr(slurm_commands, "cancel", cancelled.append)
    directory.metrics.write_text('{"event": "resume", "step": 5}\n')
    with pytest.raises(RunError, match="job 7 resumed after step 5, and had saved step 10"):
        submit.rehearse("7", directory.path)
    assert cancelled == ["7"]


def test_a_training_that_slurm_refuses_leaves_no_job_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []

    def answer(script: str, options: tuple[str, ...] = ()) -> str:
        if options:
            raise ConfigError("SLURM refuses the job: Invalid qos")
        return "7"

    monkeypatch.setattr(slurm_commands, "submit", answer)
    monkeypatch.setattr(slurm_commands, "cancel", cancelled.append)
    assert main([*TWO, "-y", "--precompile", "compile.enabled=true"]) == 2
    assert cancelled == ["7"]
    assert made() == []


def test_fault_05_a_dry_run_shows_the_script_that_compiles_and_then_the_one_that_trains(cli: CommandLine) -> None:
    command = with_path("https://me:word@example.org/a.txt")

    def scripts(*more: str) -> list[str]:
        out = cli(*command, "compile.enabled=true", "--run-dir", "one", "--dry-run", *more).out
        return out.split("#!/usr/bin/env bash\n")[1:]

    (train,) = scripts()
    compiling, training = scripts("--precompile")
    assert training == train
    assert compiling.startswith("# Compiles the graphs of one for 2 ranks")
    assert "which SLURM starts when this one has succeeded" in compiling
    assert re.search(r"^exec .* -m shardwise compile \S+/one/recipe.yaml .*--nproc 2$", compiling, re.MULTILINE)
    assert "#SBATCH --nodes=1\n" in compiling
    assert "word" not in compiling + training


def test_a_job_is_followed_though_slurm_does_not_answer_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [RunError("squeue did not answer within 60 s"), None]

    def queued(**_options: object) -> list[slurm_commands.SlurmJob]:
        problem = said.pop(0)
        if problem is not None:
            raise problem
        return []

    monkeypatch.setattr(slurm_commands, "jobs", queued)
    monkeypatch.setattr(jobs, "_ASK_SLURM_SECONDS", 0)
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0)
    jobs.follow(tmp_path / "job.log", "7", tmp_path)
    shown = capsys.readouterr()
    assert "squeue did not answer" in shown.err
    assert shown.out.endswith("job 7 has ended\n")
