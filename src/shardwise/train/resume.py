"""Resuming a training from the checkpoints of its folder.

A run is resumed by files of several rooms, in this order:

1. `cli/train.py` reads the recipe. Where the batch is a rule, `with_batch` takes the number of the earlier run.
2. `checkpoint/storage/run_identity.py` `earlier_run` finds the run that the folder holds: its id and
   configuration, rebuilt from its checkpoints if a file is damaged. `config/resume_rules.py` refuses keys that may
   not change, and lists those that did.
3. `checkpoints_at_start` (here, on rank 0, called by `train/start.py`) finds the checkpoints, refuses those of another
   run, and chooses by `checkpoint.resume` which are tried (`checkpoint/storage/checkpoint_choice.py`).
4. `train/run.py` `_restore` takes a newer state from the memory of the nodes, if there is one (`memory_copies.py`);
   else `restore_first_intact` (here, on all ranks) restores the newest intact checkpoint by `checkpoint/restore.py`,
   which reads it for any layout. `continue_progress_from` sets steps, samples and position in the data.
5. `continue_data_from` (here) refuses other data, and streams and stages of a mixture go to their places.
6. `set_later_checkpoints_aside` (here) renames checkpoints whose steps are undone.
7. `checkpoint_choice.py` `recorded_return` records in the next manifests to which step the run went back, so that the
   same command, given again, does not undo its own steps (`goes_back`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.base.errors import ConfigError, RunError, StoreError, see
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.storage.checkpoint_choice import FoundCheckpoints, find_resumable_checkpoints, goes_back
from shardwise.checkpoint.storage.checkpoint_folders import (
    StepFolder,
    abandon_checkpoint,
    put_checkpoint_in_place,
    require_step,
    step_name,
)
from shardwise.checkpoint.storage.root import Root, answer_in_time, require_writable_folder
from shardwise.config import Config, changed_size_stages, data_position_after
from shardwise.data import PreparedData, continued_stages
from shardwise.data.samples.batch import BlendedBatches
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.runs.folder import RunDirectory
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import STREAM, Progress
from shardwise.train.training import Training

_ALL_DATA = ""  # the name of data that are no mixture
_KEYS_OF_MIXTURES = ("data.mixture", "data.stages")


def checkpoints_at_start(config: Config, directory: RunDirectory, stored: Mapping[str, Any] | None) -> FoundCheckpoints:
    """The checkpoints from which a training may resume at its start; checks that new ones can be written. On one rank.

    Args:
        stored: configuration of the earlier run in this folder; None where there is none.

    Raises:
        ConfigError: `checkpoint.path` cannot be read or written, or the checkpoints there are not this run's.
    """
    root = Root.of(config.checkpoint.path or directory.checkpoints)
    try:
        # Before all other looks: at a remote place that does not answer, each of them would hang.
        exists = answer_in_time(root, root.exists)
        present = find_resumable_checkpoints(config, root, directory, stored)
        if exists or config.checkpoint.path is not None:
            require_writable_folder(root)
        # Last, as this writes: nothing may change at a place that is refused.
        saved = tuple(_put_in_place(checkpoint, root) for checkpoint in present.saved)
    except StoreError as error:
        raise ConfigError(f"checkpoint.path: {error}" if config.checkpoint.path is not None else str(error)) from None
    steps = {candidate.step for candidate in present.candidates}
    chosen = tuple(checkpoint for checkpoint in saved if checkpoint.step in steps)
    return replace(present, saved=saved, candidates=chosen)


def _put_in_place(checkpoint: StepFolder, root: Root) -> StepFolder:
    """Give a complete checkpoint its final name, if a crash came before that."""
    final = root / step_name(checkpoint.step)
    if checkpoint.folder.name != final.name:
        put_checkpoint_in_place(checkpoint.folder, final)
        root.sync()
    return replace(checkpoint, folder=final)


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from."""

    manifest: Manifest  # manifest without its files and tensors, which take much memory
    folder: Root
    damage: tuple[str, ...]  # damage in files that the training does not need, one line each
    # Number of ranks whose part came from the memory of another node; None if it was read from the disk.
    received: int | None = None
    seconds: float = 0.0


