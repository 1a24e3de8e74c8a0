"""`shardwise recipes`, `shardwise explain`, `shardwise --completion`, and `--json`: one object, nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config import load_config, recipe_names, recipe_text
from shardwise.runs.folder import RunDirectory, RunLock
from shardwise_jobs import slurm_commands
from tests.command_line import CommandLine


def test_recipes_are_listed_and_copied_once(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = cli("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 5 for line in lines)
    monkeypatch.chdir(tmp_path)
    said = cli("recipes", "quickstart", "--write", "mine.yaml").out
    assert said == "wrote mine.yaml; train it with: shardwise train mine.yaml\n"
    assert Path("mine.yaml").read_text() == recipe_text("quickstart")
    assert load_config("mine.yaml") == load_config("quickstart")
    Path("mine.yaml").write_text("edited")
    assert "exists already" in cli.refused("recipes", "--write", "mine.yaml", "quickstart")
    assert Path("mine.yaml").read_text() == "edited"


def test_an_entry_is_found_by_its_name_or_message(cli: CommandLine) -> None:
    said = cli("explain", "killed-rank").out
    message = "rank … was killed (SIGKILL; usually out of memory)"
    assert said.startswith(f"Message: {message}\n\nCause: The process was killed from outside")
    assert "\n\nFix: Look at the system's log (`dmesg`)" in said
    assert cli("explain", "training#killed-rank").out == said
    for name, hint in (("kiled-rank", "did you mean killed-rank?"), ("zzz", "`shardwise explain` lists all names")):
        assert cli.refused("explain", name) == f"shardwise: no entry explains {name!r}: {hint}\n"
    message = "shardwise: the number of ranks (3) must be a multiple of parallel.tensor (2): nearest 2 or 4"
    assert cli("explain", message).out.startswith("Message: the number of ranks (…) must be a multiple of\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_commands_options_recipes_and_keys(shell: str, cli: CommandLine) -> None:
    pytest.importorskip("shtab")
    script = cli("--completion", shell).out
    for word in ("checkpoint", "diff", "run-dir", "llama2-tiny", "train.global_batch="):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_another_shell_or_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    for arguments in (["--completion"], ["--completion=csh"]):
        assert "must be bash, zsh or fish" in cli.refused(*arguments)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'shardwise[completion]'" in cli.refused("--completion", "bash")


SUBMIT = ("submit", "llama2-tiny", "data.dataset=tiny", "--nodes", "2", "launch.ranks_per_node=1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(slurm_commands, "require", lambda: None)
    monkeypatch.setattr("shutil.which", lambda *_: None)


def test_each_command_prints_one_object(cli: CommandLine) -> None:
    """`test_long_work.py` asks those that read and write checkpoints and data."""
    run = RunDirectory("run").create().path
    with RunLock(run):
        facts = cli.facts("stop", run)
    unknown = {"other_host": None, "checkpoint_step": None}
    assert facts == {"run": "run", "cancelled": [], "asked": True, "ended": False, **unknown}
    listed = cli.facts("recipes")["recipes"]
    assert {"name": "llama2-tiny", "summary": cli.facts("recipes", "llama2-tiny")["summary"]} in listed
    written = cli.facts("recipes", "llama2-tiny", "--write", "my.yaml")
    assert (written["path"], written["recipe"]["model"]["family"]) == ("my.yaml", "llama")
    entry = cli.facts("explain", "killed-rank")
    assert set(entry) == {"name", "page", "message", "cause", "fix"}
    assert entry in cli.facts("explain")["entries"]
    command = ("train", "llama2-7b", "--dry-run", "--device", "h100:8", "parallel.pipeline=1", "parallel.tensor=4")
    facts = cli.facts(*command)
    text = cli(*command).out
    assert facts["layout"]["tensor"] * facts["layout"]["data"] == facts["layout"]["world"] == 8
    assert f"({facts['parameters']:,})" in text
    assert f"# tokens         {facts['tokens_per_step']:,} per step, {facts['tokens']:,} in all" in text
    assert facts["memory_bytes"] == sum(facts["parts_memory_bytes"].values()) == facts["prediction"]["memory_bytes"]
    assert facts["global_batch"] == facts["micro_batch"] * facts["accumulation"] * facts["layout"]["data"]
    assert facts["keys"]["parallel"]["tensor"] == 4
    assert "--json must go with --dry-run" in cli.refused("train", "llama2-tiny", "--json")
    wrong = cli("train", "llama2-tiny", "--dry-run", "train.micro_batch=3", "--json", code=2)
    assert wrong.out == "", "an error is a text on standard error"


def test_a_submitted_job_is_told(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = cli.facts(*SUBMIT, "--dry-run", "--device", "h100:1", "--time", "01:00:00")
    assert (facts["nodes"], facts["ranks_per_node"], facts["time_limit_seconds"]) == ([2, 2], 1, 3600)
    assert facts["prediction"]["devices"] == 2
    assert "#SBATCH --nodes=2" in facts["scripts"][0]
    assert (facts["written"], facts["job"]) == (None, None)
    written = cli.facts(*SUBMIT, "--write-only", "--run-dir", "one")["written"]
    assert Path(written) == Path("one/job.sh").absolute()
    monkeypatch.setattr(slurm_commands, "submit", lambda *_: "7")
    submitted = cli.facts(*SUBMIT, "-y", "--run-dir", "two")
    assert (submitted["job"], submitted["log"]) == ("7", str(Path("two/logs/job-7.log").absolute()))
    assert "--json must go with -y" in cli.refused(*SUBMIT, "--json")
