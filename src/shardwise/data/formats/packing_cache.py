"""Whole documents packed into samples (`data.packing=best_fit`): made once for a sequence length, and cached.

A cache entry has the samples of all parts of a data set (`PackedSamples`), which every rank maps into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from shardwise.base.errors import DataError
from shardwise.data import cache
from shardwise.data.formats import prepared_data
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, IntArray, Part
from shardwise.data.samples.batch import TokenRow
from shardwise.data.samples.packing import WINDOW, PackedSamples, PackingFacts, document_bounds, packed_windows

_RULE = 1  # belongs to the key of every cache entry: raise it when documents are packed in another way
_KIND = "packs"
_Text = TypeVar("_Text", bound=prepared_data.PreparedText)


def open_packed_samples(
    request: DataRequest, name: object, key: str, bounds: Mapping[Part, Callable[[], IntArray]]
) -> dict[Part, PackedSamples]:
    """The shortest samples of each part of the data `name`, packed first if need be; `bounds` finds documents."""
    length = request.unit_length
    together = request.block_length // length

    def build(folder: Path) -> dict[str, Any]:
        if request.announce is not None:
            request.announce(f"preparing the data {name}: packing the documents once, then cached in {request.root}")
        return {part: _write(folder, part, find(), length, together) for part, find in bounds.items()}

    entry = cache.open_or_build(request.root, _KIND, key, cache.has_sound_bounds, build)
    return {
        part: PackedSamples(
            entry.bounds(part, "pieces").reshape(-1, 2),
            entry.bounds(part, "samples"),
            length,
            PackingFacts(**entry.manifest[part]["facts"]),
        )
        for part in bounds
    }


def packing_key(documents: Any, request: DataRequest) -> str:
    """The key of the cached packed samples of some documents, as described, at the sequence lengths of `request`."""
    described = {"packing": _RULE, "window": WINDOW, "length": request.unit_length, "documents": documents}
    if request.block_length > request.unit_length:
        described["together"] = request.block_length // request.unit_length
    return cache.cache_key(described)


def _write(folder: Path, part: Part, bounds: IntArray, length: int, together: int) -> dict[str, Any]:
    facts = PackingFacts()
    with ExitStack() as files:
        pieces, samples = (
            cache.ArrayWriter(files.enter_context((folder / f"{part}.{name}.bin").open("wb")), cache.BOUNDS_DTYPE)
            for name in ("pieces", "samples")
        )
        samples.write([0])
        for window in packed_windows(bounds, length, together):
            samples.write(window.begins[1:] + pieces.length // 2)
            pieces.write(window.pieces.ravel())
            facts += window.facts
    # The files are closed: their digests are those of all that was written.
    return {"facts": asdict(facts), "bounds": {"pieces": pieces.facts(), "samples": samples.facts()}}


def with_packed_samples(
    request: DataRequest, data: _Text, documents: Mapping[Part, Callable[[], IntArray]] | None = None
) -> _Text:
    """The prepared `data` with packed samples of all parts, if `request` asks for them; else as they are.

    Args:
        documents: functions that find the bounds of the documents of each part that has some; None: they end with the
            token that ends a document.

    Raises:
        DataError: a part has no ends of documents.
    """
    if not request.data.packs_documents:
        return data
    token = None
    if documents is None:
        ends = prepared_data.document_ends(request.data, data.tokenizer_path)
        assert ends is not None, "documents are told apart"
        token = ends.token
        documents = {part: _finder(request, part, row, token) for part, row in data.tokens.items() if len(row)}
    packed = open_packed_samples(request, request.data.name, packing_key([data.fingerprint, token], request), documents)
    return replace(data, packed=packed, summary=f"{data.summary}{packing_facts_text([packed])}")


def _finder(request: DataRequest, part: Part, row: TokenRow, end: int) -> Callable[[], IntArray]:
    """A function that finds the bounds of the documents of a part; DataError if it has none."""

    def find() -> IntArray:
        bounds = document_bounds(row, end)
        if len(bounds) > 2 or row[-1:][0] == end:
            return bounds
        raise DataError(
            f"the {PART_NAMES[part]} part of {request.data.key} ({request.data.name}) must have the token that ends a "
            f"document (id {end}), as data.packing ({request.data.packing}) packs documents: give text of several "
            "documents, such as JSON lines, name the token of data that are tokens by data.eod_token, or set "
            "data.packing=cut"
        )

    return find


def packing_facts_text(packed: Iterable[Mapping[Part, PackedSamples]]) -> str:
    """The facts on packed samples of the training parts, after a semicolon; empty if there are none."""
    facts = [parts["train"].facts for parts in packed if "train" in parts]
    return f"; {sum(facts, PackingFacts())}" if facts else ""
