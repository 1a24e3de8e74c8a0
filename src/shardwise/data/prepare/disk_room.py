"""The disk that prepared data will take, estimated before the work starts, so that it does not fail after hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import DataError
from shardwise.base.files import free_bytes, user_path
from shardwise.base.units import size
from shardwise.data.reading.megatron_files import megatron_dtype
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, ColumnSource, FileSource, Source
from shardwise.data.tokens.encoding import ContentDigest, cut_sentences, group_by_size
from shardwise.data.tokens.tokenizer import Tokenizer

# An estimate from the beginning of a text is not exact; a quarter more rarely refuses what would fit.
_MARGIN = 1.25
# Room for the state; a smaller shortage is not reported.
_LEAST = 1 << 16
# Bytes of the files in the work folder for each sequence and document: a size (4) and a bound (8), then in the .idx a
# size (4), a pointer (8) and a bound (8).
_INDEX_BYTES = 32


@dataclass(frozen=True)
class _SizeEstimate:
    """Estimated sizes of a source and of its result, rather more than less; `exact`: `bytes` is that of its text."""

    bytes: int
    exact: bool
    output_bytes: int


def estimate_size(source: Source, tokenizer: Tokenizer, *, sentences: bool) -> _SizeEstimate | None:
    """The size of prepared data, by the files and the text's beginning; None without files, or if packed."""
    if isinstance(source, ColumnSource):
        path = source.data.path
        files = [] if path is None else [file for file in user_path(path).rglob("*") if file.is_file()]
        exact = False
    else:
        files = list(source.files)
        readings = source.readings if isinstance(source, FileSource) else ()
        if any(reading.packing or reading.kind == "parquet" for reading in readings):
            return None
        exact = all(reading.kind == "text" for reading in readings)
    if not files:
        return None
    total = sum(file.stat().st_size for file in files)
    digest = ContentDigest()
    pieces = next(group_by_size(digest.watch(source.pieces()), lambda piece: piece.characters, PIECE_CHARACTERS), [])
    texts = [text for piece in pieces for text in (cut_sentences(piece.text) if sentences else [piece.text])]
    tokens = len(tokenizer.encode_rows(texts, literally=sentences)[0])
    # All of the text has as many tokens for each byte as its beginning.
    scale = _MARGIN * total / digest.bytes if digest.bytes else 0.0
    documents = max(len(files), round(sum(piece.ends_document for piece in pieces) * scale))
    sequences = round(len(texts) * scale) + documents
    output_bytes = (round(tokens * scale) + documents) * megatron_dtype(tokenizer.vocab_size).itemsize
    return _SizeEstimate(total, exact, output_bytes + _INDEX_BYTES * (sequences + documents))


def require_disk_room(needed: int | None, written: int, output: Path, announce: Callable[[str], None]) -> None:
    """Announces the bytes that `output` needs, if known, of which some are written; DataError: the disk has less."""
    if needed is None:
        announce(f"preparing {output}: its size is known only after the text was read")
        return
    free = free_bytes(output)
    missing = max(needed - written, 0)
    if missing > max(free, _LEAST):
        raise DataError(
            f"the disk under {output} ({size(free)} free) must have about {size(missing)} free: make room, or name "
            "another place"
        )
    announce(f"preparing {output}: takes about {size(missing)} of the {size(free)} that are free")
