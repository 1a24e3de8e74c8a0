"""`--json`: one object on standard output and nothing else there, with the facts that the text tells."""

from pathlib import Path

import pytest

from shardwise.runs.folder import RunDirectory, RunLock
from shardwise_jobs import slurm_commands
from tests.command_line import CommandLine

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
