"""The folder of a run's checkpoints: the checkpoints in it, and those that may be removed.

run.json                   the run that saves here (`run_identity.py`)
step-00000100/             a checkpoint, complete where it has a manifest
.step-00000200.partial/    a save that runs or was killed, complete where it has a manifest
step-00000300.abandoned/   set aside when the run went back to an earlier step; no longer the run's
step-00000400.damaged/     set aside because it is damaged, when the run continued from an older one
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.storage.root import DamageError, Root, StoreError

_STEP = re.compile(r"step-(\d{8,18})")
_PARTIAL = re.compile(r"\.step-(\d{8,18})\.partial")
_SET_ASIDE = re.compile(r"step-(\d{8,18})\.(abandoned|damaged)(-\d+)?")


@dataclass(frozen=True)
class StepFolder:
    """A folder that has the name of a checkpoint.

    Attributes:
        step: updates done.
        folder: the folder itself.
        problem: why it is not intact, as far as the manifest and the lengths of files show; None where it is.
        bytes: length of all files in the folder.
        manifest: the manifest; None where it cannot be used.
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


def remove_checkpoint(folder: Root) -> None:
    """Remove the manifest first: what a crash leaves behind is then no checkpoint."""
    (folder / MANIFEST).remove()
    folder.remove()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def partial_name(step: int) -> str:
    """The name of the folder in which a save is written before it gets its own."""
    return f".{step_name(step)}.partial"


def put_in_place(partial: Root, final: Root) -> None:
    """Give a complete save its name; a checkpoint of that name is removed.

    At every moment one of the two is complete, and `survey` finds it, so a crash at any point loses nothing.
    """
    # Between these lines the save lacks only its name, and `survey` finds it under that of the partial folder.
    remove_checkpoint(final)
    partial.rename(final, last=MANIFEST)


def glance(folder: Root, step: int | None = None) -> StepFolder:
    """One checkpoint, by its manifest and the sizes of its files."""
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
        _require_lengths(manifest, folder, lengths)
        require_step(manifest, folder, step)
    except StoreError as error:
        is_incomplete = error.missing
        is_unreadable = not is_damage(error)
        problem = _without_manifest(folder) if error.missing else str(error)
    return StepFolder(
        step or 0, folder, problem, sum(lengths.values()), manifest, incomplete=is_incomplete, unreadable=is_unreadable
    )


def _require_lengths(manifest: Manifest, folder: Root, lengths: Mapping[str, int]) -> None:
    """Raise DamageError where a file is missing, or its length is not that in the manifest."""
    for entry in manifest.files:
        length = lengths.get(entry.path)
        if length is None:
            raise DamageError(f"{folder / entry.path} is missing")
        if length != entry.bytes:
            raise DamageError(
                f"{folder / entry.path} is damaged: its length ({length:,} bytes) must be {entry.bytes:,} bytes"
            )


def require_step(manifest: Manifest, folder: Root, step: int) -> None:
    """Raise DamageError where a manifest is of another step than its folder."""
    if manifest.step != step:
        raise DamageError(f"{folder / MANIFEST} is of step {manifest.step}, and its folder of step {step}")


def is_damage(error: StoreError) -> bool:
    """True if a file that cannot be read is lost. Where the store gave no answer, it may still be there."""
    return error.missing or isinstance(error, DamageError)


def checkpoints(root: Root) -> Iterator[StepFolder]:
    """The checkpoints in a folder, newest first. A large manifest takes many seconds: each is read when it is needed.

    Saves that were not finished locally, and checkpoints that were set aside, are left out.
    """
    return (glance(root / step_name(step), step) for step in steps(root))


def survey(root: Root) -> list[StepFolder]:
    """The checkpoints in a folder, newest first. No manifest is read, so damage is not found.

    A save that lacks only its name is among them where its step has no complete checkpoint; `put_in_place` must be
    called before it is used.
    """
    present: dict[int, StepFolder] = {}
    for step in steps(root):
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


