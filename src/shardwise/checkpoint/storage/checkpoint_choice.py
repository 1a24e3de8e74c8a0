"""The choice of the checkpoints that a run tries to continue from. Imports no torch, which a dry run does without."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.base.errors import ConfigError, listing, raise_problems, see
from shardwise.checkpoint.format.manifest import IMPORTED, Manifest
from shardwise.checkpoint.storage.checkpoint_folders import StepFolder, summarize_checkpoint, summarize_checkpoints
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import require_ownership
from shardwise.config import Config, changed_size_stages, resume_problems
from shardwise.runs.folder import RunDirectory

_WENT_BACK = "went_back"  # the key of a manifest's `schedule` with the request by which the run last went back


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints at the place where a run saves; `candidates` are tried in this order until one is intact."""

    root: Root
    saved: tuple[StepFolder, ...]
    candidates: tuple[StepFolder, ...]


def find_resumable_checkpoints(
    config: Config, root: Root, directory: RunDirectory, stored: Mapping[str, Any] | None
) -> FoundCheckpoints:
    """The checkpoints from which a run may continue, at the place where it saves; nothing there is changed.

    Args:
        stored: configuration of the earlier run in this folder; None where there is none.

    Raises:
        ConfigError: the checkpoints there are not this run's, it has saved its own elsewhere, or `data.stages` changes
            what the run has read.
        StoreError: the place cannot be read.
    """
    present = summarize_checkpoints(root)
    if stored is not None and not present:
        _require_none_elsewhere(root, directory, stored)
    candidates = _chosen_checkpoints(present, config, root, is_resumed=stored is not None)
    if stored is not None:
        _require_kept_stages(config, stored, candidates)
    require_ownership(root, directory.stored_id(), directory.path, is_empty=not present)
    return FoundCheckpoints(root, tuple(present), tuple(candidates))


def _require_kept_stages(config: Config, stored: Mapping[str, Any], candidates: Sequence[StepFolder]) -> None:
    """Raise ConfigError where lengths or weights of stages before the first intact candidate change."""
    for candidate in candidates:
        # The manifest has the last word, and is large: it is read only if the stored configuration differs.
        if not changed_size_stages(stored, config, candidate.step):
            return
        glanced = summarize_checkpoint(candidate.folder, candidate.step)
        if glanced.manifest is not None and glanced.problem is None:
            raise_problems(ConfigError, changed_size_stages(glanced.manifest.config, config, candidate.step))
            return


def _require_none_elsewhere(root: Root, directory: RunDirectory, stored: Mapping[str, Any]) -> None:
    """Raise ConfigError where the run has saved checkpoints elsewhere than in `root`: it would begin again."""
    recorded = [event for event in directory.events("checkpoint") if event.get("step") and event.get("path")]
    if recorded:
        step = recorded[-1]["step"]
        path = recorded[-1]["path"]
    else:
        # The record of events may be lost, and the stored configuration names the former place too.
        former_root = Root.of(stored.get("checkpoint", {}).get("path") or directory.checkpoints)
        saved = summarize_checkpoints(former_root) if str(former_root) != str(root) else []
        if not saved:
            return
        step = saved[0].step
        path = str(saved[0].folder)
    raise ConfigError(
        f"checkpoint.path ({root}) has no checkpoint, and the run in {directory.path} saved that of step {step:,} as "
        f"{path}: set checkpoint.path to where its checkpoints are, or start again in another --run-dir"
        f"{see('checkpoints#place-changed')}"
    )


def _chosen_checkpoints(
    saved: Sequence[StepFolder], config: Config, root: Root, *, is_resumed: bool
) -> list[StepFolder]:
    """Choose the checkpoints to try, in this order; none where the training begins.

    If the newest intact one was saved after the run went back as `checkpoint.resume` asks, the run continues from it:
    the same command, given again after a stop, must not undo its own steps.

    Args:
        is_resumed: the folder held a run before. A run of another program, whose state was imported, goes on too.

    Raises:
        ConfigError: the checkpoint that `checkpoint.resume` names is not there, or the checkpoints are another run's,
            or of another model that was imported.
    """
    step = config.checkpoint.resume
    if not is_resumed and not (saved and _is_imported(saved[0], config.recorded())):
        if step != "auto":
            raise ConfigError(f"checkpoint.resume ({step}) needs --run-dir, the folder of the run that saved it")
        if saved:
            raise ConfigError(_occupied(root, saved[0], config.checkpoint.path))
        return []
    if step == "auto":
        return list(saved)
    look = functools.cache(
        lambda checkpoint: summarize_checkpoint(checkpoint.folder, checkpoint.step)
    )  # may take many seconds
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


def _is_imported(newest: StepFolder, new: Mapping[str, Any]) -> bool:
    """True if another program did the steps of a checkpoint; ConfigError if its model is another one."""
    manifest = summarize_checkpoint(newest.folder, newest.step).manifest
    if manifest is None or manifest.data != IMPORTED:
        return False
    raise_problems(ConfigError, resume_problems({**new, "model": manifest.config["model"]}, new))
    return True


def _occupied(root: Root, checkpoint: StepFolder, path: str | None) -> str:
    if path is None:
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
    """True if the chosen checkpoint was saved before its run went back to the step that `checkpoint.resume` names."""
    asked = recorded_return(config, None)
    return bool(asked) and manifest.schedule.get(_WENT_BACK) != asked[_WENT_BACK]


def recorded_return(config: Config, manifest: Manifest | None) -> dict[str, Any]:
    """The last return of a run to a chosen checkpoint, for `schedule` of later manifests; empty if there was none."""
    if config.checkpoint.resume != "auto":
        # With another value of either, the user asks for another return.
        return {_WENT_BACK: {"step": config.checkpoint.resume, "skip_batches": config.train.skip_batches}}
    recorded = None if manifest is None else manifest.schedule.get(_WENT_BACK)
    return {} if recorded is None else {_WENT_BACK: recorded}
