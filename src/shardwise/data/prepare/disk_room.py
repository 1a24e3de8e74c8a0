"""The disk that prepared data will take, estimated before the work starts, so that it does not fail after hours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.base.errors import DataError
from shardwise.base.files import free_bytes, user_path
from shardwise.base.units import size
from shardwise.config import DataConfig
from shardwise.data.reading.megatron_files import written_dtype
from shardwise.data.reading.text_sources import PIECE_CHARACTERS, ColumnSource, FileSource, Source
from shardwise.data.tokens.encoding import ContentDigest, cut_sentences, group_by_size
from shardwise.data.tokens.tokenizer import Tokenizer

# Bytes of text for each byte of a compressed file: more than most files have.
_PACKED = 6.0
# An estimate from the beginning of a text is not exact; a quarter more rarely refuses what would fit.
_MARGIN = 1.25
# Room for the state; a smaller shortage is not reported.
_LEAST = 1 << 16
# Bytes of the files in the work folder for each sequence and document: a size (4) and a bound (8), then in the .idx a
# size (4), a pointer (8) and a bound (8).
_INDEX_BYTES = 32


@dataclass(frozen=True)
class Estimate:
    """Estimated sizes of a source, a little more rather than less.

    Attributes:
        bytes: size of the text.
        exact: True if `bytes` is the size of the text itself, and not of files that pack or wrap it.
        packed: True if files compress the text, at a ratio that is known only after they were read.
        output_bytes: size of the data set and of the files that it is made of.
    """

    bytes: int
    exact: bool
    packed: bool
    output_bytes: int


def estimate(data: DataConfig, source: Source, tokenizer: Tokenizer, *, sentences: bool) -> Estimate | None:
    """An estimate from the sizes of the files and the beginning of the text; None if there are no files."""
    if isinstance(source, ColumnSource):
        if data.path is None:
            return None
        files: Sequence[Path] = [path for path in user_path(data.path).rglob("*") if path.is_file()]
        wrapped = True
    else:
        if not source.files:
            return None
        files = source.files
        wrapped = False
    packed = set()
    if isinstance(source, FileSource):
        for path, reading in zip(files, source.readings, strict=True):
            wrapped = wrapped or reading.kind != "text"
            if reading.packing or reading.kind == "parquet":
                packed.add(path)
    total = sum(round(path.stat().st_size * (_PACKED if path in packed else 1.0)) for path in files)
    digest = ContentDigest()
    pieces = next(group_by_size(digest.watch(source.pieces()), lambda piece: piece.characters, PIECE_CHARACTERS), [])
    texts = []
    for piece in pieces:
        texts += cut_sentences(piece.text) if sentences else [piece.text]
    tokens = len(tokenizer.encode_rows(texts, literally=sentences)[0])
    ended = sum(piece.ends_document for piece in pieces)
    # All of the text has as many tokens for each byte as its beginning.
    scale = 0.0
    if digest.bytes:
        scale = _MARGIN * total / digest.bytes
    documents = max(len(files), round(ended * scale))
    sequences = round(len(texts) * scale) + documents
    output_bytes = (round(tokens * scale) + documents) * written_dtype(tokenizer.vocab_size).itemsize
    return Estimate(
        bytes=total,
        exact=not (wrapped or packed),
        packed=bool(packed),
        output_bytes=output_bytes + _INDEX_BYTES * (sequences + documents),
    )


def check_room(needed: int, written: int, output: Path, announce: Callable[[str], None], *, packed: bool) -> None:
    """Announces how much disk `output` needs.

    Args:
        written: bytes of `needed` that are on the disk already.
        packed: True if the text is compressed, so that the estimate is too rough for a refusal.

    Raises:
        DataError: the disk has less.
    """
    free = free_bytes(output)
    missing = max(needed - written, 0)
    if missing <= max(free, _LEAST):
        announce(f"preparing {output}: takes about {size(missing)} of the {size(free)} that are free")
    elif packed:
        announce(
            f"preparing {output}: may take {size(missing)}, as its text is packed, and {size(free)} are free: if the "
            "disk becomes full, make room, and the same command continues"
        )
    else:
        raise DataError(
            f"the disk under {output} ({size(free)} free) must have about {size(missing)} free: make room, or name "
            "another place"
        )