def steps(root: Root) -> list[int]:
    """The steps of the folders that are named as checkpoints, newest first."""
    return sorted((step for name in root.names() if (step := step_of(name)) is not None), reverse=True)


def abandoned(root: Root) -> list[Root]:
    """Checkpoints that were set aside."""
    return [root / name for name in root.names() if _SET_ASIDE.fullmatch(name)]


def abandon(root: Root, step: int, *, damaged: bool = False) -> Root:
    """Set a checkpoint aside: it is no longer the run's, and stays until the user removes it."""
    first_name = f"{step_name(step)}.{'damaged' if damaged else 'abandoned'}"
    taken_names = set(root.names())
    name = first_name
    number = 1
    while name in taken_names:
        number += 1
        name = f"{first_name}-{number}"
    (root / step_name(step)).rename(root / name)
    root.sync()
    return root / name


def removable(root: Root, keep: int | None, keep_every: int | None = None) -> tuple[list[StepFolder], list[Root]]:
    """The checkpoints that a prune removes, and the folders that killed saves left; nothing is removed here.

    The newest `keep` intact checkpoints stay (None: all; never fewer than one), and those whose step is a multiple of
    `keep_every`. A folder that is newer than the newest intact one may be a save under way, and stays. One that could
    not be read may be intact, and stays until there are `keep` newer intact ones.
    """
    present = {checkpoint.step: checkpoint for checkpoint in checkpoints(root)}
    intact = [step for step, checkpoint in present.items() if checkpoint.problem is None]
    if not intact:
        return [], []
    unclear = [step for step, checkpoint in present.items() if checkpoint.unreadable]
    steps_to_remove = _steps_to_remove(present, intact, keep, keep_every, unclear)
    return [present[step] for step in steps_to_remove], _leftovers(root, intact[0])


def prune(
    root: Root, saved: Mapping[int, Mapping[str, int]], keep: int | None, keep_every: int | None = None
) -> list[int]:
    """Remove, after a save, what `removable` would; returns the steps of the removed checkpoints, newest first.

    No manifest is read, because that of a thousand ranks takes seconds. The newest checkpoint in `saved` has just been
    completed. Another one counts as intact where it has a manifest and its files in `saved` have their lengths.

    Args:
        root: the folder of the checkpoints.
        saved: step → path → bytes, of the files of checkpoints that this process has written.
        keep: as in `removable`.
        keep_every: as in `removable`.
    """
    # Whole files are not read again: lengths show what a crash of a machine leaves behind.
    newest = max(saved)
    present = steps(root)
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
    steps: Iterable[int], intact: Sequence[int], keep: int | None, keep_every: int | None, unclear: Collection[int] = ()
) -> list[int]:
    """The steps of the checkpoints to remove; all lists are newest first.

    Args:
        steps: steps of all checkpoints.
        intact: steps of those that are known to be intact, at least the newest ones.
        keep: as in `removable`.
        keep_every: as in `removable`.
        unclear: steps of those that may be intact.
    """
    if keep is None:
        return []
    # An unclear checkpoint may be the last good one: it goes only behind as many intact ones as are to stay.
    kept = intact[: max(keep, 1)]
    has_enough = len(kept) == max(keep, 1)
    steps_to_remove: list[int] = []
    for step in steps:
        is_newer = step > intact[0]
        is_kept = step in kept or (keep_every and step % keep_every == 0)
        may_be_needed = step in unclear and not (has_enough and step < kept[-1])
        if not (is_newer or is_kept or may_be_needed):
            steps_to_remove.append(step)
    return steps_to_remove


def _leftovers(root: Root, newest: int) -> list[Root]:
    """The folders that saves up to a step left when they were killed."""
    return [partial for step, partial in _partials(root) if step <= newest]


def _partials(root: Root) -> list[tuple[int, Root]]:
    return [(int(match[1]), root / name) for name in root.names() if (match := _PARTIAL.fullmatch(name))]
