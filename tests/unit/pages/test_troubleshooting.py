"""Messages of docs/troubleshooting that no other test provokes; each ends with the command that explains it."""

import errno
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError, DataError, RunError, see
from shardwise.checkpoint import save
from shardwise.checkpoint.format.manifest import FileEntry
from shardwise.checkpoint.storage.root import Root, StoreError
from shardwise.data import cache
from shardwise.launch.node import LauncherConnection
from shardwise.train.compile import run_graphs
from shardwise_jobs import slurm_commands
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
    monkeypatch.setattr(run_graphs, "raise_on_all_ranks", raise_problems)
    alone: Any = SimpleNamespace(world=SimpleNamespace(rank=0))
    arguments: Any = (make_config(), None, alone, None, print)
    text = r"the folder for temporary files \(.*\) cannot be written: No space left on device; set TMPDIR to a folder"
    with pytest.raises(ConfigError, match=f"{text} with room{ends_with('training#folder-for-temporary-files')}"):
        run_graphs.RunGraphs(*arguments)
