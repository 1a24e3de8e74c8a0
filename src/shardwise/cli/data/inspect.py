"""Show what data hold: documents, tokens, lengths, and the first of them decoded.

PATH is Megatron's PREFIX, .bin or .idx; an HDF5 shard, their folder or a glob; a folder that datasets saved; or text
as training reads it. Of large data a part is looked at that is spread over them, and the lines say so.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.units import counted, size
from shardwise.cli import output
from shardwise.cli.data import add_marks, add_reading, arguments_named

if TYPE_CHECKING:
    from shardwise.data.formats.inspection import Inspection, Lengths

_WIDTH, _BAR, _SAMPLE_LINES = 80, 36, 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the data")
    parser.add_argument(
        "--tokenizer", metavar="PATH|ID", help="shows samples as text (default: the one that the manifest names)"
    )
    parser.add_argument("--samples", metavar="N", type=int, default=3, help="how many are shown (default: 3)")
    add_reading(parser)
    add_marks(parser.add_argument_group("options of text, whose tokens are counted by a --tokenizer"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.samples < 0:
        raise ConfigError(f"--samples ({arguments.samples}) must be at least 0")
    from shardwise.data.opening import inspect

    keys = ("tokenizer", "text_key", "append_eod", "prepend_bos")
    given = {key: getattr(arguments, key) for key in keys} | {"format": arguments.read_as or "auto"}
    with arguments_named("PATH"):
        found = inspect(arguments.path, arguments.samples, given)
    if arguments.json:
        facts = {**asdict(found), **found.counts}
        output.json({key: value for key, value in facts.items() if key not in ("rows", "counts")})
    else:
        _show(found)
    return 0


def _show(found: Inspection) -> None:
    output.line(f"{found.path}: {found.format}, {size(found.bytes)}")
    rows = [*found.rows, *_made(found.manifest), *(("note", note) for note in found.notes)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        _wrapped(f"{name:<{width}}  ", value)
    if found.lengths is not None and found.lengths.counted > 1:
        output.line()
        _show_lengths(found.lengths)
    if found.samples:
        output.line()
        for sample in found.samples:
            shown = " ".join(map(str, sample.ids or ())) if sample.text is None else sample.text
            _wrapped(f"{sample.number + 1:>3}  ", shown, lines=_SAMPLE_LINES)


def _wrapped(lead: str, value: str, lines: int | None = None) -> None:
    """Print the words of a text beside `lead`, as wide as a terminal is; `lines`: the most lines that it takes."""
    words, indent = output.printable(" ".join(value.split())), " " * len(lead)
    wrapped = textwrap.wrap(
        words, _WIDTH, initial_indent=lead, subsequent_indent=indent, max_lines=lines, placeholder=" …",
        break_on_hyphens=False,
    )  # fmt: skip
    for line in wrapped or [lead]:
        output.line(line.rstrip())


def _made(manifest: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The rows that the manifest gives."""
    if manifest is None:
        return []
    tokenizer, source = manifest["tokenizer"], manifest["source"]
    options = ", ".join(f"{name.replace('_', '-')} {_shown(value)}" for name, value in manifest["options"].items())
    held = [source.get("documents"), source.get("bytes")]
    number, read = (each if isinstance(each, int) else 0 for each in held)
    return [
        ("made of", f"{source.get('name')}, {counted(number, 'document')}, {size(read)}"),
        ("tokenizer", f"{tokenizer.get('name') or 'not named'}, vocabulary {_shown(tokenizer.get('vocab_size'))}"),
        ("options", options),
    ]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _show_lengths(lengths: Lengths) -> None:
    of = "" if lengths.counted == lengths.number else f"; {lengths.counted:,} were looked at"
    if lengths.least == lengths.most:
        output.line(f"{lengths.what}: {lengths.most:,} each{of}")
        return
    output.line(f"{lengths.what}: median {lengths.median:,.0f}, mean {lengths.mean:,.1f}{of}")
    most = max(number for _, _, number in lengths.bins)
    width = max(len(f"{low:,}") for low, _, _ in lengths.bins)
    rows = []
    for low, high, number in lengths.bins:
        span = f"{low:>{width},}" if low == high else f"{low:>{width},} … {high:,}"
        rows.append((span, f"{number:,}", "█" * max(round(_BAR * number / most), 1 if number else 0)))
    output.table(rows, right=(1,), indent=2)
