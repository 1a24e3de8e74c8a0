"""The folder of a run's checkpoints: which exist, which are intact, which may be removed.

run.json                   the run that saves here (`owner.py`)
step-00000100/             a checkpoint, complete where it has a manifest
.step-00000200.partial/    a save under way, or one that was killed: complete where it has a manifest
step-00000300.abandoned/   set aside when the run went back to an earlier step; no longer the run's
step-00000400.damaged/     set aside when the run continued from an older one, because this one is damaged
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.checkpoint_format.manifest import MANIFEST, Manifest
from shardwise.storage.root import DamageError, Root, StoreError

_STEP = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"\.step-(\d{8,18})\.partial")
_ASIDE = re.compile(r"step-(\d{8,18})\.(abandoned|damaged)(-\d+)?")


@dataclass(frozen=True)
class Found:
    """A folder named as a checkpoint.

    Attributes:
        step: updates done.
        folder: where it is.
        problem: why it is not intact, as far as the manifest and the sizes of files show; None where nothing is wrong.
        bytes: length of all files in the folder.
        manifest: None where it cannot be used.
        incomplete: there is no manifest, so the save was not completed.
        unreadable: the problem is no damage: the store gave no answer, or this version cannot use the manifest.
    """

    step: int
    folder: Root
    problem: str | None
    bytes: int = 0
    manifest: Manifest | None = None
    incomplete: bool = False
    unreadable: bool = False


@dataclass(frozen=True)
class Removable:
    """What a prune removes: older checkpoints, and the folders of saves that were killed."""

    checkpoints: tuple[Found, ...]
    leftovers: tuple[Root, ...]

    def remove(self) -> None:
        for found in self.checkpoints:
            remove_checkpoint(found.folder)
        for folder in self.leftovers:
            remove_checkpoint(folder)


def remove_checkpoint(folder: Root) -> None:
    """Remove the manifest first: what a crash leaves behind is then no checkpoint."""
    (folder / MANIFEST).remove()
    folder.remove()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder, None of another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def partial_name(step: int) -> str:
    """Where a save is written before it gets its name."""
    return f".{step_name(step)}.partial"


def put_in_place(partial: Root, final: Root) -> None:
    """Give a complete save its name; a checkpoint that has it goes.

    At every moment one of the two is complete, and `survey` finds it: an end at any point loses neither.
    """
    remove_checkpoint(final)
    partial.rename(final, last=MANIFEST)


def glance(folder: Root, step: int | None = None) -> Found:
    """One checkpoint, by its manifest and the sizes of its files."""
    manifest, problem, files, incomplete, unreadable = None, None, {}, False, False
    try:
        files = folder.files()
        manifest = Manifest.read(folder)
        for entry in manifest.files:
            if entry.path not in files:
                problem = problem or f"{folder / entry.path} is missing"
            elif files[entry.path] != entry.bytes:
                found = f"{files[entry.path]:,} bytes) must be {entry.bytes:,} bytes"
                problem = problem or f"{folder / entry.path} is damaged: its length ({found}"
        if step is not None and problem is None:
            require_step(manifest, folder, step)
    except StoreError as error:
        incomplete, unreadable = error.missing, not is_damage(error)
        problem = _without_manifest(folder) if error.missing else str(error)
    shown = manifest.step if manifest is not None and step is None else step or 0
    return Found(shown, folder, problem, sum(files.values()), manifest, incomplete, unreadable)


def require_step(manifest: Manifest, folder: Root, step: int) -> None:
    """DamageError where a manifest is of another step than its folder."""
    if manifest.step != step:
        raise DamageError(f"{folder / MANIFEST} is of step {manifest.step}, and its folder of step {step}")


def is_damage(error: StoreError) -> bool:
    """Whether what cannot be read is lost: it may be there again where the store only gave no answer."""
    return error.missing or isinstance(error, DamageError)


def checkpoints(root: Root) -> Iterator[Found]:
    """Newest first. Each is read when the iterator reaches it, since a large manifest takes many seconds.

    Saves that were not finished locally, and what was set aside, are left out.
    """
    return (glance(root / step_name(step), step) for step in steps(root))


def survey(root: Root) -> list[Found]:
    """Which checkpoints there are, newest first; no manifest is read, so nothing is known of damage.

    A save that is complete but for its name is one of them, where its step has no complete checkpoint; it is to be
    `put_in_place` before it is used.
    """
    found = {}
    for step in steps(root):
        folder = root / step_name(step)
        problem = None if (folder / MANIFEST).exists() else _without_manifest(folder)
        found[step] = Found(step, folder, problem, incomplete=problem is not None)
    for step, partial in _partials(root):
        if (step not in found or found[step].incomplete) and (partial / MANIFEST).exists():
            found[step] = Found(step, partial, None)
    return [found[step] for step in sorted(found, reverse=True)]


def _without_manifest(folder: Root) -> str:
    return f"{folder} has no {MANIFEST}: it was not completed"


def steps(root: Root) -> list[int]:
    """The steps of the folders that are named as checkpoints, newest first."""
    return sorted((step for name in root.names() if (step := step_of(name)) is not None), reverse=True)


def abandoned(root: Root) -> list[Root]:
    """Checkpoints that were set aside."""
    return [root / name for name in root.names() if _ASIDE.fullmatch(name)]


def abandon(root: Root, step: int, *, damaged: bool = False) -> Root:
    """Set a checkpoint aside: it is no longer the run's, and stays until somebody removes it."""
    plain = f"{step_name(step)}.{'damaged' if damaged else 'abandoned'}"
    taken = set(root.names())
    name, number = plain, 1
    while name in taken:
        number += 1
        name = f"{plain}-{number}"
    (root / step_name(step)).rename(root / name)
    root.sync()
    return root / name


