"""Going on where an earlier run of the same folder was saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from shardwise import comm
from shardwise.checkpoint.restore import read_manifest, restore
from shardwise.config import Config
from shardwise.data import PreparedData
from shardwise.errors import ConfigError, RunError, listing
from shardwise.mesh import Mesh
from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.store.folders import Found, abandon, checkpoints
from shardwise.store.manifest import Manifest
from shardwise.store.reach import in_time, require_writable
from shardwise.store.root import Root, StoreError
from shardwise.train.record import Progress
from shardwise.train.report import Reporter


@dataclass(frozen=True)
class Standing:
    """What lies where a run saves: all its checkpoints, newest first, and those to try, in this order."""

    root: Root
    found: tuple[Found, ...]
    candidates: tuple[Found, ...]


def look(config: Config, default: Path, *, is_resumed: bool) -> Standing:
    """See which checkpoints there are and that new ones can be written, on one rank, before anything is trained.

    Args:
        default: the folder of the checkpoints where `checkpoint.path` names none. is_resumed: the run's folder held a
        run before.

    Raises:
        ConfigError: `checkpoint.path` cannot be read or written, or what lies there is not this run's to go on with.
    """
    root = Root.of(config.checkpoint.path or default)

    try:
        is_there = in_time(root, root.exists)
        there = checkpoints(root)
        candidates = choose(there, config, root, is_resumed=is_resumed)
        if is_there or config.checkpoint.path is not None:
            require_writable(root)
    except StoreError as error:
        raise ConfigError(f"checkpoint.path: {error}" if config.checkpoint.path is not None else str(error)) from None
    chosen = {each.step for each in candidates}
    found = tuple(replace(each, manifest=None) for each in there)  # each rank gets the one that it needs
    return Standing(root, found, tuple(each for each in found if each.step in chosen))


def choose(found: Sequence[Found], config: Config, root: Root, *, is_resumed: bool) -> list[Found]:
    """The checkpoints to try, in this order; none where the training begins.

    Args:
        is_resumed: the run's folder held a run before.

    Raises:
        ConfigError: the checkpoint that `checkpoint.resume` names is not there, or the checkpoints are another run's.
    """
    step = config.checkpoint.resume
    intact = [each.step for each in found if each.problem is None]
    if not is_resumed:
        if step != "auto":
            raise ConfigError(f"checkpoint.resume ({step}) needs --run-dir, the folder of the run that saved it")
        if found:
            raise ConfigError(
                f"checkpoint.path ({root}) must be empty for a new run, it has a checkpoint of step {found[0].step}: "
                "give --run-dir its run's folder to go on, or choose another checkpoint.path"
            )
        return []
    if step == "auto":
        return list(found)
    chosen = [each for each in found if each.step == step]
    if not chosen or chosen[0].problem is not None:
        there = f"there are {listing(sorted(intact))}" if intact else "there is none"
        reason = f" ({chosen[0].problem})" if chosen else ""
        raise ConfigError(
            f"checkpoint.resume ({step}) must be the step of an intact checkpoint{reason}: {there} in {root}"
        )
    return chosen


def restore_first(
    candidates: Sequence[Found],
    config: Config,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    mesh: Mesh,
    progress: Progress,
    reporter: Reporter,
) -> tuple[Manifest, Found] | None:
    """Restore the first candidate that is intact, and tell of each that is not; collective.

    None where there is no candidate.

    Raises:
        ConfigError: a checkpoint of another model or optimizer. RunError: candidates, and none of them intact.
    """
    skipped = []
    for each in candidates:
        problem = each.problem
        if problem is None:
            progress.phase = f"loading of the checkpoint of step {each.step}"
            try:
                manifest = read_manifest(each.folder, mesh.world)
                restore(each.folder, manifest, model, optimizer, mesh)
            except StoreError as error:
                problem = str(error)
            else:
                _take_up(progress, manifest, config)
                return manifest, each
        skipped.append(f"step {each.step:,}: {problem}")
        reporter.warning(f"the checkpoint of step {each.step:,} was left out: {problem}")
    if skipped:
        raise RunError(
            f"none of the checkpoints is intact ({'; '.join(skipped)}): restore one of them from a copy, or begin anew "
            "in another --run-dir"
        )
    return None


def abandon_later(root: Root, found: Sequence[Found], step: int, mesh: Mesh) -> list[str]:
    """Set the checkpoints after `step` aside, whose training is taken back; returns their new names."""
    names: list[str] = []
    if mesh.world.rank == 0:
        names = [str(abandon(root, each.step)) for each in found if each.step > step]
    return comm.broadcast_object(names, mesh.world)


def require_same_data(manifest: Manifest, data: PreparedData) -> None:
    """Raises ConfigError where the text or its tokens are not those that the run began with."""
    before = manifest.data.get("fingerprint")
    if before is not None and before != data.fingerprint:
        raise ConfigError(
            f"the data ({data.summary}) must be those that the run began with (fingerprint {before}, now "
            f"{data.fingerprint}): the files or the tokenizer changed; a new --run-dir with checkpoint.load takes the "
            "weights alone"
        )


def _take_up(progress: Progress, manifest: Manifest, config: Config) -> None:
    progress.step, progress.samples, progress.tokens = manifest.step, manifest.samples, manifest.tokens
    progress.position = manifest.position + config.train.skip_batches * config.train.global_batch
