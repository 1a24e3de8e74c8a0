"""Read the whole of a checkpoint, or all checkpoints of a run: checksums, missing files, whether each tensor is there
exactly once, values that are NaN or infinite, and the hash of the state, if the run recorded it (log.state_hash_every).

Exit code 0: everything is as it was written and finite; 1: something is not; 2: PATH is no checkpoint.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.progress import progress
from shardwise.base.units import counted, duration, size
from shardwise.checkpoint.storage.checkpoint_folders import checkpoint_folder
from shardwise.cli import output
from shardwise.cli.checkpoint import add_path
from shardwise.cli.help import add_json

if TYPE_CHECKING:
    from shardwise.checkpoint.format.verify import VerificationReport


def configure(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    add_json(parser, ", of several checkpoints a list")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.format.verify import verify_checkpoint

    place = checkpoint_folder(arguments.path)
    checkpoints = place.checkpoints()
    # A run that was killed during its first save has folders, and none that is a checkpoint yet.
    if all(checkpoint.incomplete for checkpoint in checkpoints):
        raise ConfigError(f"{place.root} must hold a checkpoint that was completed: there is none")
    described: list[dict[str, Any]] = []
    sound = True
    for checkpoint in checkpoints:
        described.append({"path": str(checkpoint.folder), "step": checkpoint.step, "state": "incomplete"})
        if checkpoint.incomplete:
            if not arguments.json:
                output.line(f"{checkpoint.folder}: skipped, it was not completed")
            continue
        start = time.monotonic()
        with progress(f"verifying {checkpoint.folder.name}", checkpoint.bytes) as advance:
            report = verify_checkpoint(checkpoint.folder, advance)
        described[-1] |= _described(report)
        sound = sound and report.sound
        if not arguments.json:
            _show(report, max(time.monotonic() - start, 1e-9))
    if arguments.json:
        output.json(described[0] if place.is_checkpoint else described)
    return 0 if sound else 1


def _show(report: VerificationReport, seconds: float) -> None:
    read = f"{size(report.bytes)} in {duration(seconds)} ({size(report.bytes / seconds)}/s)"
    contents = f"{counted(report.files, 'file')}, {counted(report.tensors, 'tensor')}"
    state = counted(len(report.problems), "problem") if report.problems else _state(report)
    state_hash = "" if report.state_hash is None or report.problems else f", state hash {report.state_hash}"
    output.line(f"{report.folder}: {state}; {contents}, {read}{state_hash}")
    for problem in report.problems:
        output.line(f"  {problem}")
    for name, count in report.non_finite.items():
        output.line(f"  {name} has {counted(count, 'value')} that {'is' if count == 1 else 'are'} NaN or infinite")
    if report.unlisted:
        output.line(f"  not of the checkpoint, and not verified: {', '.join(report.unlisted)}")


def _state(report: VerificationReport) -> str:
    return "damaged" if report.problems else "not finite" if report.non_finite else "intact"


def _described(report: VerificationReport) -> dict[str, Any]:
    facts = ("problems", "non_finite", "unlisted", "files", "tensors", "bytes", "state_hash")
    return {"state": _state(report), **{fact: getattr(report, fact) for fact in facts}}
