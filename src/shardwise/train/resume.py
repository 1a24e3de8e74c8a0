"""The start of a run, new or resumed: its data, its folder, its checkpoints, and weights to load.

A run is resumed by files of several rooms, in this order:

1. `cli/train.py` reads the recipe. Where the batch is a rule, `with_batch` takes the number of the earlier run.
2. `checkpoint/storage/run_identity.py` `earlier_run` finds the run that the folder holds: its id and configuration,
   rebuilt from its checkpoints if a file is damaged. `config/rules.py` refuses keys that may not change, and lists
   those that did.
3. `find_checkpoints` (here, on rank 0) finds the checkpoints, refuses those of another run, and chooses by
   `checkpoint.resume` which are tried (`choose`).
4. `train/run.py` `_restore` takes a newer state from the memory of the nodes, if there is one (`memory_copies.py`);
   else `restore_first` (here, on all ranks) restores the newest intact checkpoint by `checkpoint/restore.py`, which
   reads it for any layout. `continue_from` sets steps, samples and position in the data.
5. `require_same_data` (here) refuses other data, and a stream (`train/feed.py`) goes to its place.
6. `set_later_aside` (here) renames checkpoints whose steps are undone.
7. `went_back` (here) records in the next manifests to which step the run went back, so that the same command, given
   again, does not undo its own steps (`goes_back`)."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.base.errors import ConfigError, RunError, listing, see
from shardwise.base.hardware import cpu_count
from shardwise.checkpoint.companions import Companions, find_companions, resumed_companions
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.restore import read_manifest, restore
from shardwise.checkpoint.storage.checkpoint_folders import (
    StepFolder,
    abandon,
    glance,
    load_location,
    put_in_place,
    require_step,
    step_name,
    survey,
)
from shardwise.checkpoint.storage.root import Root, StoreError, in_time, require_writable
from shardwise.checkpoint.storage.run_identity import (
    Owner,
    earlier_run,
    is_inside,
    original_of,
    record_owner,
    require_ownership,
)
from shardwise.config import Config, Layout, dump_yaml, kept_batch_note, resume_changes
from shardwise.data import hub
from shardwise.data.formats.common import PreparedData
from shardwise.data.open_data import prepare
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.launch import output
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.planner.memory import checkpoint_bytes
from shardwise.runs.folder import FollowedFolder, RunDirectory, new_run_path
from shardwise.train.experiment_trackers import require_trackers
from shardwise.train.rank_agreement import raised_on_every_rank, versions, while_others_wait
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import Progress

_WENT_BACK = "went_back"
"""The key of a manifest's `schedule` with the request by which the run last went back."""


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints at the place where a run saves.

    Attributes:
        root: the place.
        saved: all checkpoints, newest first.
        candidates: checkpoints to try, in this order, until one is intact.
        original: folder of which this run's folder is a copy; None where it is no copy.
    """

    root: Root
    saved: tuple[StepFolder, ...]
    candidates: tuple[StepFolder, ...]
    original: Path | None = None


def find_checkpoints(
    config: Config, directory: RunDirectory, stored: Mapping[str, Any] | None, run: str | None = None
) -> FoundCheckpoints:
    """The checkpoints that exist; checks that new ones can be written. On one rank, before the training.

    Args:
        stored: configuration of the earlier run in this folder; None where there is none.
        run: id of that run; None stands for the id that the folder has.

    Raises:
        ConfigError: `checkpoint.path` cannot be read or written, or the checkpoints there are not this run's.
    """
    root = Root.of(config.checkpoint.path or directory.checkpoints)
    try:
        # Before all other looks: at a remote place that does not answer, each of them would hang.
        exists = in_time(root, root.exists)
        present = survey(root)
        if stored is not None and not present:
            _require_none_elsewhere(root, directory, stored)
        candidates = choose(present, config, root, is_resumed=stored is not None)
        run = run or directory.stored_id()
        # A copied folder has the id of its original: by the id alone both runs could save at one place.
        original = original_of(root, run, directory.path)
        if not is_inside(root, directory.path):
            require_ownership(root, run if original is None else None, is_empty=not present)
        if exists or config.checkpoint.path is not None:
            require_writable(root)
        # Last, as this writes: nothing may change at a place that is refused.
        saved = tuple(_put_in_place(checkpoint, root) for checkpoint in present)
    except StoreError as error:
        raise ConfigError(f"checkpoint.path: {error}" if config.checkpoint.path is not None else str(error)) from None
    steps = {candidate.step for candidate in candidates}
    chosen = tuple(checkpoint for checkpoint in saved if checkpoint.step in steps)
    return FoundCheckpoints(root, saved, chosen, original)


def _put_in_place(checkpoint: StepFolder, root: Root) -> StepFolder:
    """Give a complete checkpoint its final name, if a crash came before that."""
    final = root / step_name(checkpoint.step)
    if checkpoint.folder.name != final.name:
        put_in_place(checkpoint.folder, final)
        root.sync()
    return replace(checkpoint, folder=final)


def _require_none_elsewhere(root: Root, directory: RunDirectory, stored: Mapping[str, Any]) -> None:
    """Raise ConfigError where the run has saved checkpoints elsewhere than in `root`: it would begin again."""
    recorded = [event for event in directory.events("checkpoint") if event.get("step") and event.get("path")]
    if recorded:
        step = recorded[-1]["step"]
        path = recorded[-1]["path"]
    else:
        # The record of events may be lost, and the stored configuration names the former place too.
        former_root = Root.of(stored.get("checkpoint", {}).get("path") or directory.checkpoints)
        saved = survey(former_root) if str(former_root) != str(root) else []
        if not saved:
            return
        step = saved[0].step
        path = str(saved[0].folder)
    raise ConfigError(
        f"checkpoint.path ({root}) has no checkpoint, and the run in {directory.path} saved that of step {step:,} as "
        f"{path}: set checkpoint.path to where its checkpoints are, or start again in another --run-dir"
        f"{see('checkpoints#place-changed')}"
    )


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


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from.

    Attributes:
        manifest: manifest without its files and tensors, which take much memory.
        folder: folder of the checkpoint.
        damage: damage in files that the training does not need, one line each.
    """

    manifest: Manifest
    folder: Root
    damage: tuple[str, ...]


