"""Messages of docs/troubleshooting that no other test provokes, and the jobs of the tutorials."""

import errno
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError, DataError, RunError, StoreError, see
from shardwise.checkpoint import save
from shardwise.checkpoint.format.manifest import FileEntry
from shardwise.checkpoint.storage.root import Root
from shardwise.cli import main
from shardwise.data import cache
from shardwise.launch.node import LauncherConnection
from shardwise.train.compile import run_graphs
from shardwise_jobs import slurm_commands
from tests.arch.source import ROOT
from tests.dist.training import make_config


def ends_with(entry: str) -> str:
    """A pattern for the end of a message."""
    return re.escape(see(entry)) + "$"


def test_messages_end_with_the_command_that_explains_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert see("runs#port-in-use") == " (`shardwise explain port-in-use`)"
    attempt = SimpleNamespace(address="127.0.0.1", control=1, silence=1.0, secret="")
    control = LauncherConnection(SimpleNamespace(attempt=attempt, name="n1", number=1), dict)  # type: ignore[arg-type]
    with (
        pytest.raises(RunError, match=r"node n1 must reach the job's first node at 127.0.0.1:1: .* refused") as caught,
        control,
    ):
        pass
    assert str(caught.value).endswith(see("runs#first-node-not-reached"))
    text = "returns other bytes than were written: set SHARDWISE_CACHE elsewhere"
    with pytest.raises(DataError, match=f"{text}{ends_with('data#cache-returns-other-bytes')}"):
        cache.open_or_build(tmp_path, "tokens", "key", lambda entry: False, lambda folder: {})
    monkeypatch.setattr(save, "_SEEN_WITHIN_SECONDS", 0)
    entry = FileEntry("weights.safetensors", 8, 1024, b"x" * 8)
    text = "lacks weights.safetensors here, which another rank wrote: all ranks must write to one place"
    with pytest.raises(StoreError, match=f"{text}.*{ends_with('checkpoints#disk-not-shared')}"):
        save._require_visible(Root.of(tmp_path), [entry])
    monkeypatch.setenv("PATH", "")
    text = r"sbatch and squeue and scontrol must be on the PATH: shardwise submits to SLURM"
    with pytest.raises(ConfigError, match=f"{text}.*{ends_with('jobs#slurm-not-found')}"):
        slurm_commands.require()


def test_temporary_files_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def raise_problems(problems: list[str], _: object) -> None:
        if problems:
            raise ConfigError(problems)

    monkeypatch.setattr(run_graphs.RunGraphs, "_unpack", full)
    monkeypatch.setattr(run_graphs, "planned_graphs", lambda *_: ())
    monkeypatch.setattr(run_graphs.collectives, "raise_on_all_ranks", raise_problems)
    alone: Any = SimpleNamespace(world=SimpleNamespace(rank=0))
    arguments: Any = (make_config(), None, alone, None, print)
    text = r"the folder for temporary files \(.*\) cannot be written: No space left on device; set TMPDIR to a folder"
    with pytest.raises(ConfigError, match=f"{text} with room{ends_with('training#folder-for-temporary-files')}"):
        run_graphs.RunGraphs(*arguments)


# Nodes, ranks of a node, TP, PP and DP of the originals' scripts, and the same on trn2. BERT and GPT2-XL fill a node.
LAYOUTS = {
    "bert-large": [(1, 32, 8, 1, 4), (1, 64, 8, 1, 8)],
    "gpt-neox-20b": [(4, 32, 32, 1, 4), (2, 64, 32, 1, 4)],
    "gpt3-3d": [(4, 32, 8, 4, 4), (2, 64, 8, 4, 4), (8, 32, 32, 8, 1), (4, 64, 32, 8, 1)],
    "llama2-7b": [(4, 32, 8, 1, 16), (2, 64, 8, 1, 16)],
    "zero1-gpt2-xl": [(1, 32, 1, 1, 32), (1, 64, 1, 1, 64)],
}
RECIPES = {
    "bert-large": {"bert-large"},
    "gpt-neox-20b": {"gpt-neox-20b"},
    "gpt3-3d": {"gpt3-23b", "gpt3-175b"},
    "llama2-7b": {"llama2-7b"},
    "zero1-gpt2-xl": {"gpt2-xl"},
}
"""The recipes of a tutorial whose jobs the table of all five lists."""
JOB = re.compile(r"^\| (\d+) × (\d+) \| ([^|]+) \| ([\d.]+ [\w ]+) \| `shardwise (submit [^`]+)` \|$", re.MULTILINE)
DEVICES = {"32": "trn1:32", "64": "trn2:64"}


def degrees(text: str) -> tuple[int, ...]:
    """TP, PP and DP that a text names; 1 for those that it does not."""
    found = {axis: int(degree) for axis, degree in re.findall(r"\b(TP|PP|DP) (\d+)", text)}
    return tuple(found.get(axis, 1) for axis in ("TP", "PP", "DP"))


@pytest.mark.parametrize("page", LAYOUTS)
def test_a_job_has_the_layout_of_the_original(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    table = JOB.findall((ROOT / "docs/tutorials/all-five.md").read_text(encoding="utf-8"))
    jobs = [job for job in table if job[-1].startswith(tuple(f"submit {recipe} " for recipe in RECIPES[page]))]
    assert set().union(*RECIPES.values()) == {command.split()[1] for *_, command in table}
    assert [(int(nodes), int(ranks), *degrees(layout)) for nodes, ranks, layout, *_ in jobs] == LAYOUTS[page]
    for nodes, ranks, layout, seconds, command in jobs:
        assert main([*command.split(), "data.path=text.txt", "--device", DEVICES[ranks], "--dry-run"]) == 0
        told = capsys.readouterr().out
        assert ("TorchNeuron's copy" in told) == ("refused so far" in layout) == (degrees(layout)[1] > 1), command
        shown = told.partition("\n\n")[0].splitlines()
        rows = dict(line.split(maxsplit=1) for line in shown if not line.startswith(" "))
        assert rows["step"].partition(" predicted")[0] == seconds, command
        assert re.fullmatch(rf"{nodes} nodes? × {ranks} ranks", rows["nodes"]), command
        assert degrees(rows["layout"]) == degrees(layout), command
