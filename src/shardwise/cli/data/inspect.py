"""Show what data hold: documents, tokens, lengths, and the first documents as text.

PATH is Megatron's PREFIX, .bin or .idx; an HDF5 shard, their folder or a glob; a folder that datasets saved; or text as
training reads it. With --read-as chat the data are conversations, and the targets are shown in ⟦ ⟧. If the data are
large, only parts that are spread over them are read, and the output says so.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.terminal import printable
from shardwise.base.units import counted, size
from shardwise.cli import output
from shardwise.cli.data import add_marks, add_reading, arguments_named

if TYPE_CHECKING:
    from shardwise.data.formats.data_format import Inspection, LengthStatistics

_WIDTH = 80
_BAR = 36
_SAMPLE_LINES = 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the data")
    parser.add_argument(
        "--tokenizer", metavar="PATH|ID", help="shows samples as text (default: the one that the manifest names)"
    )
    parser.add_argument("--samples", metavar="N", type=int, default=3, help="how many are shown (default: 3)")
    sequence_length_help = (
        "show the samples of S tokens that data.packing=best_fit makes of the documents, and their padding"
    )
    parser.add_argument("--sequence-length", metavar="S", type=int, help=sequence_length_help)
    add_reading(parser, "chat")
    add_marks(parser.add_argument_group("options of text, whose tokens are counted by a --tokenizer"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.samples < 0:
        raise ConfigError(f"--samples ({arguments.samples}) must be at least 0")
    length = arguments.sequence_length
    if length is not None and length < 1:
        raise ConfigError(f"--sequence-length ({length}) must be at least 1")
    from shardwise.data.preview import inspect_data

    names = ("tokenizer", "text_key", "append_eod", "prepend_bos")
    keys = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    keys["format"] = arguments.read_as or "auto"
    if length is not None:
        keys["packing"] = "best_fit"
    with arguments_named("PATH"):
        inspection = inspect_data(arguments.path, arguments.samples, keys, length)
    if arguments.json:
        facts = {**asdict(inspection), **inspection.counts}
        output.json({key: value for key, value in facts.items() if key not in ("rows", "counts")})
    else:
        _show(inspection)
    return 0


def _show(inspection: Inspection) -> None:
    output.line(f"{inspection.path}: {inspection.format}, {size(inspection.bytes)}")
    rows = [*inspection.rows, *_manifest_rows(inspection.manifest), *(("note", note) for note in inspection.notes)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        _show_wrapped(f"{name:<{width}}  ", value)
    if inspection.lengths is not None and inspection.lengths.counted > 1:
        output.line()
        _show_lengths(inspection.lengths)
    if inspection.samples:
        output.line()
        for sample in inspection.samples:
            text = sample.text
            if text is None:
                text = " ".join(map(str, sample.ids or ()))
            _show_wrapped(f"{sample.number + 1:>3}  ", text, lines=_SAMPLE_LINES)


def _show_wrapped(lead: str, value: str, lines: int | None = None) -> None:
    words = printable(" ".join(value.split()))
    indent = " " * len(lead)
    wrapped = textwrap.wrap(
        words, _WIDTH, initial_indent=lead, subsequent_indent=indent, max_lines=lines, placeholder=" …",
        break_on_hyphens=False,
    )  # fmt: skip
    for line in wrapped or [lead]:
        output.line(line.rstrip())


def _manifest_rows(manifest: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if manifest is None:
        return []
    tokenizer = manifest["tokenizer"]
    if (source := manifest.get("source")) is None:  # datatrove names the tokenizer alone
        return [("tokenizer", tokenizer["name"])]
    options = ", ".join(f"{name.replace('_', '-')} {_shown(value)}" for name, value in manifest["options"].items())
    # A user may have edited the manifest.
    documents, nbytes = (value if isinstance(value := source.get(name), int) else 0 for name in ("documents", "bytes"))
    return [
        ("made of", f"{source.get('name')}, {counted(documents, 'document')}, {size(nbytes)}"),
        ("tokenizer", f"{tokenizer.get('name') or 'not named'}, vocabulary {_shown(tokenizer.get('vocab_size'))}"),
        ("options", options),
    ]


def _shown(value: object) -> str:
    # Before the numbers, as a bool is an int too.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    return str(value)


def _show_lengths(lengths: LengthStatistics) -> None:
    limit = "" if lengths.counted == lengths.number else f"; {lengths.counted:,} were looked at"
    if lengths.least == lengths.most:
        output.line(f"{lengths.what}: {lengths.most:,} each{limit}")
        return
    output.line(f"{lengths.what}: median {lengths.median:,.0f}, mean {lengths.mean:,.1f}{limit}")
    most = max(number for _, _, number in lengths.bins)
    width = max(len(f"{low:,}") for low, _, _ in lengths.bins)
    rows = []
    for low, high, number in lengths.bins:
        span = f"{low:>{width},}"
        if low < high:
            span += f" … {high:,}"
        # A bin with any length has a bar that can be seen.
        bar = max(round(_BAR * number / most), min(number, 1))
        rows.append((span, f"{number:,}", "█" * bar))
    output.table(rows, right=(1,), indent=2)
