"""What a path or URL from the user leads to: a checkpoint, a run's folder, or a folder of checkpoints; any storage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import MOST_BYTES
from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.storage.root import Root, StoreError, in_time
from shardwise.checkpoint.storage.step_folders import Found, checkpoints, glance, step_of
from shardwise.data.hub import FOUND, INDEX, SINGLE, find, is_url, place_of_weights

LATEST = "runs/latest"
_CONFIG, _FOLDER, _MODEL = "config.yaml", "checkpoints", "config.json"


@dataclass(frozen=True)
class Place:
    """A folder that the user named.

    Attributes:
        root: the folder.
        single: it is one checkpoint; else a folder of checkpoints or another one.
        location: the path or URL that `root` is made of; it may contain a password, so it must not be shown.
    """

    root: Root
    single: bool
    location: str


def reached(location: str | Path) -> Root:
    """The place of a path or URL, once it has answered.

    Raises:
        ConfigError: the package for this kind of URL is not installed. StoreError: there was no answer in time.
    """
    root = Root.of(location)
    in_time(root, root.exists)
    return root


def locate(location: str) -> Place:
    """The checkpoint or the folder of checkpoints at a path or URL.

    Raises:
        ConfigError: there is neither. StoreError: it cannot be read.
    """
    root = reached(location)
    if not root.exists():
        hint = ": no run was started in this folder, name a run's" if location == LATEST else ""
        raise ConfigError(f"{root} must be a checkpoint or a run's folder: there is nothing of that name{hint}")
    if not root.is_folder():
        raise ConfigError(f"{root} must be a checkpoint's or a run's folder: it is a file")
    names = root.names()
    if MANIFEST in names:
        return Place(root, True, location)
    if step_of(root.name) is not None:
        raise ConfigError(
            f"{root} is no checkpoint: it has no {MANIFEST}, so it was not completed{see('checkpoints#not-completed')}"
        )
    if _CONFIG in names and (configured := _configured(root)):
        return Place(reached(configured), False, configured)
    if _FOLDER in names:
        return Place(root / _FOLDER, False, f"{location.rstrip('/')}/{_FOLDER}")
    if any(step_of(name) is not None for name in names):
        return Place(root, False, location)
    kind = "a run without checkpoints so far" if _CONFIG in names else "neither"
    raise ConfigError(f"{root} must be a checkpoint (with {MANIFEST}) or a run's folder: it is {kind}")


def all_of(place: Place) -> list[Found]:
    """The checkpoints at a place, newest first."""
    return [glance(place.root)] if place.single else list(checkpoints(place.root))


def newest_intact(location: str, announce: Callable[[str], None] | None) -> Place:
    """The checkpoint at a path or URL, or the newest intact one in a folder; a folder of weights stays what it is.

    `announce` is called with one line where newer checkpoints are skipped, which says why.

    Raises:
        ConfigError: there is nothing of that name, or no intact checkpoint. StoreError: it cannot be read.
    """
    root = reached(location)
    names = root.names()
    if MANIFEST not in names and step_of(root.name) is None and (_MODEL in names or not _holds_checkpoints(names)):
        if not root.exists():
            raise ConfigError(f"{root} must be a folder with weights: there is nothing of that name")
        return Place(root, False, location)
    place = locate(location)
    if place.single:
        return place
    skipped: list[str] = []
    for found in checkpoints(place.root):
        if found.problem is None:
            if skipped and announce is not None:
                announce(f"taking {found.folder}, the newest intact one: {'; '.join(skipped)}")
            return Place(found.folder, True, f"{place.location.rstrip('/')}/{found.folder.name}")
        skipped.append(found.problem)
    raise ConfigError([f"{place.root} holds no {'intact checkpoint' if skipped else 'checkpoint yet'}", *skipped])


def newest_of(load: str, announce: Callable[[str], None] | None = None, *, key: str = "checkpoint.load") -> str:
    """The folder to load from: `load`, or the newest intact checkpoint where it is a run's or a checkpoints' folder.

    `key` names the place in errors.

    Raises:
        ConfigError: there is none that is intact, or a URL gives no answer.
    """
    if not is_url(load) and not Path(load).expanduser().is_dir():
        return load
    try:
        names = reached(load).names()
        if {MANIFEST, SINGLE, INDEX, _MODEL} & set(names) or not _holds_checkpoints(names):
            return load
        return newest_intact(load, announce).location
    except ConfigError as error:
        raise ConfigError([f"{key}: {problem}" for problem in error.problems]) from None
    except StoreError as error:
        raise ConfigError(f"{key}: {error}") from None


def require_checkpoint(folder: Root) -> None:
    """Raises ConfigError where the folder that `checkpoint.load` names by a URL is no checkpoint."""
    try:
        if in_time(folder, (folder / MANIFEST).exists):
            return
    except StoreError as error:
        raise ConfigError(f"checkpoint.load: {error}") from None
    raise ConfigError(
        f"checkpoint.load ({folder}) must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a "
        "Hugging Face folder to this machine first"
    )


def glance_at_weights(load: str, revision: str | None) -> tuple[str, Root | None]:
    """A dry run's text on `checkpoint.load`, and the folder of the weights unless it is a hub id; nothing is fetched.

    Raises:
        ConfigError: there are no such weights.
    """
    load = newest_of(load)
    if is_url(load):
        require_checkpoint(Root.of(load))
        return load, Root.of(load)
    place = place_of_weights(load, revision)
    return (load, Root.of(place)) if isinstance(place, Path) else (f"{load}: {FOUND[find(place)]}", None)


def place_of_companions(named: str) -> Root:
    """The folder or file that `checkpoint.companions` names, of a run its newest intact checkpoint.

    Raises:
        ConfigError: there is none.
    """
    if Path(named).expanduser().exists():
        return Root.of(newest_of(named, key="checkpoint.companions"))
    raise ConfigError(
        f"checkpoint.companions ({named}) must be a Hugging Face folder or its config.json, and there is none of that "
        "name: set it to where they are now, or to a checkpoint of the run"
    )


def _holds_checkpoints(names: Collection[str]) -> bool:
    return _FOLDER in names or _CONFIG in names or any(step_of(name) is not None for name in names)


def _configured(run: Root) -> str | None:
    """The run's `checkpoint.path`, if it is set."""
    from shardwise.base.parsing import yaml_value  # costly to import, for a run's folder alone

    try:
        path = yaml_value((run / _CONFIG).read(0, MOST_BYTES).decode(), _CONFIG)["checkpoint"]["path"]
    except (ValueError, KeyError, TypeError):
        return None
    return path if isinstance(path, str) and path else None