def restore_first(
    candidates: Sequence[StepFolder],
    config: Config,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    mesh: Mesh,
    progress: Progress,
    reporter: Reporter,
) -> Resumed | None:
    """Restore the first intact candidate, and warn of each that is damaged; None without candidates. Collective.

    A checkpoint is also used, with a warning, if only parts are damaged that the training does not need: weights beside
    intact masters, `config.json`, the tokenizer. An older one would undo steps that are not lost.

    Raises:
        ConfigError: a checkpoint is of another model or optimizer. RunError: no candidate is intact; or one that may be
        intact could not be read, and an older one would undo its steps.
    """
    skipped = []
    for candidate in candidates:
        step = candidate.step
        problem = candidate.problem
        unreadable = candidate.unreadable
        if problem is None:
            progress.phase = f"loading of the checkpoint of step {step}"
            try:
                manifest = read_manifest(candidate.folder, mesh.world)
                require_step(manifest, candidate.folder, step)
                damage = restore(candidate.folder, manifest, model, optimizer, mesh).damage
            except StoreError as error:
                # A place that does not answer may hold an intact checkpoint: no older one is taken for it.
                problem = str(error)
                unreadable = not error.is_damage
            else:
                if damage:
                    reporter.warning(
                        f"the checkpoint of step {step:,} is damaged, but all that its training needs is intact: "
                        f"it is used, and saved again ({'; '.join(damage)})"
                    )
                continue_from(manifest, progress, config)
                return Resumed(replace(manifest, files=(), tensors={}), candidate.folder, damage)
        if unreadable:
            raise RunError(
                f"the checkpoint of step {step:,} could not be used, and no older one is taken for it: {problem}; "
                "start again when that is mended, or name an older one by checkpoint.resume=STEP"
                f"{see('checkpoints#cannot-be-read-now')}"
            )
        # Damaged for sure: reading it again would not help, so an older one may be taken.
        skipped.append(f"step {step:,}: {problem}")
        suffix = "" if candidate.incomplete else "; it is set aside when the run continues"
        reporter.warning(
            f"the checkpoint of step {step:,} was left out: {problem}{suffix}{see('checkpoints#left-out')}"
        )
    if skipped:
        raise RunError(
            f"none of the checkpoints is intact ({'; '.join(skipped)}): restore one of them from a copy, or start "
            "again in another --run-dir"
            f"{see('checkpoints#none-intact')}"
        )
    return None


