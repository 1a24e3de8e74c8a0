"""Resuming a training where an earlier run of the same folder was saved."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise import comm
from shardwise.checkpoint.restore import read_manifest, restore
from shardwise.checkpoint_format.folders import (
    Found,
    abandon,
    glance,
    is_damage,
    put_in_place,
    require_step,
    step_name,
    survey,
)
from shardwise.checkpoint_format.manifest import Manifest
from shardwise.checkpoint_format.owner import require_own
from shardwise.config import Config
from shardwise.data import PreparedData
from shardwise.errors import ConfigError, RunError, listing
from shardwise.mesh import Mesh
from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.runlog import RunDirectory
from shardwise.storage.reach import in_time, require_writable
from shardwise.storage.root import Root, StoreError
from shardwise.train.record import Progress
from shardwise.train.report import Reporter

_WENT_BACK = "went_back"


@dataclass(frozen=True)
class FoundCheckpoints:
    """What lies where a run saves.

    Attributes:
        root: where it saves.
        found: all checkpoints, newest first.
        candidates: those to restore from: the first that is intact.
    """

    root: Root
    found: tuple[Found, ...]
    candidates: tuple[Found, ...]


def find_checkpoints(
    config: Config, directory: RunDirectory, stored: Mapping[str, Any] | None, run: str | None = None
) -> FoundCheckpoints:
    """The checkpoints that there are, once it is clear that new ones can be written; on one rank, before the training.

    Args:
        config: of the run.
        directory: of the run.
        stored: the configuration of the run that its folder held before, if any.
        run: the id of that run; None takes it from the folder.

    Raises:
        ConfigError: `checkpoint.path` cannot be read or written, or what lies there is not this run's to continue from.
    """
    root = Root.of(config.checkpoint.path or directory.checkpoints)
    try:
        is_there = in_time(root, root.exists)
        there = survey(root)
        if stored is not None and not there:
            _require_none_elsewhere(root, directory, stored)
        candidates = choose(there, config, root, is_resumed=stored is not None)
        require_own(root, run or directory.stored_id(), is_empty=not there)
        if is_there or config.checkpoint.path is not None:
            require_writable(root)
        found = tuple(_named(each, root) for each in there)
    except StoreError as error:
        raise ConfigError(f"checkpoint.path: {error}" if config.checkpoint.path is not None else str(error)) from None
    chosen = {each.step for each in candidates}
    return FoundCheckpoints(root, found, tuple(each for each in found if each.step in chosen))


def _named(found: Found, root: Root) -> Found:
    """A checkpoint under its name; one whose save ended before it got that gets it now."""
    final = root / step_name(found.step)
    if found.folder.name == final.name:
        return found
    put_in_place(found.folder, final)
    root.sync()
    return replace(found, folder=final)


def _require_none_elsewhere(root: Root, directory: RunDirectory, stored: Mapping[str, Any]) -> None:
    """Raises ConfigError where the run has saved checkpoints and `root` holds none: it would begin once more."""
    recorded = list(directory.events("checkpoint"))[-1:]
    if recorded:
        step, place = int(recorded[0]["step"]), str(recorded[0]["path"])
    else:
        before = Root.of(stored.get("checkpoint", {}).get("path") or directory.checkpoints)
        saved = survey(before) if str(before) != str(root) else []
        if not saved:
            return
        step, place = saved[0].step, str(saved[0].folder)
    raise ConfigError(
        f"checkpoint.path ({root}) has no checkpoint, and the run in {directory.path} saved that of step {step:,} as "
        f"{place}: set checkpoint.path to where its checkpoints are, or begin anew in another --run-dir"
    )


def choose(found: Sequence[Found], config: Config, root: Root, *, is_resumed: bool) -> list[Found]:
    """The checkpoints to try, in this order; none where the training begins.

    Where the newest intact one was saved after going back as `checkpoint.resume` asks, the run continues from there:
    the same command, given again after a stop, must not take back what it has done.

    Args:
        is_resumed: the run's folder held a run before.

    Raises:
        ConfigError: the checkpoint that `checkpoint.resume` names is not there, or the checkpoints are another run's.
    """
    step = config.checkpoint.resume
    if not is_resumed:
        if step != "auto":
            raise ConfigError(f"checkpoint.resume ({step}) needs --run-dir, the folder of the run that saved it")
        if found:
            raise ConfigError(_occupied(root, found[0], config))
        return []
    if step == "auto":
        return list(found)
    seen = functools.cache(lambda each: glance(each.folder, each.step))  # some manifests take many seconds
    newest = next((each for each in map(seen, found) if each.problem is None), None)
    if newest is not None and newest.manifest is not None and not goes_back(config, newest.manifest):
        return [each for each in found if each.step >= step]
    chosen = [each for each in found if each.step == step]
    problem = seen(chosen[0]).problem if chosen else None
    if not chosen or problem is not None:
        intact = sorted(each.step for each in map(seen, found) if each.problem is None)
        there = f"there are {listing(intact)}" if intact else "there is none"
        reason = f" ({problem})" if chosen else ""
        raise ConfigError(
            f"checkpoint.resume ({step}) must be the step of an intact checkpoint{reason}: {there} in {root}"
        )
    return chosen


def _occupied(root: Root, found: Found, config: Config) -> str:
    if config.checkpoint.path is None:
        key, go_on = "--run-dir", "put its run's config.yaml back"
    else:
        key, go_on = "checkpoint.path", "give --run-dir its run's folder"
    return (
        f"{key} ({root}) must be empty for a new run, it has a checkpoint of step {found.step}: {go_on} to go on, or "
        f"choose another {key}, with checkpoint.load={found.folder} for the weights"
    )


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from.

    Attributes:
        manifest: without its files and tensors, which take much memory.
        folder: of the checkpoint.
        damage: in what the training does not need.
    """

    manifest: Manifest
    folder: Root
    damage: tuple[str, ...]


