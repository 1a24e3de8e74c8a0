"""The folders of checkpoints: those in a run's folder, those that may be removed, and those that a path stands for.

run.json                   the run that saves here (`run_identity.py`)
step-00000100/             a checkpoint, complete where it has a manifest
.step-00000200.partial/    a save that runs or was killed, complete where it has a manifest
step-00000300.abandoned/   set aside when the run went back to an earlier step; no longer the run's
step-00000400.damaged/     set aside because it is damaged, when the run continued from an older one

The path or URL of a user leads to

checkpoint_folder    a checkpoint, or the folder of checkpoints that a run's folder stands for
weights_folder       the newest intact checkpoint there, or a folder of weights
load_location        the value of `checkpoint.load` with the newest intact checkpoint in place of a run's folder
companions_folder    the folder or file of `checkpoint.companions`
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import ConfigError, DamageError, StoreError, see
from shardwise.base.files import MOST_BYTES, user_path
from shardwise.base.hub import FOUND, find_on_hub
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.format.weight_files import has_weights, place_of_weights
from shardwise.checkpoint.storage.chunks import require_length
from shardwise.checkpoint.storage.root import Root, answering_root, is_url

_STEP = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"\.step-(\d{8,18})\.partial")
_SET_ASIDE = re.compile(r"step-(\d{8,18})\.(abandoned|damaged)(-\d+)?")


@dataclass(frozen=True)
class StepFolder:
    """A folder that has the name of a checkpoint."""

    step: int  # updates done
    folder: Root
    problem: str | None  # why it is not intact, as far as the manifest and the lengths of files show; None where it is
    bytes: int = 0  # length of all files in the folder
    manifest: Manifest | None = None  # the manifest; None where it cannot be used
    incomplete: bool = False  # there is no manifest, so the save was not completed
    # The problem is no damage: the store gave no answer, or this version cannot use the manifest.
    unreadable: bool = False


def remove_checkpoint(folder: Root) -> None:
    """Remove a checkpoint, its manifest first: what a crash leaves behind is then no checkpoint."""
    (folder / MANIFEST).remove()
    folder.remove()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a checkpoint's folder; None for another name."""
    # `step-000000100` would be a second name of step 100.
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def partial_name(step: int) -> str:
    """The name of the folder in which a checkpoint is written before it gets its own."""
    return f".{step_name(step)}.partial"


def put_checkpoint_in_place(partial: Root, final: Root) -> None:
    """Give a complete checkpoint its name; another one of that name is removed.

    At every moment one of the two is complete, and `summarize_checkpoints` finds it, so a crash loses nothing.
    """
    # Between these lines the save lacks only its name, and is found under that of the partial folder.
    remove_checkpoint(final)
    partial.rename(final, last=MANIFEST)


def summarize_checkpoint(folder: Root, step: int | None = None) -> StepFolder:
    """The `StepFolder` of one checkpoint, by its manifest and the sizes of its files."""
    lengths: dict[str, int] = {}
    manifest: Manifest | None = None
    problem: str | None = None
    is_incomplete = False
    is_unreadable = False
    try:
        lengths = folder.files()
        manifest = Manifest.read(folder)
        if step is None:
            step = manifest.step
        for entry in manifest.files:
            require_length(folder / entry.path, entry, lengths.get(entry.path))
        require_step(manifest, folder, step)
    except StoreError as error:
        is_incomplete = error.missing
        is_unreadable = not error.is_damage
        problem = _without_manifest(folder) if error.missing else str(error)
    return StepFolder(
        step or 0, folder, problem, sum(lengths.values()), manifest, incomplete=is_incomplete, unreadable=is_unreadable
    )


def require_step(manifest: Manifest, folder: Root, step: int) -> None:
    """Raise DamageError where a manifest is of another step than its folder."""
    if manifest.step != step:
        raise DamageError(f"{folder / MANIFEST} is of step {manifest.step}, and its folder of step {step}")


def list_checkpoints(root: Root) -> Iterator[StepFolder]:
    """Yield the `StepFolder` of each checkpoint, newest first. A large manifest takes seconds: it is read when needed.

    Saves that were not finished locally, and checkpoints that were set aside, are left out.
    """
    return (summarize_checkpoint(root / step_name(step), step) for step in checkpoint_steps(root))


def summarize_checkpoints(root: Root) -> list[StepFolder]:
    """A `StepFolder` for each checkpoint in a folder, newest first. No manifest is read, so damage is not found.

    A save that lacks only its name is among them where its step has no complete checkpoint; it gets its name by
    `put_checkpoint_in_place` before it is used.
    """
    # A killed `put_checkpoint_in_place` has removed the old manifest: then the partial folder is the complete one.
    present: dict[int, StepFolder] = {}
    for step in checkpoint_steps(root):
        folder = root / step_name(step)
        is_complete = (folder / MANIFEST).exists()
        problem = None if is_complete else _without_manifest(folder)
        present[step] = StepFolder(step, folder, problem, incomplete=not is_complete)
    for step, partial in _partials(root):
        has_checkpoint = step in present and not present[step].incomplete
        if not has_checkpoint and (partial / MANIFEST).exists():
            present[step] = StepFolder(step, partial, None)
    return [present[step] for step in sorted(present, reverse=True)]


