"""The run that a folder holds already: configuration and id, rebuilt from its checkpoints where a file is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint_format.folders import step_name, steps
from shardwise.checkpoint_format.manifest import Manifest
from shardwise.checkpoint_format.owner import owner
from shardwise.config import Config, parse_yaml, resume_problems
from shardwise.errors import ConfigError
from shardwise.runlog import RunDirectory
from shardwise.storage.root import Root, StoreError


@dataclass(frozen=True)
class EarlierRun:
    """The run that a folder holds.

    Attributes:
        config: as it was resolved.
        id: None where the run has none yet.
        notes: for the user, what was rebuilt.
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
    stored, problems = _stored(directory, config)
    if stored is None and not problems:
        return None
    root = Root.of(config.checkpoint.path or directory.checkpoints)
    notes: list[str] = []
    if problems:
        manifest = next(_manifests(root), None)
        if manifest is None:
            if stored is None or _took_steps(directory, root, stored):
                raise ConfigError(problems)
            return None
        kept = resume_problems(manifest.config, config.model_dump(mode="json"))
        if kept:
            raise ConfigError(problems if stored is not None else kept)
        stored = manifest.config
        fate = "is damaged, and is kept under a number" if directory.config.exists() else "is missing"
        notes.append(
            f"{directory.config} {fate}: the configuration was taken from the checkpoint of step {manifest.step:,}"
        )
    assert stored is not None
    run = directory.stored_id()
    if run is None:
        run = _rebuilt_id(directory, root)
        if run is not None:
            fate = "is damaged" if directory.identity.exists() else "is missing"
            notes.append(f"{directory.identity} {fate}: the run's id was taken from its checkpoints")
    return EarlierRun(stored, run, tuple(notes))


def _stored(directory: RunDirectory, config: Config) -> tuple[Mapping[str, Any] | None, list[str]]:
    """What `config.yaml` holds, None where it cannot be read; and why `config` cannot continue the run."""
    if not directory.holds_run:
        return None, []
    try:
        stored = parse_yaml(directory.config.read_text(encoding="utf-8"), str(directory.config))
    except ConfigError as error:
        return None, error.problems
    except (OSError, UnicodeDecodeError) as error:
        return None, [_unreadable(directory, str(error))]
    if not isinstance(stored, dict):
        return None, [_unreadable(directory, "it holds no configuration")]
    return stored, resume_problems(stored, config.model_dump(mode="json"))


def _unreadable(directory: RunDirectory, reason: str) -> str:
    return (
        f"--run-dir ({directory.path}) holds a run whose {directory.config.name} cannot be read ({reason}): choose "
        "another folder"
    )


def _manifests(root: Root) -> Iterator[Manifest]:
    """Those of the checkpoints that can be read, the newest first."""
    try:
        present = steps(root)
    except StoreError:
        return
    for step in present:
        try:
            yield Manifest.read(root / step_name(step))
        except StoreError:
            continue


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
    found = owner(root)
    if found is not None and directory.identity.exists() and found.folder == str(directory.path.resolve()):
        return found.id
    if not root.is_local or not Path(root.local()).resolve().is_relative_to(directory.path.resolve()):
        return None
    manifest = next(_manifests(root), None)
    run = found.id if found is not None else manifest.data.get("run") if manifest is not None else None
    return run if isinstance(run, str) else None
