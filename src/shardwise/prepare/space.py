"""How much disk prepared data will take: estimated before the work starts, so that it does not fail after hours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config import DataConfig
from shardwise.data.reading.content import UTF_8
from shardwise.data.reading.sources import PIECE_CHARACTERS, FileSource, Source
from shardwise.data.tokens.cutting import batches, cut_sentences
from shardwise.data.tokens.encoding import ContentDigest
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import DataError
from shardwise.files import free_bytes
from shardwise.units import size

# Bytes of text for each byte of a compressed file: more than most files have.
_PACKED = 6.0
# An estimate from the beginning of a text is not exact.
_MARGIN = 1.25
# Room for the state; a smaller shortage is not reported.
_LEAST = 1 << 16


@dataclass(frozen=True)
class Estimate:
    """What a source will become, a little more rather than less.

    Attributes:
        bytes: the size of the text.
        exact: whether that is the text's own size, and not that of files that pack or wrap it.
        packed: whether files compress it, at a ratio that is known only after they were read.
    """

    bytes: int
    exact: bool
    packed: bool
    tokens: int
    sentences: int
    documents: int


def expect(data: DataConfig, source: Source, tokenizer: Tokenizer, *, sentences: bool) -> Estimate | None:
    """An estimate from the sizes of the files and the beginning of the text; None where there are no files."""
    files: Sequence[Path] | None = getattr(source, "files", None)
    readings = source.readings if isinstance(source, FileSource) else ()
    wrapped = files is None or any(reading.kind != "text" or reading.encoding != UTF_8 for reading in readings)
    if files is None:
        if data.path is None:
            return None
        files = [path for path in Path(data.path).expanduser().rglob("*") if path.is_file()]
    packed = {path for path, each in zip(files, readings, strict=False) if each.packing or each.kind == "parquet"}
    total = sum(round(path.stat().st_size * (_PACKED if path in packed else 1.0)) for path in files)
    digest = ContentDigest()
    pieces = next(batches(digest.watch(source.pieces()), lambda piece: piece.characters, PIECE_CHARACTERS), [])
    texts = [text for piece in pieces for text in (cut_sentences(piece.text) if sentences else [piece.text])]
    tokens = len(tokenizer.encode_rows(texts, literally=sentences)[0])
    ended = sum(piece.ends_document for piece in pieces)
    scale = _MARGIN * total / digest.bytes if digest.bytes else 0.0
    documents = max(len(files), round(ended * scale))
    return Estimate(
        bytes=total,
        exact=not (wrapped or packed),
        packed=bool(packed),
        tokens=round(tokens * scale) + documents,
        sentences=round(len(texts) * scale) + documents,
        documents=documents,
    )


def check_room(needed: int, written: int, output: Path, announce: Callable[[str], None], *, packed: bool) -> None:
    """Announces how much disk `output` needs.

    Args:
        written: bytes of `needed` that are on the disk already.
        packed: the text is compressed, so the estimate is too rough to refuse for.

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


def bytes_below(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