def _without_manifest(folder: Root) -> str:
    return f"{folder} has no {MANIFEST}: it was not completed"


def checkpoint_steps(root: Root) -> list[int]:
    """The steps of the folders that are named as checkpoints, newest first."""
    return sorted((step for name in root.names() if (step := parse_step(name)) is not None), reverse=True)


def abandoned_checkpoints(root: Root) -> list[Root]:
    """The checkpoints of a folder that were set aside."""
    return [root / name for name in root.names() if _SET_ASIDE.fullmatch(name)]


def abandon_checkpoint(root: Root, step: int, *, damaged: bool = False) -> Root:
    """Set a checkpoint aside: it is no longer the run's, and stays until the user removes it."""
    # The user may go back to the same step several times: each folder that was set aside keeps its name.
    first = f"{step_name(step)}.{'damaged' if damaged else 'abandoned'}"
    taken = set(root.names())
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    (root / step_name(step)).rename(root / name)
    root.sync()
    return root / name


def link_checkpoint(source: Root, target: Path) -> None:
    """Make a checkpoint's folder of hard links to the files of another, or of copies where links cannot be.

    Files of checkpoints are never written again, and a file stays until its last link is removed.

    Raises:
        StoreError, OSError: a file cannot be read or written.
    """
    for path in source.files():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if source.is_local:
            with contextlib.suppress(OSError):
                os.link((source / path).local(), file)
                continue
        with source.store_errors("read"):
            source.fs.get_file((source / path).path, str(file))


def removable_folders(
    root: Root, keep: int | None, keep_every: int | None = None
) -> tuple[list[StepFolder], list[Root]]:
    """The checkpoints that a prune removes, and the folders that killed saves left; nothing is removed here.

    The newest `keep` intact checkpoints stay (None: all; never fewer than one), and those whose step is a multiple of
    `keep_every`. A folder that is newer than the newest intact one may be a save under way, and stays. One that could
    not be read may be intact, and stays.
    """
    # A user who prunes by hand may wait for all manifests to be read: what is removed cannot come back.
    present = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(root)}
    intact = [step for step, checkpoint in present.items() if checkpoint.problem is None]
    if not intact:
        return [], []
    readable = [step for step, checkpoint in present.items() if not checkpoint.unreadable]
    steps_to_remove = _steps_to_remove(readable, intact, keep, keep_every)
    return [present[step] for step in steps_to_remove], _leftovers(root, intact[0])


def prune_checkpoints(
    root: Root, saved: Mapping[int, Mapping[str, int]], keep: int | None, keep_every: int | None = None
) -> list[int]:
    """Remove, after a save, what `removable_folders` would; returns the steps of the removed checkpoints, newest first.

    No manifest is read, because that of a thousand ranks takes seconds. The newest checkpoint in `saved` has just been
    completed. Another one counts as intact where it has a manifest and its files in `saved` have their lengths.

    Args:
        saved: step → path → bytes, of the files of checkpoints that this process has written.
        keep, keep_every: as in `removable_folders`.
    """
    # Whole files are not read again: lengths show what a crash of a machine leaves behind.
    newest = max(saved)
    present = checkpoint_steps(root)
    intact = [newest]
    for step in present:
        if keep is not None and len(intact) < keep and step < newest:
            lengths = (root / step_name(step)).files()
            if lengths.get(MANIFEST) and saved.get(step, {}).items() <= lengths.items():
                intact.append(step)
    removed = _steps_to_remove(present, intact, keep, keep_every)
    for folder in [*(root / step_name(step) for step in removed), *_leftovers(root, newest)]:
        remove_checkpoint(folder)
    return removed


def _steps_to_remove(
    steps: Sequence[int], intact: Sequence[int], keep: int | None, keep_every: int | None
) -> list[int]:
    """The steps to remove, as `removable_folders` says; `intact`: steps known to be so. All lists are newest first."""
    if keep is None:
        return []
    kept = intact[: max(keep, 1)]
    return [
        step for step in steps if step <= intact[0] and step not in kept and not (keep_every and step % keep_every == 0)
    ]


def _leftovers(root: Root, newest: int) -> list[Root]:
    return [partial for step, partial in _partials(root) if step <= newest]


def _partials(root: Root) -> list[tuple[int, Root]]:
    return [(int(match[1]), root / name) for name in root.names() if (match := _PARTIAL.fullmatch(name))]


