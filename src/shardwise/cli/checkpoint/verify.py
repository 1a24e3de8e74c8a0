"""Read a checkpoint whole, or every one of a run: checksums, missing files, whether each tensor is there exactly once,
and values that are NaN or infinite.

Exit code 0: all is as it was written and finite; 1: something is not; 2: PATH is no checkpoint.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from shardwise.cli import output, text
from shardwise.cli.checkpoint import places
from shardwise.errors import ConfigError
from shardwise.units import duration, size

if TYPE_CHECKING:
    from shardwise.checkpoint_format.folders import Found
    from shardwise.checkpoint_format.verify import Report


def configure(parser: argparse.ArgumentParser) -> None:
    places.add_path(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, of several checkpoints a list")


def run(arguments: argparse.Namespace) -> int:
    place = places.locate(arguments.path)
    found = places.all_of(place)
    complete = [each for each in found if not each.incomplete]
    if not complete:
        raise ConfigError(f"{place.root} must hold a checkpoint that was completed: there is none")
    described: list[dict[str, Any]] = []
    sound = True
    for each in found:
        if each.incomplete:
            described.append({"path": str(each.folder), "step": each.step, "state": "incomplete"})
            if not arguments.json:
                text.line(f"{each.folder}: skipped, it was not completed")
            continue
        report, seconds = _verify(each)
        sound = sound and report.sound
        described.append(_described(each, report))
        if not arguments.json:
            _tell(report, seconds)
    if arguments.json:
        from shardwise.runlog import json_text

        output.line(json_text(described[0] if place.single else described, indent=2))
    return 0 if sound else 1


def _verify(found: Found) -> tuple[Report, float]:
    from shardwise.checkpoint_format.verify import verify

    start = time.monotonic()
    with text.bar(f"verifying {found.folder.name}", found.bytes) as progress:
        report = verify(found.folder, progress)
    return report, max(time.monotonic() - start, 1e-9)


def _tell(report: Report, seconds: float) -> None:
    read = f"{size(report.bytes)} in {duration(seconds)} ({size(report.bytes / seconds)}/s)"
    held = f"{text.of(report.files, 'file')}, {text.of(report.tensors, 'tensor')}"
    state = text.of(len(report.problems), "problem") if report.problems else _state(report)
    text.line(f"{report.folder}: {state}; {held}, {read}")
    for problem in report.problems:
        text.line(f"  {problem}")
    for name, count in report.non_finite.items():
        text.line(f"  {name} has {text.of(count, 'value')} that {'is' if count == 1 else 'are'} NaN or infinite")
    if report.unlisted:
        text.line(f"  not of the checkpoint, and not verified: {', '.join(report.unlisted)}")


def _state(report: Report) -> str:
    return "damaged" if report.problems else "not finite" if report.non_finite else "intact"


def _described(found: Found, report: Report) -> dict[str, Any]:
    return {
        "path": str(report.folder),
        "step": found.step,
        "state": _state(report),
        "problems": report.problems,
        "non_finite": report.non_finite,
        "unlisted": report.unlisted,
        "files": report.files,
        "tensors": report.tensors,
        "bytes": report.bytes,
    }