def set_later_aside(root: Root, saved: Sequence[StepFolder], step: int, mesh: Mesh, *, damaged: bool) -> list[str]:
    """Rename the checkpoints after `step`, whose steps are undone; returns their new names. Collective.

    If they were left out as `damaged`, the files of a killed save are no checkpoint and stay for the next save.

    Raises:
        RunError: one of them cannot be renamed; raised on every rank.
    """
    names: list[str] = []
    problem: str | None = None
    if mesh.world.rank == 0:
        try:
            for checkpoint in saved:
                if checkpoint.step > step and not (damaged and checkpoint.incomplete):
                    names.append(str(abandon(root, checkpoint.step, damaged=damaged)))
        except StoreError as error:
            problem = str(error)
    names, problem = collectives.broadcast_object((names, problem), mesh.world)
    if problem is not None:
        raise RunError(f"a checkpoint after step {step:,} could not be set aside: {problem}")
    return names


def require_same_data(manifest: Manifest, data: PreparedData) -> None:
    """Raise ConfigError where the text or its tokens are not those that the run began with."""
    stored = manifest.data.get("fingerprint")
    if stored is not None and stored != data.fingerprint:
        raise ConfigError(
            f"the data ({data.summary}) must be those that the run began with (fingerprint {stored}, now "
            f"{data.fingerprint}): the files or the tokenizer changed; a new --run-dir with checkpoint.load takes only "
            "the weights"
            f"{see('checkpoints#data-changed')}"
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


def continue_from(manifest: Manifest, progress: Progress, config: Config) -> None:
    """Set the progress to that of a checkpoint."""
    progress.step = manifest.step
    progress.before = manifest.step
    progress.samples = manifest.samples
    progress.tokens = manifest.tokens
    progress.position = manifest.position
    progress.losses.extend(manifest.losses)
    # A run that goes back leaves out the batches that follow, which may have made its loss diverge. Once only: a later
    # start continues from a manifest whose position is already past them.
    if goes_back(config, manifest):
        progress.position += config.train.skip_batches * config.train.global_batch


@dataclass(frozen=True)
class RunFolder:
    """A run's folder.

    Attributes:
        directory: the folder itself.
        id: id of the run.
        key: text that tells this folder from copies of it, which may have the same id.
        checkpoints: checkpoints that the run can continue from.
        changes: keys whose values differ from those of the earlier run of this folder, one line each.
        notes: remarks for the user on files of the earlier run that were rebuilt.
        batch_note: remark on a global batch that is kept from the earlier run; None where the configured one is used.
        began: steps that were done when each earlier start of the run began to train.
    """

    directory: RunDirectory
    id: str
    key: str
    checkpoints: FoundCheckpoints
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    batch_note: str | None = None
    began: tuple[int, ...] = ()

    def require_room(self, config: Config, needed: int | None) -> None:
        """Raise ConfigError where checkpoints go to this folder and its disk lacks the `needed` bytes of one."""
        if needed is not None and config.checkpoint.path is None:
            self.directory.require_room(needed)


@dataclass(frozen=True)
class OpenedRun:
    """One rank's part of a run that was opened: all that its phases share.

    Attributes:
        data: prepared data; `Feed.open` makes batches of them.
        weights: folder of `checkpoint.load`; None where weights are drawn or a checkpoint of the run has them.
        followed: folder of the run, on rank 0; None on all other ranks.
        companions: files that each checkpoint has next to the weights; on rank 0 alone.
    """

    config: Config
    layout: Layout
    mesh: Mesh
    progress: Progress
    data: PreparedData
    folder: RunFolder
    weights: Root | None
    followed: FollowedFolder | None
    companions: Companions = field(default_factory=Companions)


def open_run(
    config: Config, layout: Layout, mesh: Mesh, progress: Progress, run_path: Path | None, recipe: str
) -> OpenedRun:
    """Prepare the data, find the weights and make or open the folder; collective.

    Raises:
        ConfigError: one of them is wrong; on every rank.
    """
    # Before the folder: data that are refused must leave no folder that looks like that of a run.
    data = while_others_wait(lambda: prepare(config), mesh.world)
    weights = _find_weights(config, mesh)
    folder, companions = _open_folder(config, run_path or new_run_path(recipe), mesh, weights, data.tokenizer_path)
    followed = FollowedFolder(folder.directory.path) if mesh.world.rank == 0 else None
    if folder.checkpoints.candidates:
        weights = None
    return OpenedRun(config, layout, mesh, progress, data, folder, weights, followed, companions)


def _find_weights(config: Config, mesh: Mesh) -> Root | None:
    """The folder of `checkpoint.load`, on this machine or behind a URL; all ranks have the same, or all fail."""
    load = config.checkpoint.load
    folder = Path()
    if load is None:
        return None
    # Rank 0 looks for the newest checkpoint alone: a run that still trains may save between the looks of two ranks.
    with raised_on_every_rank(mesh.world):
        if mesh.world.rank == 0:
            load = load_location(load)
    load = collectives.broadcast_object(load, mesh.world)
    if hub.is_url(load):
        return Root.of(load)
    with raised_on_every_rank(mesh.world):
        folder = hub.resolve(load, config.checkpoint.revision, cached=True)
    if collectives.any_rank(folder.name != collectives.broadcast_object(folder.name, mesh.world), mesh.world):
        commits = sorted(set(collectives.all_gather_objects(folder.name, mesh.world)))
        raise ConfigError(
            f"checkpoint.load ({load}) must be one commit on every machine: set checkpoint.revision={commits[0]}"
        )
    return Root.of(folder)


def _open_folder(
    config: Config, run_path: Path, mesh: Mesh, weights: Root | None, tokenizer: Path | None
) -> tuple[RunFolder, Companions]:
    """Rank 0 makes the folder, or opens that of an earlier run; all ranks have the same, or all fail.

    Only rank 0 has the companions.
    """
    folder: RunFolder | None = None
    companions = Companions()
    with raised_on_every_rank(mesh.world):
        if mesh.world.rank == 0:
            folder, companions = _open(config, run_path, mesh, weights, tokenizer)
    folder = collectives.broadcast_object(folder, mesh.world)
    assert folder is not None
    # Only now is there a folder for the logs: what ranks above 0 print goes there from here on.
    output.redirect(mesh.world.rank, folder.directory.log(mesh.world.rank))
    return folder, companions


def _open(
    config: Config, run_path: Path, mesh: Mesh, weights: Root | None, tokenizer: Path | None
) -> tuple[RunFolder, Companions]:
    """Open the folder on rank 0: check all that is there, then write the run's files."""
    directory = RunDirectory(run_path)
    resolved = config.recorded()
    earlier = earlier_run(directory, config)
    stored = None if earlier is None else earlier.config
    run_id = None if earlier is None else earlier.id
    require_trackers(config)
    # Before anything is written: a folder that is refused must not look like that of a run.
    checkpoints = find_checkpoints(config, directory, stored, run_id)
    companions = _companions(config, checkpoints, stored, weights, tokenizer)
    directory.create()
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    batch_note = None
    if earlier is not None:
        changes = tuple(resume_changes(earlier.config, resolved))
        notes = earlier.notes
        batch_note = kept_batch_note(earlier.config, config)
    if checkpoints.original is not None:
        run_id = uuid.uuid4().hex
        notes += (f"{run_path} is a copy of {checkpoints.original}: it goes on as a run of its own, with another id",)
    run_id = directory.id(run_id)
    began = tuple(event.get("steps_before") or 0 for event in directory.events("start"))
    folder = RunFolder(directory, run_id, directory.key(), checkpoints, changes, notes, batch_note, began)
    folder.require_room(config, checkpoint_bytes(config, mesh.device.type != "cpu"))
    # Results of an earlier end would tell readers that this run has ended too.
    directory.set_results_aside()
    directory.write_config(dump_yaml(resolved))
    directory.write_environment(versions(), [devices.name(mesh.device)], cpu_count())
    directory.mark_latest()
    try:
        record_owner(checkpoints.root, Owner.here(run_id, directory.path))
    except StoreError as error:
        raise ConfigError(str(error)) from None
    return folder, companions


def _companions(
    config: Config,
    checkpoints: FoundCheckpoints,
    stored: Mapping[str, Any] | None,
    weights: Root | None,
    tokenizer: Path | None,
) -> Companions:
    """Files next to the weights: on a resume those of the newest checkpoint, as the first source may be gone.

    A place that `checkpoint.companions` names anew counts before the checkpoint.
    """
    stored_place = None if stored is None else stored.get("checkpoint", {}).get("companions")
    if config.checkpoint.companions == stored_place:
        for candidate in checkpoints.candidates:
            with suppress(ConfigError, StoreError):
                return resumed_companions(candidate.folder, tokenizer)
    return find_companions(config, weights, tokenizer)