def restore_first_intact(candidates: Sequence[StepFolder], training: Training, reporter: Reporter) -> Resumed | None:
    """Restore a training from the first intact candidate, and warn of damaged ones; None without any. Collective.

    A checkpoint is also used, with a warning, if only parts are damaged that the training does not need: weights beside
    intact masters, `config.json`, the tokenizer. An older one would undo steps that are not lost.

    Raises:
        ConfigError: a checkpoint is of another model or optimizer. RunError: no candidate is intact; or one that may be
        intact could not be read, and an older one would undo its steps.
    """
    mesh = training.mesh
    skipped = []
    for candidate in candidates:
        step = candidate.step
        problem = candidate.problem
        unreadable = candidate.unreadable
        if problem is None:
            # Costly to import, for a run that goes on alone.
            from shardwise.checkpoint.restore import read_manifest, restore_checkpoint

            training.progress.phase = f"loading of the checkpoint of step {step}"
            try:
                manifest = read_manifest(candidate.folder, mesh.world)
                require_step(manifest, candidate.folder, step)
                damage = restore_checkpoint(candidate.folder, manifest, training.model, training.optimizer, mesh).damage
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
                continue_progress_from(manifest, training.progress, training.config)
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


def set_later_checkpoints_aside(
    root: Root, saved: Sequence[StepFolder], step: int, mesh: Mesh, *, damaged: bool
) -> list[str]:
    """Before a training resumes at a step, rename the checkpoints after it; returns their new names. Collective.

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
                    names.append(str(abandon_checkpoint(root, checkpoint.step, damaged=damaged)))
        except StoreError as error:
            problem = str(error)
    names, problem = collectives.broadcast_object((names, problem), mesh.world)
    if problem is not None:
        raise RunError(f"a checkpoint after step {step:,} could not be set aside: {problem}")
    return names


def continue_data_from(manifest: Manifest, data: PreparedData, training: Training) -> None:
    """Let the training part go on from a checkpoint, whose progress is set.

    A mixture may have got sources since, and lost those that are not read. Other data, which `--change` allows, are
    read as if all samples before had been theirs.

    Raises:
        ConfigError: the text or its tokens are not those that the run began with; or a stage that has begun is not
            that of the run.
    """
    config = training.config
    progress = training.progress
    batches = training.feed.batches
    # A copy in memory has no configuration, and fits one with the same stages alone.
    if manifest.config and (problems := changed_size_stages(manifest.config, config, manifest.step)):
        raise ConfigError(problems)
    stored = manifest.data.get("sources") or {_ALL_DATA: manifest.data.get("fingerprint")}
    now = data.source_fingerprints or {_ALL_DATA: data.fingerprint}
    changed = [name for name in stored if stored[name] is not None and now.get(name, stored[name]) != stored[name]]
    allows_others = any(key.startswith("data.") and key not in _KEYS_OF_MIXTURES for key in config.changeable)
    if allows_others and (changed or not stored.keys() & now.keys()):
        # Other data have another loss: its first steps are no spike.
        progress.losses.clear()
        return
    if changed:
        name = changed[0]
        shown = f"the data ({data.summary})"
        remedy = "a new --run-dir with checkpoint.load takes only the weights"
        if name != _ALL_DATA:
            shown = f"the data of data.mixture.{name}"
            remedy = f"give other data another name; {remedy}"
        raise ConfigError(
            f"{shown} must be those that the run began with (fingerprint {stored[name]}, now {now[name]}): the files "
            f"or the tokenizer changed; {remedy}{see('checkpoints#data-changed')}"
        )
    state = manifest.rng.get(STREAM)
    if state is None:
        return
    batches.restore(state)
    if config.data.mixture and isinstance(batches, BlendedBatches):
        batches.set_stages(continued_stages(config, state["stages"], manifest.step, progress.position))


def continue_progress_from(manifest: Manifest, progress: Progress, config: Config) -> None:
    """Set the progress to that of a checkpoint."""
    progress.step = manifest.step
    progress.before = manifest.step
    progress.samples = manifest.samples
    progress.tokens = manifest.tokens
    progress.position = data_position_after(config, manifest.step, manifest.position)
    # Longer sequences have another loss: its first steps are no spike.
    if manifest.step > config.steps_before:
        progress.losses.extend(manifest.losses)
    # A run that goes back leaves out the batches that follow, which may have made its loss diverge. Once only: a later
    # start continues from a manifest whose position is already past them.
    if goes_back(config, manifest):
        progress.position += config.train.skip_batches * config.train.global_batch