def removable(root: Root, keep: int | None, keep_every: int | None = None) -> Removable:
    """All checkpoints but the newest `keep` intact ones (None: all; never fewer than one) and those whose step is a
    multiple of `keep_every`, with what killed saves left; nothing is removed.

    What is newer than the newest intact one may be a save under way, and stays; so does, until there are `keep` newer
    intact ones, what may be intact and could not be read.
    """
    found = list(checkpoints(root))
    intact = [each.step for each in found if each.problem is None]
    if not intact:
        return Removable((), ())
    unclear = [each.step for each in found if each.unreadable]
    going = _going([each.step for each in found], intact, keep, keep_every, unclear)
    return Removable(tuple(each for each in found if each.step in going), _leftovers(root, intact[0]))


def prune(
    root: Root, saved: Mapping[int, Mapping[str, int]], keep: int | None, keep_every: int | None = None
) -> list[int]:
    """Remove, after a save, what `removable` would; returns the steps of the checkpoints that went, newest first.

    No manifest is read: at a thousand ranks each takes seconds. The newest in `saved` has just been completed. Another
    one counts as intact where its manifest is there and, of those in `saved`, every file is as long as it was.

    Args:
        saved: of checkpoints that this process has written, by step: path → bytes of each file.
    """
    newest, present = max(saved), steps(root)
    intact = [newest]
    for step in present:
        if keep is not None and len(intact) < keep and step < newest:
            files = (root / step_name(step)).files()
            if files.get(MANIFEST) and saved.get(step, {}).items() <= files.items():
                intact.append(step)
    going = _going(present, intact, keep, keep_every)
    folders = tuple(Found(step, root / step_name(step), None) for step in going)
    Removable(folders, _leftovers(root, newest)).remove()
    return going


def _going(
    steps: Sequence[int], intact: Sequence[int], keep: int | None, keep_every: int | None, unclear: Collection[int] = ()
) -> list[int]:
    """Of checkpoints, newest first, those that go; `intact` holds the newest that are, `unclear` those that may be."""
    if keep is None:
        return []
    kept = intact[: max(keep, 1)]
    enough = len(kept) == max(keep, 1)
    return [
        step
        for step in steps
        if step < intact[0]
        and step not in kept
        and not (keep_every and step % keep_every == 0)
        and (step not in unclear or (enough and step < kept[-1]))
    ]


def _leftovers(root: Root, newest: int) -> tuple[Root, ...]:
    """What saves up to a step left when they were killed."""
    return tuple(partial for step, partial in _partials(root) if step <= newest)


def _partials(root: Root) -> list[tuple[int, Root]]:
    return [(int(match[1]), root / name) for name in root.names() if (match := _PARTIAL.fullmatch(name))]
