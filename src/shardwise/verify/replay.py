"""The replay of a stretch of a run, in a folder of its own, and its differences from the run's record.

The replay is a run like any other: the run's configuration continues the checkpoint at which the stretch begins, at any
layout. The checkpoint's files are links, so that nothing is copied, and nothing of the run is changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import ConfigError, RunError, StoreError, listing
from shardwise.base.files import read_plain
from shardwise.base.yaml_and_json import dump_yaml
from shardwise.checkpoint.storage.checkpoint_folders import step_name, summarize_checkpoints
from shardwise.checkpoint.storage.root import Root
from shardwise.config import CheckpointConfig, Config, apply_overrides, config_from_sections, fixed_changes
from shardwise.launch.environment import REPLAY
from shardwise.runs.folder import RunDirectory, read_config
from shardwise.runs.state_records import RecordedHash, StateRecords, differing_tensors


@dataclass(frozen=True)
class ReplayedStretch:
    """The steps of a run that are replayed: those after `first`, up to `last`; a checkpoint holds step `first`."""

    first: int
    last: int


def choose_stretch(
    run: RunDirectory, checkpoint: CheckpointConfig, first: int | None, last: int | None
) -> ReplayedStretch:
    """The stretch between two steps; by default from the newest checkpoint with later records to the last record.

    ConfigError: the run has no checkpoint of `first`, or no record of a step between the two.
    """
    records = StateRecords.of(run)
    losses = records.losses
    if not losses:
        raise ConfigError(f"{run.path} must have steps in {run.metrics.name}, with which a replay is compared")
    newest = max(losses)
    begin = records.begin or 0
    saved = [step for step in _saved_steps(_root(run, checkpoint)) if step >= begin]
    # The steps before a branch are those of its parent, which had other keys.
    begins = saved if begin else [0, *saved]
    if first is None:
        first = max((step for step in begins if step < newest), default=0)
    if first not in begins:
        kinds = (
            f"the step of a checkpoint, from {begin} on, where this branch begins"
            if begin
            else "0 or the step of a checkpoint"
        )
        raise ConfigError(f"--from ({first}) must be {kinds}: {run.path} has {listing(saved) or 'none'}")
    last = newest if last is None else last
    if not first < last <= newest:
        raise ConfigError(f"--to ({last}) must be a step after {first}, and at most the last recorded one ({newest})")
    if not any(first < step <= last for step in losses):
        raise ConfigError(
            f"the steps {first + 1:,} to {last:,} must have a record in {run.metrics}: it has {listing(losses, most=9)}"
        )
    return ReplayedStretch(first, last)


def _root(run: RunDirectory, checkpoint: CheckpointConfig) -> Root:
    return Root.of(checkpoint.path or run.checkpoints)


def _saved_steps(root: Root) -> list[int]:
    try:
        return sorted(saved.step for saved in summarize_checkpoints(root) if saved.folder.name == step_name(saved.step))
    except StoreError as error:
        raise ConfigError(str(error)) from None


def read_replay_config(run: RunDirectory, overrides: Sequence[str]) -> tuple[Config, Config]:
    """The configuration of a run, and that of its replay with `overrides`; ConfigError for a wrong one of both."""
    config = config_from_sections(read_config(run))
    values = config.recorded()
    problems = apply_overrides(values, overrides)
    changed = config_from_sections(values, problems)
    changes = fixed_changes(config.recorded(), changed.recorded())
    if changes:
        raise ConfigError([f"{change}, as in the run that is replayed: leave it out" for change in changes])
    return config, changed


def replay_stretch(
    run: RunDirectory, config: Config, stretch: ReplayedStretch, ranks: int | None, folder: Path
) -> StateRecords:
    """Train the steps of a stretch, with `config`, in `folder`; returns what was recorded.

    ConfigError, RunError: the replay was refused or failed; the text says why.
    """
    target = RunDirectory(folder / "replay")
    target.path.mkdir()
    if stretch.first:
        name = step_name(stretch.first)
        _link(_root(run, config.checkpoint) / name, target.checkpoints / name)
    values = config.recorded()
    values["train"] |= {"stop_after": stretch.last - stretch.first, "eval_every": 0}
    values["checkpoint"] |= {"path": None, "every": 0, "every_minutes": None, "keep": None, "memory_every": 0}
    # The run may have gone back to this very step, and left out batches after it.
    if config.checkpoint.resume != stretch.first:
        values["train"]["skip_batches"] = 0
        values["checkpoint"]["resume"] = "auto"
    values["log"] |= {
        "every": 1, "state_hash_every": 1, "tensorboard": False, "trackers": [], "notify": [], "sample_tokens": 0,
        "profile": None,
    }  # fmt: skip
    values["hooks"] |= {"callbacks": []}
    target.write_config(dump_yaml(config_from_sections(values).recorded()))
    if run.identity.exists():
        target.identity.write_bytes(read_plain(run.identity))
    command = [sys.executable, "-P", "-m", "shardwise", "train", str(target.config), f"--run-dir={target.path}"]
    if ranks is not None:
        command += ["--nproc", str(ranks)]
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, REPLAY: "1"},
        check=False,
    )
    if ended.returncode:
        text = ended.stderr.strip().removeprefix("shardwise: ")
        error = ConfigError if ended.returncode == ConfigError.exit_code else RunError
        raise error(f"the replay of {run.path} ended: {text or f'exit code {ended.returncode}'}")
    return StateRecords.of(target)


def _link(source: Root, target: Path) -> None:
    """Make a folder of links to the files of a checkpoint, or of copies if they are remote."""
    for path in source.files():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if source.is_local:
            file.symlink_to((source / path).local().absolute())
        else:
            file.write_bytes((source / path).read())


@dataclass(frozen=True)
class ReplayComparison:
    """A comparison of a replay with its run; `step`: first one at which they differ, None where they are equal."""

    steps: tuple[int, ...]
    hashes: tuple[int, ...]
    step: int | None
    differences: tuple[str, ...]


def compare_replay(recorded: StateRecords, replayed: StateRecords, stretch: ReplayedStretch) -> ReplayComparison:
    """Compare the records of a stretch with those of its replay, to the bit."""
    steps = [step for step in recorded.losses if stretch.first < step <= stretch.last]
    hashes = [step for step in recorded.hashes if stretch.first < step <= stretch.last]
    for step in sorted({*steps, *hashes}):
        texts = list(_differences(recorded, replayed, step))
        if texts:
            return ReplayComparison(tuple(steps), tuple(hashes), step, tuple(texts))
    return ReplayComparison(tuple(steps), tuple(hashes), None, ())


def _differences(recorded: StateRecords, replayed: StateRecords, step: int) -> list[str]:
    texts = []
    for name, run_numbers, replay_numbers in (
        ("loss", recorded.losses, replayed.losses),
        ("gradient norm", recorded.norms, replayed.norms),
    ):
        if step in run_numbers and run_numbers[step] != replay_numbers.get(step):
            texts.append(f"{name} {run_numbers[step]!r} in the run, {replay_numbers.get(step)!r} in the replay")
    if step in recorded.hashes:
        replayed_hash = replayed.hashes.get(step)
        difference: str | None = "no hash in the replay"
        if replayed_hash is not None:
            difference = hash_difference(recorded.hashes[step], replayed_hash)
        if difference is not None:
            texts.append(f"state after it: {difference}")
    return texts


def hash_difference(a: RecordedHash, b: RecordedHash) -> str | None:
    """Name the part of the state in which a replay differs from its run; None where the recorded hashes are equal."""
    if a.text == b.text:
        return None
    tensors = differing_tensors(a, b)
    if not tensors:
        return "the place in the data or the seed"
    return f"{len(tensors):,} of {len(a.tensors):,} tensors ({listing(tensors, most=5)})"
