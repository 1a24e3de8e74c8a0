"""The start of a run: its data, its folder, the checkpoints that it may resume from, and weights to load.

The folder of a run, which may be renamed while the run trains.

All processes of a run write to the folder by its path. So a link of the old name is left where the folder was, which
leads all of them, on every machine, to where it is.

Whether all ranks of a job have the same software, configuration and folder, which several machines may not have.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shardwise import __version__
from shardwise.base.errors import ConfigError, RunError, listing
from shardwise.base.files import reason_of
from shardwise.base.hardware import cpu_count
from shardwise.checkpoint.companions import Companions, find_companions, resumed_companions
from shardwise.checkpoint.format.diff import by_dotted_key
from shardwise.checkpoint.storage.locate import newest_of, require_checkpoint
from shardwise.checkpoint.storage.owner import Owner, earlier_run, take
from shardwise.checkpoint.storage.root import Root, StoreError
from shardwise.config import Config, Layout, dump_yaml, kept_batch_note, resume_changes
from shardwise.data import hub
from shardwise.data.formats.common import PreparedData
from shardwise.data.opening import prepare
from shardwise.distributed import collectives, devices
from shardwise.distributed.agreement import agree
from shardwise.distributed.mesh import Group, Mesh, join
from shardwise.launch import output
from shardwise.planner.memory import checkpoint_bytes
from shardwise.runs.folder import RunDirectory, new_run_path
from shardwise.train.experiment_trackers import require_trackers
from shardwise.train.resume import FoundCheckpoints, find_checkpoints
from shardwise.train.step_record import Progress

_R = TypeVar("_R")


@dataclass(frozen=True)
class Folder:
    """A run's folder.

    Attributes:
        directory: the folder itself.
        id: of the run.
        key: tells this folder from copies of it, which may have the same id.
        checkpoints: that the run can continue from.
        changes: of the configuration since the earlier run of this folder.
        notes: on files of the earlier run that were rebuilt.
        batch: which global batch is kept of the earlier run, and why; None where the configuration's is used.
        began: steps that were done when each earlier start of the run began to train.
    """

    directory: RunDirectory
    id: str
    key: str
    checkpoints: FoundCheckpoints
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    batch: str | None = None
    began: tuple[int, ...] = ()

    def require_room(self, config: Config, needed: int | None) -> None:
        """Raise ConfigError where checkpoints go to this folder and its disk lacks the `needed` bytes of one."""
        if needed is not None and config.checkpoint.path is None:
            self.directory.require_room(needed)


@dataclass(frozen=True)
class Run:
    """What the phases of a run share, on one rank.

    Attributes:
        weights: the folder of `checkpoint.load`; None where weights are drawn or a checkpoint of the run has them.
        companions: what lies beside the weights in each checkpoint; on rank 0 alone.
        followed: the run's folder, on rank 0; None on the others.
    """

    config: Config
    layout: Layout
    mesh: Mesh
    progress: Progress
    data: PreparedData
    folder: Folder
    weights: Root | None
    followed: FollowedFolder | None
    companions: Companions = field(default_factory=Companions)


def open_run(config: Config, layout: Layout, mesh: Mesh, progress: Progress, run_path: Path | None, recipe: str) -> Run:
    """Prepare the data, find the weights and make or open the folder; collective.

    Raises:
        ConfigError: one of them is wrong; on every rank.
    """
    data = while_others_wait(lambda: prepare(config), mesh.world)
    weights = _find_weights(config, mesh)
    folder, companions = _open_folder(config, run_path or new_run_path(recipe), mesh, weights, data.tokenizer_path)
    followed = FollowedFolder(folder.directory.path) if mesh.world.rank == 0 else None
    weights = None if folder.checkpoints.candidates else weights
    return Run(config, layout, mesh, progress, data, folder, weights, followed, companions)


def while_others_wait(work: Callable[[], _R], group: Group) -> _R:
    """Do some work that may take long on one rank, and wait until all ranks have done theirs. Collective.

    A collective fails when a rank does not call it in time, so the ranks tell each other every few seconds whether they
    still work. They wait no longer once the work has failed on one of them, which then raises its error.
    """
    if group.size == 1:
        return work()
    thread = ThreadPoolExecutor(1, thread_name_prefix="preparation")
    doing, seconds = thread.submit(work), 0.01
    thread.shutdown(wait=False)  # after this work; a user who interrupts the run does not wait for it
    while True:
        done = doing.done()  # asked once: the work may end between two questions
        failed = done and doing.exception() is not None
        someone_works, someone_failed = collectives.reduce_numbers((not done, failed), group)
        if not someone_works or someone_failed:
            return doing.result()
        wait([doing], timeout=seconds)
        seconds = min(2 * seconds, 5.0)


def _find_weights(config: Config, mesh: Mesh) -> Root | None:
    """The folder of `checkpoint.load`, on this machine or behind a URL; all ranks have the same, or all fail."""
    load, folder = config.checkpoint.load, Path()
    if load is None:
        return None
    with raised_on_every_rank(mesh.world):
        if mesh.world.rank == 0:
            load = newest_of(load)
            if hub.is_url(load):
                require_checkpoint(Root.of(load))
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


@contextmanager
def raised_on_every_rank(group: Group) -> Iterator[None]:
    """Let every rank raise the problems of a ConfigError that the body raises on any rank. Collective."""
    problems: list[str] = []
    try:
        yield
    except ConfigError as error:
        problems = error.problems
    agree(problems, group)


def _open_folder(
    config: Config, run_path: Path, mesh: Mesh, weights: Root | None, tokenizer: Path | None
) -> tuple[Folder, Companions]:
    """Rank 0 makes the folder, or opens that of an earlier run; all ranks have the same, or all fail.

    Only rank 0 has what lies beside the weights.
    """
    folder: Folder | None = None
    companions = Companions()
    with raised_on_every_rank(mesh.world):
        if mesh.world.rank == 0:
            folder, companions = _open(config, run_path, mesh, weights, tokenizer)
    folder = collectives.broadcast_object(folder, mesh.world)
    assert folder is not None
    output.redirect(mesh.world.rank, folder.directory.log(mesh.world.rank))
    return folder, companions


def _open(
    config: Config, run_path: Path, mesh: Mesh, weights: Root | None, tokenizer: Path | None
) -> tuple[Folder, Companions]:
    directory, resolved = RunDirectory(run_path), config.recorded()
    earlier = earlier_run(directory, config)
    stored, earlier_id = (None, None) if earlier is None else (earlier.config, earlier.id)
    require_trackers(config)
    # Before anything is written: a folder that is refused must not look like that of a run.
    checkpoints = find_checkpoints(config, directory, stored, earlier_id)
    companions = _companions(config, checkpoints, stored, weights, tokenizer)
    directory.create()
    original = checkpoints.original
    run = directory.id(earlier_id if original is None else uuid.uuid4().hex)
    changes = () if earlier is None else tuple(resume_changes(earlier.config, resolved))
    notes = () if earlier is None else earlier.notes
    if original is not None:
        notes += (f"{run_path} is a copy of {original}: it goes on as a run of its own, with another id",)
    batch = None if earlier is None else kept_batch_note(earlier.config, config)
    began = tuple(event.get("steps_before") or 0 for event in directory.events("start"))
    folder = Folder(directory, run, directory.key(), checkpoints, changes, notes, batch, began)
    folder.require_room(config, checkpoint_bytes(config, mesh.device.type != "cpu"))
    directory.set_results_aside()
    directory.write_config(dump_yaml(resolved))
    directory.write_environment(versions(), [devices.name(mesh.device)], cpu_count())
    directory.mark_latest()
    try:
        take(checkpoints.root, Owner.here(run, directory.path))
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
    """What lies beside the weights: on a resume that of the newest checkpoint, as the first source may be gone.

    A place that `checkpoint.companions` names anew counts before the checkpoint.
    """
    before = None if stored is None else stored.get("checkpoint", {}).get("companions")
    if config.checkpoint.companions == before:
        for candidate in checkpoints.candidates:
            with suppress(ConfigError, StoreError):
                return resumed_companions(candidate.folder, tokenizer)
    return find_companions(config, weights, tokenizer)


def versions() -> Mapping[str, str]:
    """The versions of the packages that decide what a run computes and writes."""
    packages = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "pydantic")
    return {"shardwise": __version__} | {package: importlib.metadata.version(package) for package in packages}


class FollowedFolder:
    """A run's folder as it is when the object is made, whatever its name is later.

    Attributes:
        renamed_to: where the folder is since it was renamed last; None where it was not renamed.
        taken: where the folder is, and a text for the user, once something else has its old name; else None.
    """

    def __init__(self, path: Path) -> None:
        self.renamed_to: Path | None = None
        self.taken: tuple[Path, str] | None = None
        self._path = path.absolute()
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def follow(self) -> None:
        """Leave a link of the old name if the folder was renamed since the last call.

        Raises:
            RunError: it is not found, or something else has its name; for a name that is taken, once.
        """
        status = os.fstat(self._descriptor)
        try:
            if os.path.samestat(status, self._path.stat()):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return  # a network disk may be away for a moment
        place = next((path for path in self._candidates() if _is_at(status, path)), None)
        if place is None:
            raise RunError(
                f"the run's folder ({self._path}) was removed or moved to another disk while the run trained: start "
                "again with --run-dir and the folder that has its last checkpoint"
            )
        try:
            if self._path.is_symlink():
                self._path.unlink()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.symlink_to(place, target_is_directory=True)
        except OSError as error:
            text = (
                f"the run's folder ({self._path}) was renamed to {place} while the run trained, and a link of the old "
                f"name cannot be made ({reason_of(error)}): start again with --run-dir {place}"
            )
            self.taken, self._path = (place, text), place
            raise RunError(text) from None
        self.renamed_to = place

    def _candidates(self) -> Iterator[Path]:
        """Where the folder may be: as this machine knows, or beside its old place if another machine renamed it."""
        yield Path(f"/proc/self/fd/{self._descriptor}").readlink()
        if self._path.parent.is_dir():
            yield from self._path.parent.iterdir()


def _is_at(status: os.stat_result, path: Path) -> bool:
    """Whether a path leads to a file, and not through a link."""
    try:
        return os.path.samestat(status, path.lstat())
    except OSError:
        return False


_FOLDER = "the run's folder"
_SHOWN = 5
"""Differences, and ranks of each, that are told."""


def require_same(config: Config, mesh: Mesh, run_path: Path | None = None) -> None:
    """Compare versions, the configuration and the run's folder of all ranks with rank 0's. Collective.

    Args:
        run_path: None: that of rank 0, whatever it is.

    Raises:
        ConfigError: on every rank, with what differs and on which ranks.
    """
    software = {"Python": platform.python_version()} | {name: versions()[name] for name in ("torch", "shardwise")}
    own = software | by_dotted_key(config.model_dump(mode="json"))
    first = collectives.broadcast_object(own | {_FOLDER: None if run_path is None else str(run_path)}, mesh.world)
    folder = first[_FOLDER]
    alike = run_path is None or (folder is not None and Path(folder).resolve() == run_path.resolve())
    own[_FOLDER] = folder if alike else str(run_path)
    _require_equal(own, first, mesh.world)


def require_same_run_dir(run_dir: Path | None, timeout: float) -> None:
    """Join the job, and compare the folder that each rank was given with rank 0's; None: it was given none.

    Collective; `timeout`: as of `join`.

    Raises:
        ConfigError: on every rank, with the folders and the ranks.
    """
    join(timeout=timeout)
    world = Group.world()
    require_equal({"run_dir": None if run_dir is None else str(run_dir.absolute())}, world, places=("run_dir",))


def require_equal(own: Mapping[str, Any], world: Group, places: Sequence[str] = ()) -> None:
    """Raise ConfigError on every rank, with what differs, where any rank's values are not the first rank's. Collective.

    Args:
        own: the values of this rank, by name.
        world: the ranks.
        places: names of absolute paths, which are compared without symbolic links.
    """
    first = collectives.broadcast_object(own, world)
    given = dict(own)
    for name in places:
        if first[name] and given[name] and Path(first[name]).resolve() == Path(given[name]).resolve():
            given[name] = first[name]
    _require_equal(given, first, world)


def _require_equal(own: Mapping[str, Any], first: Mapping[str, Any], world: Group) -> None:
    """Raise ConfigError on every rank, with what differs, where any rank's values are not those of the first."""
    other = [(name, first.get(name), own.get(name)) for name in {**first, **own} if first.get(name) != own.get(name)]
    if not collectives.any_rank(bool(other), world):
        return
    everywhere = collectives.all_gather_objects(other, world)
    ranks: dict[str, list[int]] = {}
    for rank, differences in enumerate(everywhere):
        for name, there, here in differences:
            ranks.setdefault(f"{name} must be the same on all ranks: {there} on rank 0, and {here}", []).append(rank)
    told = [f"{text} on {_named(of)}" for text, of in ranks.items()]
    more = [f"{len(told) - _SHOWN} more differ"] if len(told) > _SHOWN else []
    raise ConfigError([*told[:_SHOWN], *more])


def _named(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listing(ranks, most=_SHOWN)}"
