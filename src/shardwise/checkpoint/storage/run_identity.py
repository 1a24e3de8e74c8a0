"""The run that checkpoints belong to, and the run that a folder holds.

`run.json` beside the checkpoints names the run that saves there, so that no other run overwrites them. The folder of a
run has its configuration and id; `earlier_run` rebuilds them from the checkpoints where a file is damaged.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base import files, parsing
from shardwise.base.errors import ConfigError, see
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.storage.checkpoint_folders import step_name, steps, survey
from shardwise.checkpoint.storage.root import Root, StoreError, answering_root
from shardwise.config import Config, parse_yaml, resume_problems
from shardwise.runs.folder import RunDirectory, RunLock

OWNER = "run.json"


@dataclass(frozen=True)
class Owner:
    """A run: its id, and the folder and machine where it was last started."""

    id: str
    folder: str
    host: str

    @staticmethod
    def here(run: str, folder: Path) -> Owner:
        return Owner(run, str(folder.resolve()), platform.node())

    @property
    def is_gone(self) -> bool:
        """True if the run has surely ended: it ran on this machine, and no process holds its folder."""
        # A lock that is held on another machine cannot be seen from here.
        return self.host == platform.node() and not RunLock.is_held(Path(self.folder))


def owner(root: Root) -> Owner | None:
    """The run that saves there; None where `run.json` is missing or damaged.

    Raises:
        StoreError: the place cannot be read.
    """
    if OWNER not in root.names():
        return None
    try:
        return parsing.instance(Owner, parsing.record_of((root / OWNER).read(0, files.MOST_BYTES)))
    except ValueError:
        return None


def original_of(root: Root, run: str | None, folder: Path) -> Path | None:
    """The folder that `folder` is a copy of, as the place of its checkpoints tells; None where it is no copy.

    A copy has the same id, and the folder that last saved there is still there and has it too.

    Args:
        root: the place of the checkpoints, or a copy of it.
        run: id of the run in `folder`.
        folder: folder of the run that is to save there.

    Raises:
        StoreError: the place cannot be read.
    """
    last_owner = owner(root)
    if last_owner is None or last_owner.id != run:
        return None
    former_folder = Path(last_owner.folder)
    if RunDirectory(former_folder).stored_id() != run or former_folder.samefile(folder):
        return None
    return former_folder


def is_inside(root: Root, folder: Path) -> bool:
    """True if a place lies in a run's folder: its checkpoints were saved by this run, or copied with it."""
    return root.is_local and root.local().resolve().is_relative_to(folder.resolve())


def require_ownership(root: Root, run: str | None, *, is_empty: bool) -> None:
    """Raise ConfigError where the place belongs to another run, unless that run has ended and saved nothing.

    Args:
        root: the place of the checkpoints.
        run: id of the run that is to save there; None where it has none yet.
        is_empty: the place holds no checkpoints.
    """
    last_owner = owner(root)
    if last_owner is None or last_owner.id == run or (is_empty and last_owner.is_gone):
        return
    raise ConfigError(
        f"checkpoint.path ({root}) must be a run's own, and it is that of {last_owner.folder} on {last_owner.host}: "
        f"choose another checkpoint.path, give --run-dir that folder to continue it, or remove {root / OWNER} if that "
        "run is gone or this place is a copy of its own"
        f"{see('checkpoints#place-of-another-run')}"
    )


def record_owner(root: Root, run: Owner) -> None:
    """Record that the place belongs to this run.

    Raises:
        StoreError: it cannot be written.
    """
    if owner(root) != run:
        root.make()
        (root / OWNER).write(json.dumps(asdict(run)).encode())


@dataclass(frozen=True)
class EarlierRun:
    """The run that a folder holds.

    Attributes:
        config: resolved configuration.
        id: id of the run; None where it has none yet.
        notes: sentences for the user, on files that were rebuilt.
    """

    config: Mapping[str, Any]
    id: str | None
    notes: tuple[str, ...] = ()


