"""The folder of a run's checkpoints: which are there, which are intact at a glance, which may go.

run.json                   the run that saves here (`owner.py`)
step-00000100/             a checkpoint, complete where it has a manifest
.step-00000200.partial/    a save under way, or one that was killed
step-00000300.abandoned/   set aside when the run went back to an earlier step; no longer the run's
step-00000400.damaged/     set aside when the run went on from an older one, because this one is damaged
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from shardwise.store.manifest import MANIFEST, Manifest
from shardwise.store.root import DamageError, Root, StoreError

_STEP = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"\.step-(\d{8,18})\.partial")
_ASIDE = re.compile(r"step-(\d{8,18})\.(abandoned|damaged)(-\d+)?")


@dataclass(frozen=True)
class Found:
    """A folder named as a checkpoint.

    Attributes:
        problem: why it is not intact, as far as that shows without reading its tensors: no manifest, one that is
        damaged, a file that is missing or has another size. None where nothing is wrong.
        bytes: of all that lies in the folder. manifest: None where it cannot be used. incomplete: there is none, so
        the save was not completed. unreadable: the problem is no damage; the store did not give the manifest, or it is
        one that this version cannot use.
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
    """What a prune takes away."""

    checkpoints: tuple[Found, ...]
    leftovers: tuple[Root, ...]

    def remove(self) -> None:
        for found in self.checkpoints:
            (found.folder / MANIFEST).remove()  # first: what is left by a crash here is no checkpoint
            found.folder.remove()
        for folder in self.leftovers:
            folder.remove()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder, None of another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def partial_name(step: int) -> str:
    """Where a local save is written before it gets its name."""
    return f".{step_name(step)}.partial"


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
        if step is not None and manifest.step != step:
            problem = problem or f"{folder / MANIFEST} is of step {manifest.step}, and its folder of step {step}"
    except StoreError as error:
        incomplete, unreadable = error.missing, not is_damage(error)
        problem = f"{folder} has no {MANIFEST}: it was not completed" if error.missing else str(error)
    shown = manifest.step if manifest is not None and step is None else step or 0
    return Found(shown, folder, problem, sum(files.values()), manifest, incomplete, unreadable)


def is_damage(error: StoreError) -> bool:
    """Whether what cannot be read is lost: it may be there again where the store only gave no answer."""
    return error.missing or isinstance(error, DamageError)


def checkpoints(root: Root) -> list[Found]:
    """Newest first. Saves that were not finished locally, and what was set aside, are left out."""
    steps = [step for name in root.names() if (step := step_of(name)) is not None]
    return [glance(root / step_name(step), step) for step in sorted(steps, reverse=True)]


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


def removable(root: Root, keep: int | None, keep_every: int | None = None, protect: Collection[int] = ()) -> Removable:
    """What `prune` removes, and nothing is removed.

    All but the newest `keep` intact ones (None: all; never fewer than one), those whose step is a multiple of
    `keep_every`, and `protect`. What is newer than the newest intact one may be a save under way, and stays.
    """
    found = checkpoints(root)
    intact = [each.step for each in found if each.problem is None]
    if not intact:
        return Removable((), ())
    steps = [each.step for each in found]
    kept = set(steps if keep is None else intact[: max(keep, 1)]) | set(protect)
    if keep_every:
        kept |= {step for step in steps if step % keep_every == 0}
    checkpoint = tuple(each for each in found if each.step < intact[0] and each.step not in kept)
    partial = [(int(match[1]), name) for name in root.names() if (match := _PARTIAL.fullmatch(name))]
    return Removable(checkpoint, tuple(root / name for step, name in partial if step <= intact[0]))


def prune(root: Root, keep: int | None, keep_every: int | None = None, protect: Collection[int] = ()) -> list[int]:
    """Remove what `removable` names; returns the steps of the checkpoints that went, newest first."""
    going = removable(root, keep, keep_every, protect)
    going.remove()
    return [each.step for each in going.checkpoints]
