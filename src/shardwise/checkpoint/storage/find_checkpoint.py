"""From a path or URL of the user to a folder: one checkpoint, a folder of checkpoints, or weights of another program.

checkpoint_folder    a checkpoint, or the folder of checkpoints that a run's folder stands for
weights_folder       the newest intact checkpoint there, or a folder of weights
load_location        the value of `checkpoint.load` with the newest intact checkpoint in place of a run's folder
companions_folder    the folder or file of `checkpoint.companions`
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import MOST_BYTES
from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.storage.root import Root, StoreError, answering_root
from shardwise.checkpoint.storage.step_folders import StepFolder, checkpoints, glance, step_of
from shardwise.data.hub import FOUND, INDEX, SINGLE, find, is_url, place_of_weights

LATEST = "runs/latest"
_RUN_CONFIG = "config.yaml"
_CHECKPOINTS = "checkpoints"
_MODEL_CONFIG = "config.json"


@dataclass(frozen=True)
class NamedFolder:
    """A folder that the user named.

    Attributes:
        root: the folder.
        is_checkpoint: True for one checkpoint; False for a folder of checkpoints or of weights.
        location: path or URL that `root` is made of; it may contain a password, so it must not be shown.
    """

    root: Root
    is_checkpoint: bool
    location: str

    def checkpoints(self) -> list[StepFolder]:
        """The checkpoints in the folder, newest first; of a checkpoint itself, this one."""
        return [glance(self.root)] if self.is_checkpoint else list(checkpoints(self.root))


def checkpoint_folder(location: str) -> NamedFolder:
    """The checkpoint or the folder of checkpoints at a path or URL.

    Raises:
        ConfigError: there is neither. StoreError: it cannot be read.
    """
    root = answering_root(location)
    if not root.exists():
        hint = ": no run was started in this folder, name a run's" if location == LATEST else ""
        raise ConfigError(f"{root} must be a checkpoint or a run's folder: there is nothing of that name{hint}")
    if not root.is_folder():
        raise ConfigError(f"{root} must be a checkpoint's or a run's folder: it is a file")
    names = root.names()
    if MANIFEST in names:
        return NamedFolder(root, True, location)
    if step_of(root.name) is not None:
        raise ConfigError(
            f"{root} is no checkpoint: it has no {MANIFEST}, so it was not completed{see('checkpoints#not-completed')}"
        )
    # A run that saves elsewhere may still have an old folder of checkpoints: its `checkpoint.path` counts.
    if _RUN_CONFIG in names and (path := _checkpoint_path(root)):
        return NamedFolder(answering_root(path), False, path)
    if _CHECKPOINTS in names:
        return NamedFolder(root / _CHECKPOINTS, False, f"{location.rstrip('/')}/{_CHECKPOINTS}")
    if any(step_of(name) is not None for name in names):
        return NamedFolder(root, False, location)
    kind = "a run without checkpoints so far" if _RUN_CONFIG in names else "neither"
    raise ConfigError(f"{root} must be a checkpoint (with {MANIFEST}) or a run's folder: it is {kind}")


def weights_folder(location: str, announce: Callable[[str], None] | None) -> NamedFolder:
    """The checkpoint at a path or URL, or the newest intact one in a folder; a folder of weights stays what it is.

    `announce` is called with one line where newer checkpoints are skipped, which says why.

    Raises:
        ConfigError: there is nothing of that name, or no intact checkpoint. StoreError: it cannot be read.
    """
    root = answering_root(location)
    names = root.names()
    # A folder of weights may hold checkpoints too, of a run that continued from them: its config.json decides.
    may_have_weights = MANIFEST not in names and step_of(root.name) is None
    if may_have_weights and (_MODEL_CONFIG in names or not _holds_checkpoints(names)):
        if not root.exists():
            raise ConfigError(f"{root} must be a folder with weights: there is nothing of that name")
        return NamedFolder(root, False, location)
    folder = checkpoint_folder(location)
    if folder.is_checkpoint:
        return folder
    skipped: list[str] = []
    for checkpoint in checkpoints(folder.root):
        if checkpoint.problem is None:
            if skipped and announce is not None:
                announce(f"taking {checkpoint.folder}, the newest intact one: {'; '.join(skipped)}")
            return NamedFolder(checkpoint.folder, True, f"{folder.location.rstrip('/')}/{checkpoint.folder.name}")
        skipped.append(checkpoint.problem)
    raise ConfigError([f"{folder.root} holds no {'intact checkpoint' if skipped else 'checkpoint yet'}", *skipped])


def load_location(load: str, announce: Callable[[str], None] | None = None, *, key: str = "checkpoint.load") -> str:
    """The path, URL or hub id to load from: `load`, or the newest intact checkpoint of a run's or checkpoints' folder.

    Behind a URL only a checkpoint can be loaded.

    Args:
        load: value of the key.
        announce: as in `weights_folder`.
        key: names the place in errors.

    Raises:
        ConfigError: there is none that is intact, or a URL gives no answer or names no checkpoint.
    """
    if not is_url(load) and not Path(load).expanduser().is_dir():
        return load
    try:
        root = answering_root(load)
        names = root.names()
        is_one_model = not {MANIFEST, SINGLE, INDEX, _MODEL_CONFIG}.isdisjoint(names)
        if not is_one_model and _holds_checkpoints(names):
            return weights_folder(load, announce).location
    except ConfigError as error:
        raise ConfigError([f"{key}: {problem}" for problem in error.problems]) from None
    except StoreError as error:
        raise ConfigError(f"{key}: {error}") from None
    if is_url(load) and MANIFEST not in names:
        raise ConfigError(
            f"{key} ({root}) must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a Hugging Face "
            "folder to this machine first"
        )
    return load


def companions_folder(companions: str) -> Root:
    """The folder or file that `checkpoint.companions` names, of a run its newest intact checkpoint.

    Raises:
        ConfigError: there is none.
    """
    if Path(companions).expanduser().exists():
        return Root.of(load_location(companions, key="checkpoint.companions"))
    raise ConfigError(
        f"checkpoint.companions ({companions}) must be a Hugging Face folder or its config.json, and there is none of "
        "that name: set it to where they are now, or to a checkpoint of the run"
    )


def glance_at_weights(load: str, revision: str | None) -> tuple[str, Root | None]:
    """A dry run's text on `checkpoint.load`, and the folder of the weights unless it is a hub id; nothing is fetched.

    Raises:
        ConfigError: there are no such weights.
    """
    location = load_location(load)
    if is_url(location):
        return location, Root.of(location)
    place = place_of_weights(location, revision)
    if isinstance(place, Path):
        return location, Root.of(place)
    return f"{location}: {FOUND[find(place)]}", None


def _holds_checkpoints(names: Collection[str]) -> bool:
    """True if a folder with these names is a run's or a folder of checkpoints."""
    return _CHECKPOINTS in names or _RUN_CONFIG in names or any(step_of(name) is not None for name in names)


def _checkpoint_path(run: Root) -> str | None:
    """The `checkpoint.path` of a run's configuration; None where it is not set or cannot be read."""
    from shardwise.base.parsing import yaml_value  # costly to import, for a run's folder alone

    try:
        path = yaml_value((run / _RUN_CONFIG).read(0, MOST_BYTES).decode(), _RUN_CONFIG)["checkpoint"]["path"]
    except (ValueError, KeyError, TypeError):
        return None
    return path if isinstance(path, str) and path else None