LATEST = "runs/latest"
_RUN_CONFIG = "config.yaml"
_CHECKPOINTS = "checkpoints"
_MODEL_CONFIG = "config.json"


@dataclass(frozen=True)
class NamedFolder:
    """Storage that a user named: one checkpoint, or a folder of checkpoints or of weights."""

    root: Root
    is_checkpoint: bool  # True for one checkpoint; False for a folder of checkpoints or of weights
    location: str  # path or URL that `root` is made of; it may contain a password, so it must not be shown

    def checkpoints(self) -> list[StepFolder]:
        """The checkpoints in the folder, newest first; of a checkpoint itself, this one."""
        return [summarize_checkpoint(self.root)] if self.is_checkpoint else list(list_checkpoints(self.root))


def checkpoint_folder(location: str) -> NamedFolder:
    """The checkpoint or the folder of checkpoints at a path or URL; ConfigError if there is neither."""
    root = answering_root(location)
    if not root.exists():
        hint = ": no run was started in this folder, name a run's" if location == LATEST else ""
        raise ConfigError(f"{root} must be a checkpoint or a run's folder: there is nothing of that name{hint}")
    if not root.is_folder():
        raise ConfigError(f"{root} must be a checkpoint's or a run's folder: it is a file")
    names = root.names()
    if MANIFEST in names:
        return NamedFolder(root, True, location)
    if parse_step(root.name) is not None:
        raise ConfigError(
            f"{root} is no checkpoint: it has no {MANIFEST}, so it was not completed{see('checkpoints#not-completed')}"
        )
    # A run that saves elsewhere may still have an old folder of checkpoints: its `checkpoint.path` counts.
    if _RUN_CONFIG in names and (path := _checkpoint_path(root)):
        return NamedFolder(answering_root(path), False, path)
    if _CHECKPOINTS in names:
        return NamedFolder(root / _CHECKPOINTS, False, f"{location.rstrip('/')}/{_CHECKPOINTS}")
    if any(parse_step(name) is not None for name in names):
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
    # A folder of weights may hold checkpoints too, of a run that continued from them.
    # A folder with a step's name and no manifest is a save that was not completed, whatever files it has.
    may_have_weights = MANIFEST not in names and parse_step(root.name) is None
    has_model = _MODEL_CONFIG in names or has_weights(names)
    has_checkpoints = (
        _CHECKPOINTS in names or _RUN_CONFIG in names or any(parse_step(name) is not None for name in names)
    )
    if may_have_weights and (has_model or not has_checkpoints):
        if not root.exists():
            raise ConfigError(f"{root} must be a folder with weights: there is nothing of that name")
        return NamedFolder(root, False, location)
    folder = checkpoint_folder(location)
    if folder.is_checkpoint:
        return folder
    skipped: list[str] = []
    for checkpoint in list_checkpoints(folder.root):
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
        announce: as in `weights_folder`.
        key: names the place in errors.

    Raises:
        ConfigError: there is none that is intact, or a URL gives no answer or names no checkpoint.
    """
    if not is_url(load) and not user_path(load).is_dir():
        return load
    try:
        folder = weights_folder(load, announce)
    except ConfigError as error:
        raise ConfigError([f"{key}: {problem}" for problem in error.problems]) from None
    except StoreError as error:
        raise ConfigError(f"{key}: {error}") from None
    if is_url(load) and not folder.is_checkpoint:
        raise ConfigError(
            f"{key} ({folder.root}) must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a Hugging "
            "Face folder to this machine first"
        )
    return folder.location


def companions_folder(companions: str) -> Root:
    """Return what `checkpoint.companions` names, of a run the newest intact checkpoint; ConfigError: there is none."""
    if user_path(companions).exists():
        return Root.of(load_location(companions, key="checkpoint.companions"))
    raise ConfigError(
        f"checkpoint.companions ({companions}) must be a Hugging Face folder or its config.json, and there is none of "
        "that name: set it to where they are now, or to a checkpoint of the run"
    )


def loaded_weights_text(load: str, revision: str | None) -> tuple[str, Root | None]:
    """A text on the stored weights that `checkpoint.load` names, and their folder, None on the hub; fetches nothing.

    Raises:
        ConfigError: there are no such weights.
    """
    location = load_location(load)
    if is_url(location):
        return location, Root.of(location)
    place = place_of_weights(location, revision)
    if isinstance(place, Path):
        return location, Root.of(place)
    return f"{location}: {FOUND[find_on_hub(place)]}", None


def _checkpoint_path(run: Root) -> str | None:
    """The `checkpoint.path` of a run's configuration; None where it is not set or cannot be read."""
    try:
        path = parse_yaml((run / _RUN_CONFIG).read(0, MOST_BYTES).decode(), _RUN_CONFIG)["checkpoint"]["path"]
    except (ValueError, KeyError, TypeError):
        return None
    return path if isinstance(path, str) and path else None
