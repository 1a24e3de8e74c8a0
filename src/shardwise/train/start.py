"""The start of a run: its data, its folder, the checkpoints that it may resume from, and weights to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.base import hub
from shardwise.base.errors import ConfigError, StoreError
from shardwise.base.files import user_path
from shardwise.base.hardware import cpu_count
from shardwise.base.yaml_and_json import dump_yaml
from shardwise.checkpoint.companions import Companions, find_checkpoint_companions, resumed_companions
from shardwise.checkpoint.format.weight_files import resolve_weights
from shardwise.checkpoint.storage.checkpoint_choice import FoundCheckpoints
from shardwise.checkpoint.storage.checkpoint_folders import load_location
from shardwise.checkpoint.storage.root import Root, is_url
from shardwise.checkpoint.storage.run_identity import RunOwner, continued_checkpoint, earlier_run, record_owner
from shardwise.config import CheckpointConfig, Config, Layout, kept_batch_note, resume_changes
from shardwise.data import EvaluationSets, PreparedData, prepare_evaluation_sets
from shardwise.data.open_data import prepare_data
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.estimates.memory import checkpoint_bytes
from shardwise.launch import rank_output
from shardwise.launch.environment import REPLAY
from shardwise.runs.folder import FollowedFolder, RunDirectory, new_run_path
from shardwise.train.experiment_trackers import require_trackers
from shardwise.train.rank_agreement import package_versions, raised_on_every_rank, while_others_wait
from shardwise.train.resume import checkpoints_at_start
from shardwise.train.step_record import Progress


@dataclass(frozen=True)
class _RunFolder:
    """A run's folder."""

    directory: RunDirectory
    id: str
    key: str  # text that tells this folder from copies of it, which may have the same id
    checkpoints: FoundCheckpoints
    # Keys whose values differ from those of the earlier run of this folder, one line each.
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # remarks for the user on trackers
    # Remark on a global batch that is kept from the earlier run; None where the configured one is used.
    batch_note: str | None = None
    began: tuple[int, ...] = ()  # steps that were done when each earlier start of the run began to train
    former_steps: int | None = None  # `train.steps` of the earlier run of this folder; None where there was none

    def require_room(self, checkpoint: CheckpointConfig, needed: int | None) -> None:
        """Raise ConfigError where checkpoints go to this folder and its disk lacks the `needed` bytes of one."""
        if needed is not None and checkpoint.path is None:
            self.directory.require_room(needed)


@dataclass(frozen=True)
class OpenedRun:
    """One rank's part of a run that was opened: all that its phases share."""

    config: Config
    layout: Layout
    mesh: Mesh
    progress: Progress
    data: PreparedData  # prepared data; `Feed.open` makes batches of them
    sets: EvaluationSets
    folder: _RunFolder
    # Folder of `checkpoint.load`; None where weights are drawn or a checkpoint of the run has them.
    weights: Root | None
    followed: FollowedFolder | None  # folder of the run, on rank 0; None on all other ranks
    # Files that each checkpoint has next to the weights; on rank 0 alone.
    companions: Companions = field(default_factory=Companions)
    base_model: str | None = None  # hub id in `checkpoint.load`; None where it names none


