"""The choice of the checkpoints that a run tries to continue from. Imports no torch, which a dry run does without."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.base.errors import ConfigError, listing, see
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.storage.checkpoint_folders import StepFolder, glance
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config

_WENT_BACK = "went_back"
"""The key of a manifest's `schedule` with the request by which the run last went back."""


def choose(saved: Sequence[StepFolder], config: Config, root: Root, *, is_resumed: bool) -> list[StepFolder]:
    """Choose the checkpoints to try, in this order; none where the training begins.

    If the newest intact one was saved after the run went back as `checkpoint.resume` asks, the run continues from it:
    the same command, given again after a stop, must not undo its own steps.

    Args:
        is_resumed: the folder held a run before.

    Raises:
        ConfigError: the checkpoint that `checkpoint.resume` names is not there, or the checkpoints are another run's.
    """
    step = config.checkpoint.resume
    if not is_resumed:
        if step != "auto":
            raise ConfigError(f"checkpoint.resume ({step}) needs --run-dir, the folder of the run that saved it")
        if saved:
            raise ConfigError(_occupied(root, saved[0], config))
        return []
    if step == "auto":
        return list(saved)
    look = functools.cache(lambda checkpoint: glance(checkpoint.folder, checkpoint.step))  # may take many seconds
    newest = next((glanced for glanced in map(look, saved) if glanced.problem is None), None)
    if newest is not None and newest.manifest is not None and not goes_back(config, newest.manifest):
        return [checkpoint for checkpoint in saved if checkpoint.step >= step]
    chosen = [checkpoint for checkpoint in saved if checkpoint.step == step]
    problem = look(chosen[0]).problem if chosen else None
    if not chosen or problem is not None:
        intact = sorted(glanced.step for glanced in map(look, saved) if glanced.problem is None)
        present = f"there are {listing(intact)}" if intact else "there is none"
        reason = f" ({problem})" if chosen else ""
        raise ConfigError(
            f"checkpoint.resume ({step}) must be the step of an intact checkpoint{reason}: {present} in {root}"
            f"{see('checkpoints#step-not-there')}"
        )
    return chosen


def _occupied(root: Root, checkpoint: StepFolder, config: Config) -> str:
    """The refusal of a new run at a place that has this checkpoint."""
    if config.checkpoint.path is None:
        key = "--run-dir"
        remedy = "put its run's config.yaml back"
    else:
        key = "checkpoint.path"
        remedy = "give --run-dir its run's folder"
    return (
        f"{key} ({root}) must be empty for a new run, it has a checkpoint of step {checkpoint.step}: {remedy} to "
        f"continue it, or choose another {key}, with checkpoint.load={checkpoint.folder} for the weights"
        f"{see('checkpoints#place-not-empty')}"
    )


def goes_back(config: Config, manifest: Manifest) -> bool:
    """Return whether `checkpoint.resume` names a step to which the run had not gone back when it saved this."""
    return config.checkpoint.resume != "auto" and manifest.schedule.get(_WENT_BACK) != _request(config)


def went_back(config: Config, manifest: Manifest | None) -> dict[str, Any]:
    """The last return to an earlier step, for `schedule` in manifests of a run that continues from this manifest."""
    if config.checkpoint.resume != "auto":
        return {_WENT_BACK: _request(config)}
    recorded = None if manifest is None else manifest.schedule.get(_WENT_BACK)
    return {} if recorded is None else {_WENT_BACK: recorded}


def _request(config: Config) -> Mapping[str, Any]:
    """The keys of a return to an earlier step: with another value of either, the user asks for another return."""
    return {"step": config.checkpoint.resume, "skip_batches": config.train.skip_batches}