def restore_first(
    candidates: Sequence[Found],
    config: Config,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    mesh: Mesh,
    progress: Progress,
    reporter: Reporter,
) -> Resumed | None:
    """Restore the first candidate that is intact, and warn of each that is damaged; collective.

    One that is damaged only where its training does not need it (weights beside intact masters, `config.json`, the
    tokenizer) is taken too, with a warning: to take an older one would undo steps that are not lost.

    Returns:
        None where there is no candidate.

    Raises:
        ConfigError: a checkpoint of another model or optimizer. RunError: candidates, and none of them intact; or one
        that may be intact could not be read, and to take an older one would undo what it holds.
    """
    skipped = []
    for each in candidates:
        problem, unreadable = each.problem, each.unreadable
        if problem is None:
            progress.phase = f"loading of the checkpoint of step {each.step}"
            try:
                manifest = read_manifest(each.folder, mesh.world)
                require_step(manifest, each.folder, each.step)
                restored = restore(each.folder, manifest, model, optimizer, mesh)
            except StoreError as error:
                problem, unreadable = str(error), not is_damage(error)
            else:
                if restored.damage:
                    reporter.warning(
                        f"the checkpoint of step {each.step:,} is damaged, but all that its training needs is intact: "
                        f"it is used, and saved again ({'; '.join(restored.damage)})"
                    )
                _take_up(progress, manifest, config)
                return Resumed(replace(manifest, files=(), tensors={}), each.folder, restored.damage)
        if unreadable:
            raise RunError(
                f"the checkpoint of step {each.step:,} could not be used, and no older one is taken for it: {problem}; "
                "start again when that is mended, or name an older one by checkpoint.resume=STEP"
            )
        skipped.append(f"step {each.step:,}: {problem}")
        then = "" if each.incomplete else "; it is set aside when the run goes on"
        reporter.warning(f"the checkpoint of step {each.step:,} was left out: {problem}{then}")
    if skipped:
        raise RunError(
            f"none of the checkpoints is intact ({'; '.join(skipped)}): restore one of them from a copy, or begin anew "
            "in another --run-dir"
        )
    return None


def set_later_aside(root: Root, found: Sequence[Found], step: int, mesh: Mesh, *, damaged: bool) -> list[str]:
    """Set the checkpoints after `step` aside, whose training is taken back; returns their new names; collective.

    What a killed save left is no checkpoint, and stays for the next save.

    Args:
        root: where the checkpoints lie.
        found: all of them.
        step: of the checkpoint that was restored.
        mesh: of the run.
        damaged: the later ones were left out because they are damaged.

    Raises:
        RunError: on every rank, one of them cannot be renamed.
    """
    names: list[str] = []
    problem: str | None = None
    if mesh.world.rank == 0:
        try:
            for each in found:
                if each.step > step and not (damaged and each.incomplete):
                    names.append(str(abandon(root, each.step, damaged=damaged)))
        except StoreError as error:
            problem = str(error)
    names, problem = comm.broadcast_object((names, problem), mesh.world)
    if problem is not None:
        raise RunError(f"a checkpoint after step {step:,} could not be set aside: {problem}")
    return names


def require_same_data(manifest: Manifest, data: PreparedData) -> None:
    """Raises ConfigError where the text or its tokens are not those that the run began with."""
    before = manifest.data.get("fingerprint")
    if before is not None and before != data.fingerprint:
        raise ConfigError(
            f"the data ({data.summary}) must be those that the run began with (fingerprint {before}, now "
            f"{data.fingerprint}): the files or the tokenizer changed; a new --run-dir with checkpoint.load takes the "
            "weights alone"
        )


def goes_back(config: Config, manifest: Manifest) -> bool:
    """Whether `checkpoint.resume` names a step, and the checkpoint was not saved after going back as it asks."""
    return config.checkpoint.resume != "auto" and manifest.schedule.get(_WENT_BACK) != _request(config)


def went_back(config: Config, manifest: Manifest | None) -> dict[str, Any]:
    """What each manifest of a run that goes on from this checkpoint says in `schedule`: how it last went back."""
    if config.checkpoint.resume != "auto":
        return {_WENT_BACK: _request(config)}
    before = None if manifest is None else manifest.schedule.get(_WENT_BACK)
    return {} if before is None else {_WENT_BACK: before}


def _request(config: Config) -> Mapping[str, Any]:
    return {"step": config.checkpoint.resume, "skip_batches": config.train.skip_batches}


def _take_up(progress: Progress, manifest: Manifest, config: Config) -> None:
    progress.step, progress.samples, progress.tokens = manifest.step, manifest.samples, manifest.tokens
    progress.before, progress.position = manifest.step, manifest.position
    if goes_back(config, manifest):
        progress.position += config.train.skip_batches * config.train.global_batch
