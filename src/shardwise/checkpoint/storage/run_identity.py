"""The run that checkpoints belong to, and the run that a folder holds.

`run.json` beside the checkpoints names the run that saves there, so that no other run overwrites them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base import files
from shardwise.base.errors import ConfigError, StoreError, see
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.checkpoint.storage.checkpoint_folders import checkpoint_steps, summarize_checkpoints
from shardwise.checkpoint.storage.root import Root, answering_root
from shardwise.config import CheckpointConfig, Config, resume_problems
from shardwise.runs.folder import RunDirectory, RunLock
from shardwise.runs.json_records import record_instance, record_of_json

OWNER = "run.json"


@dataclass(frozen=True)
class RunOwner:
    """The run that owns a place of checkpoints: its id, and the folder and machine where it was last started."""

    id: str
    folder: str
    host: str

    @staticmethod
    def here(run: str, folder: Path) -> RunOwner:
        return RunOwner(run, str(folder.resolve()), platform.node())


def run_owner(root: Root) -> RunOwner | None:
    """The run that saves in a place; None where its `run.json` is missing or damaged; StoreError: it cannot be read."""
    if OWNER not in root.names():
        return None
    try:
        return record_instance(RunOwner, record_of_json((root / OWNER).read(0, files.MOST_BYTES)))
    except ValueError:
        return None


def require_ownership(root: Root, run: str | None, folder: Path, *, is_empty: bool) -> None:
    """Refuse a place of checkpoints of another run, unless that has ended and saved nothing; and the copy of a run.

    Checkpoints in the run's own folder are its own. A copy has the id of its original, whose folder is still there.

    Args:
        run: id of the run that is to save there; None where it has none yet.
        is_empty: the place holds no checkpoints.

    Raises:
        ConfigError: it is another run's, or the run is a copy. StoreError: the place cannot be read.
    """
    last_owner = run_owner(root)
    if last_owner is None:
        return
    if last_owner.id == run:
        original = Path(last_owner.folder)
        if RunDirectory(original).stored_id() == run and not original.samefile(folder):
            raise ConfigError(
                f"--run-dir ({folder}) must be a run's own folder, and it is a copy of {original}: continue the run "
                f"there, or begin another from its checkpoints by `shardwise branch {original}`"
            )
        return
    is_inside = root.is_local and root.local().resolve().is_relative_to(folder.resolve())
    # A lock that is held on another machine cannot be seen from here: that run may not have ended.
    was_here = last_owner.host == platform.node()
    if is_inside or (is_empty and was_here and not RunLock.is_held(Path(last_owner.folder))):
        return
    raise ConfigError(
        f"checkpoint.path ({root}) must be a run's own, and it is that of {last_owner.folder} on {last_owner.host}: "
        f"choose another checkpoint.path, give --run-dir that folder to continue it, or remove {root / OWNER} if that "
        "run is gone or this place is a copy of its own"
        f"{see('checkpoints#place-of-another-run')}"
    )


def record_owner(root: Root, run: RunOwner) -> None:
    """Record that the place of checkpoints belongs to this run; StoreError if it cannot be written."""
    if run_owner(root) != run:
        root.make()
        (root / OWNER).write(json.dumps(asdict(run)).encode())


def earlier_run(directory: RunDirectory, config: Config) -> Mapping[str, Any] | None:
    """The stored configuration that identifies the run which `config` continues in `directory`; None: none took a step.

    A run that took steps can only be continued with the same model and data.

    Raises:
        ConfigError: `config` cannot continue it, or its configuration cannot be read.
    """
    if not directory.holds_run:
        return None
    try:
        stored = parse_yaml(files.read_plain(directory.config).decode(), str(directory.config))
        reason = "" if isinstance(stored, dict) else "it holds no configuration"
    except ConfigError as error:
        reason = "; ".join(error.problems)
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    if reason:
        raise ConfigError(
            f"--run-dir ({directory.path}) holds a run whose {directory.config.name} cannot be read ({reason}): put a "
            "copy of it back, or choose another folder, with checkpoint.load for the weights"
        )
    problems = resume_problems(stored, config.recorded(), config.changeable)
    if problems and _took_steps(directory, stored):
        raise ConfigError(problems)
    return None if problems else stored


def continued_checkpoint(checkpoint: CheckpointConfig, run_path: Path | None) -> Root | None:
    """The newest checkpoint of the run that is continued in a folder, by names; it has weights and tokenizer.

    Args:
        run_path: the folder of a run; None where it is to be made.

    Raises:
        ConfigError: the folder, or the place of the checkpoints, cannot be read.
    """
    if run_path is None or not RunDirectory(run_path).holds_run:
        return None
    try:
        saved = summarize_checkpoints(answering_root(checkpoint.path or RunDirectory(run_path).checkpoints))
    except StoreError as error:
        raise ConfigError(f"checkpoint.path: {error}" if checkpoint.path is not None else str(error)) from None
    return next((step.folder for step in saved if step.problem is None), None)


def _took_steps(directory: RunDirectory, stored: Mapping[str, Any]) -> bool:
    has_events = any(next(directory.events(event), None) for event in ("step", "checkpoint"))
    if has_events or directory.results.exists():
        return True
    section = stored.get("checkpoint")
    path = section.get("path") if isinstance(section, dict) else None
    try:
        return bool(checkpoint_steps(Root.of(path or directory.checkpoints)))
    # It may have taken some, and its checkpoints must not be lost.
    except (StoreError, ConfigError):
        return True