def open_run(
    config: Config, layout: Layout, mesh: Mesh, progress: Progress, run_path: Path | None, recipe: str
) -> OpenedRun:
    """Prepare the data, find the weights and make or open the folder; ConfigError on every rank. Collective."""
    # Before the folder: data that are refused must leave no folder that looks like that of a run.
    weights, model = _find_weights(config.checkpoint, run_path, mesh)

    def prepared() -> PreparedData:
        if model is None:
            return prepare_data(config)
        from shardwise.checkpoint.storage.model_tokenizer import with_loaded_tokenizer

        return prepare_data(with_loaded_tokenizer(config, model))

    data = while_others_wait(prepared, mesh.world)
    sets = while_others_wait(lambda: prepare_evaluation_sets(config, data), mesh.world)
    # Asked now: the folder that `checkpoint.load` names may be moved away before a checkpoint is saved.
    load = config.checkpoint.load
    is_on_hub = load is not None and hub.is_hub_name(load) and not user_path(load).exists()
    base_model = load if is_on_hub else None
    folder: _RunFolder | None = None
    companions = Companions()
    rank = mesh.world.rank
    with raised_on_every_rank(mesh.world):
        if rank == 0:
            folder, companions = _open(config, run_path or new_run_path(recipe), mesh, weights, data.tokenizer_path)
    folder = collectives.broadcast_object(folder, mesh.world)
    assert folder is not None
    # Only now is there a folder for the logs: what ranks above 0 print goes there from here on.
    rank_output.redirect(rank, folder.directory.log(rank))
    followed = FollowedFolder(folder.directory.path) if rank == 0 else None
    return OpenedRun(config, layout, mesh, progress, data, sets, folder, weights, followed, companions, base_model)


def _find_weights(checkpoint: CheckpointConfig, run_path: Path | None, mesh: Mesh) -> tuple[Root | None, Root | None]:
    """The folder of `checkpoint.load`, on this machine or behind a URL, and that with the tokenizer of the model.

    Of a run that continues, its own checkpoint has both, and no weights are loaded. All ranks have the same, or all
    fail.
    """
    load = checkpoint.load
    continued: Root | None = None
    folder = Path()
    if load is None:
        return None, None
    # Rank 0 looks for the newest checkpoint alone: a run that still trains may save between the looks of two ranks.
    with raised_on_every_rank(mesh.world):
        if mesh.world.rank == 0:
            continued = continued_checkpoint(checkpoint, run_path)
            load = load if continued is not None else load_location(load)
    load, continued = collectives.broadcast_object((load, continued), mesh.world)
    if continued is not None:
        return None, continued
    if is_url(load):
        return Root.of(load), Root.of(load)
    with raised_on_every_rank(mesh.world):
        folder = resolve_weights(load, checkpoint.revision, cached=True)
    if collectives.any_rank(folder.name != collectives.broadcast_object(folder.name, mesh.world), mesh.world):
        commits = sorted(set(collectives.all_gather_objects(folder.name, mesh.world)))
        raise ConfigError(
            f"checkpoint.load ({load}) must be one commit on every machine: set checkpoint.revision={commits[0]}"
        )
    return Root.of(folder), Root.of(folder)


def _open(
    config: Config, run_path: Path, mesh: Mesh, weights: Root | None, tokenizer: Path | None
) -> tuple[_RunFolder, Companions]:
    """Open the folder on rank 0: check all that is there, then write the run's files."""
    directory = RunDirectory(run_path)
    resolved = config.recorded()
    stored = earlier_run(directory, config)
    tracker_notes = require_trackers(config.log.trackers)
    # Before anything is written: a folder that is refused must not look like that of a run.
    checkpoints = checkpoints_at_start(config, directory, stored)
    companions = _companions(config, checkpoints, stored, weights, tokenizer)
    directory.create()
    changes: tuple[str, ...] = ()
    batch_note = None
    former_steps = None
    if stored is not None:
        former_steps = stored["train"]["steps"]
        changes = tuple(resume_changes(stored, resolved))
        batch_note = kept_batch_note(stored, config.train)
    run_id = directory.id()
    began = tuple(event.get("steps_before") or 0 for event in directory.events("start"))
    folder = _RunFolder(
        directory, run_id, directory.key(), checkpoints, changes, tracker_notes, batch_note, began, former_steps
    )
    folder.require_room(config.checkpoint, checkpoint_bytes(config, mesh.device.type != "cpu"))
    # Results of an earlier end would tell readers that this run has ended too.
    directory.set_results_aside()
    directory.write_config(dump_yaml(resolved))
    directory.write_environment(package_versions(), [devices.name(mesh.device)], cpu_count())
    if REPLAY not in os.environ:
        directory.mark_latest()
    try:
        record_owner(checkpoints.root, RunOwner.here(run_id, directory.path))
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
    return find_checkpoint_companions(config, weights, tokenizer)