def earlier_run(directory: RunDirectory, config: Config) -> EarlierRun | None:
    """The run in `directory` that `config` continues; None where none was started, or it took no step.

    A run that took steps can only be continued with the same model and data. Where `config.yaml` is damaged, they are
    read from its checkpoints, which have checksums.

    Raises:
        ConfigError: `config` cannot continue it, or its configuration is lost.
    """
    if not directory.holds_run:
        return None
    stored, problems = _stored(directory, config)
    # A damaged file cannot say where its run saved, so the place is that of `config`.
    root = Root.of(config.checkpoint.path or directory.checkpoints)
    notes: list[str] = []
    if stored is None or problems:
        # A file that contradicts `config` may be damaged: the newest checkpoint, which has checksums, decides.
        manifest = next(_manifests(root), None)
        if manifest is None:
            if stored is None or _took_steps(directory, root, stored):
                raise ConfigError(problems)
            return None
        manifest_problems = resume_problems(manifest.config, config.recorded(), config.changeable)
        if manifest_problems:
            raise ConfigError(manifest_problems if stored is None else problems)
        stored = manifest.config
        is_present = directory.config.exists()
        state = "is damaged, and is kept under a number" if is_present else "is missing"
        notes.append(
            f"{directory.config} {state}: the configuration was taken from the checkpoint of step {manifest.step:,}"
        )
    run = directory.stored_id()
    if run is None:
        run = _rebuilt_id(directory, root)
        if run is not None:
            state = "is damaged" if directory.identity.exists() else "is missing"
            notes.append(f"{directory.identity} {state}: the run's id was taken from its checkpoints")
    return EarlierRun(stored, run, tuple(notes))


def continued_checkpoint(config: Config, run_path: Path | None) -> Root | None:
    """The newest checkpoint that the run in a folder has, by its names; it has the weights and the tokenizer.

    Args:
        run_path: the folder of a run; None where it is to be made.

    Raises:
        ConfigError: the folder, or the place of the checkpoints, cannot be read.
    """
    if run_path is None or not RunDirectory(run_path).holds_run:
        return None
    try:
        saved = survey(answering_root(config.checkpoint.path or RunDirectory(run_path).checkpoints))
    except StoreError as error:
        raise ConfigError(f"checkpoint.path: {error}" if config.checkpoint.path is not None else str(error)) from None
    return next((checkpoint.folder for checkpoint in saved if checkpoint.problem is None), None)


def _stored(directory: RunDirectory, config: Config) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The configuration in `config.yaml`, None where it cannot be read; and the reasons against continuing the run."""
    try:
        stored = parse_yaml(files.read_plain(directory.config).decode(), str(directory.config))
        if isinstance(stored, dict):
            return stored, resume_problems(stored, config.recorded(), config.changeable)
        reason = "it holds no configuration"
    except ConfigError as error:
        return None, error.problems
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    return None, [
        f"--run-dir ({directory.path}) holds a run whose {directory.config.name} cannot be read ({reason}): choose "
        "another folder"
    ]


def _manifests(root: Root) -> Iterator[Manifest]:
    """The manifests of the checkpoints that can be read, the newest first."""
    with contextlib.suppress(StoreError):
        for step in steps(root):
            with contextlib.suppress(StoreError):
                yield Manifest.read(root / step_name(step))


def _took_steps(directory: RunDirectory, root: Root, stored: Mapping[str, Any]) -> bool:
    """True if the run trained, judging by its events, its results and the folders of its checkpoints."""
    has_events = any(next(directory.events(event), None) for event in ("step", "checkpoint"))
    if has_events or directory.results.exists():
        return True
    section = stored.get("checkpoint")
    path = section.get("path") if isinstance(section, dict) else None
    try:
        return any(steps(place) for place in (root, Root.of(path or directory.checkpoints)))
    # It may have taken some, and its checkpoints must not be lost.
    except (StoreError, ConfigError):
        return True


def _rebuilt_id(directory: RunDirectory, root: Root) -> str | None:
    """The id that the run had, from `run.json` beside its checkpoints, unless they may be another run's.

    Checkpoints inside the run's folder are its own. At another place they are its own where `run.json` names this
    folder and the run has lost its id; a new run in a folder of that name has never had one.
    """
    last_owner = owner(root)
    if last_owner is None:
        return None
    path = directory.path.resolve()
    has_lost_id = directory.identity.exists() and last_owner.folder == str(path)
    return last_owner.id if has_lost_id or is_inside(root, path) else None
