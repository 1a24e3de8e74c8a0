"""Remove all checkpoints of a run but the newest.

The newest intact checkpoint always stays, and so do newer ones. Leftovers of interrupted saves are removed with the old
checkpoints. The run must not be in progress: while it is, it removes its checkpoints by checkpoint.keep.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.base.units import counted, size
from shardwise.checkpoint.storage.checkpoint_folders import NamedFolder, checkpoint_folder
from shardwise.cli import output
from shardwise.cli.checkpoint import add_path
from shardwise.cli.help import count
from shardwise.runs.folder import RunDirectory, RunLock


def configure(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "RUN")
    keep_help = "number of newest intact checkpoints that stay (at least 1)"
    parser.add_argument("--keep", metavar="N", type=count, required=True, help=keep_help)
    parser.add_argument(
        "--keep-every", metavar="M", type=count, help="checkpoints whose step is a multiple of M stay too"
    )
    abandoned_help = "also remove checkpoints that were renamed to .abandoned (the run resumed before them) or .damaged"
    parser.add_argument("--abandoned", action="store_true", help=abandoned_help)
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.storage.checkpoint_folders import (
        abandoned_checkpoints,
        removable_folders,
        remove_checkpoint,
    )

    place = checkpoint_folder(arguments.path)
    if place.is_checkpoint:
        raise ConfigError(f"RUN ({place.root}) must be a run's folder or a folder of checkpoints: it is one checkpoint")
    # The locks are held until all is removed: a run that starts in between could resume from what goes.
    with ExitStack() as locks:
        if not arguments.dry_run:
            for run in _runs(place, arguments.path):
                _lock(locks, run)
        checkpoints, leftovers = removable_folders(place.root, arguments.keep, arguments.keep_every)
        folders = [*leftovers, *(abandoned_checkpoints(place.root) if arguments.abandoned else [])]
        sizes = [(checkpoint.folder, checkpoint.bytes) for checkpoint in checkpoints]
        sizes += [(folder, sum(folder.files().values())) for folder in folders]
        if not arguments.dry_run:
            for folder, _ in sizes:
                remove_checkpoint(folder)
    verb = "would remove" if arguments.dry_run else "removed"
    for folder, nbytes in sizes:
        output.line(f"{verb} {folder} ({size(nbytes)})")
    total = size(sum(nbytes for _, nbytes in sizes))
    freed = f"{total} would be freed" if arguments.dry_run else f"{total} freed"
    output.line(f"{counted(len(sizes), 'folder')}, {freed}" if sizes else "nothing to remove")
    return 0


def _runs(place: NamedFolder, given: str) -> list[Path]:
    from shardwise.checkpoint.storage.run_identity import run_owner

    folders = [Path(given)]
    if place.root.is_local:
        folders.append(place.root.local().parent)
    saving = run_owner(place.root)
    if saving is not None:
        folders.append(Path(saving.folder))
    return list(dict.fromkeys(folder.resolve() for folder in folders if RunDirectory(folder).holds_run))


def _lock(locks: ExitStack, run: Path) -> None:
    try:
        locks.enter_context(RunLock(run))
    except ConfigError:
        # The lock failed for another reason, such as a folder that cannot be written.
        if not RunLock.is_held(run):
            raise
        raise ConfigError(
            f"the run in {run} is under way: wait for its end, or stop it by `shardwise stop {run}`; it removes its "
            "old checkpoints itself, by checkpoint.keep"
        ) from None
