"""The run that a folder holds already: configuration and id, rebuilt from its checkpoints where a file is damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint_format.folders import step_name, steps
from shardwise.checkpoint_format.manifest import Manifest
from shardwise.checkpoint_format.owner import is_inside, owner
from shardwise.config import Config, parse_yaml, resume_problems
from shardwise.errors import ConfigError
from shardwise.files import read_plain
from shardwise.runlog import RunDirectory
from shardwise.storage.root import Root, StoreError


@dataclass(frozen=True)
class EarlierRun:
    """The run that a folder holds.

    Attributes:
        config: as it was resolved.
        id: None where the run has none yet.
        notes: for the user, which files were rebuilt.
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
    root = Root.of(config.checkpoint.path or directory.checkpoints)
    notes: list[str] = []
    if stored is None or problems:
        manifest = next(_manifests(root), None)
        if manifest is None:
            if stored is None or _took_steps(directory, root, stored):
                raise ConfigError(problems)
            return None
        if differing := resume_problems(manifest.config, config.recorded()):
            raise ConfigError(differing if stored is None else problems)
        stored = manifest.config
        state = "is damaged, and is kept under a number" if directory.config.exists() else "is missing"
        notes.append(
            f"{directory.config} {state}: the configuration was taken from the checkpoint of step {manifest.step:,}"
        )
    run = directory.stored_id()
    if run is None and (run := _rebuilt_id(directory, root)) is not None:
        state = "is damaged" if directory.identity.exists() else "is missing"
        notes.append(f"{directory.identity} {state}: the run's id was taken from its checkpoints")
    return EarlierRun(stored, run, tuple(notes))


def _stored(directory: RunDirectory, config: Config) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The configuration in `config.yaml`, None where it cannot be read; and why `config` cannot continue the run."""
    try:
        stored = parse_yaml(read_plain(directory.config).decode(), str(directory.config))
        if isinstance(stored, dict):
            return stored, resume_problems(stored, config.recorded())
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
    """Whether the run trained, judging by its events, its results and the folders of its checkpoints."""
    trained = any(next(directory.events(event), None) for event in ("step", "checkpoint"))
    if trained or directory.results.exists():
        return True
    before = stored.get("checkpoint")
    path = before.get("path") if isinstance(before, dict) else None
    try:
        return any(steps(place) for place in (root, Root.of(path or directory.checkpoints)))
    except (StoreError, ConfigError):
        return True


def _rebuilt_id(directory: RunDirectory, root: Root) -> str | None:
    """The id that the run had, from its checkpoints, unless they may be another run's.

    Checkpoints inside the run's folder are its own. At another place they are its own where `run.json` names this
    folder and the run has lost its id; a new run in a folder of that name has never had one.
    """
    saving, path = owner(root), directory.path.resolve()
    if saving is not None and directory.identity.exists() and saving.folder == str(path):
        return saving.id
    if not is_inside(root, path):
        return None
    if saving is not None:
        return saving.id
    manifest = next(_manifests(root), None)
    run = None if manifest is None else manifest.data.get("run")
    return run if isinstance(run, str) else None
