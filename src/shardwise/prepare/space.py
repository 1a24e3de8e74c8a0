"""How much disk a preparation will take: estimated before it starts, so that it does not fail after hours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config import DataConfig
from shardwise.data.reading.sources import PIECE_CHARACTERS, Source
from shardwise.data.tokens.cutting import cut_sentences
from shardwise.data.tokens.encoding import ContentDigest
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import DataError
from shardwise.files import free_bytes
from shardwise.units import size

# Text of a packed file over its bytes, more than most have.
_PACKED = {".gz": 6.0, ".parquet": 6.0}
# An estimate from the beginning of a text is not exact.
_MARGIN = 1.25
# Room for the state; a smaller shortage is not reported.
_LEAST = 1 << 16


@dataclass(frozen=True)
class Expected:
    """What a source will become, a little more rather than less.

    Attributes:
        bytes: the size of the text.
        exact: whether that is the text's own size, and not that of files that pack or wrap it.
        packed: whether files pack it, at a ratio that is not known before.
    """

    bytes: int
    exact: bool
    packed: bool
    tokens: int
    sentences: int
    documents: int


def expect(data: DataConfig, source: Source, tokenizer: Tokenizer, *, sentences: bool) -> Expected | None:
    """An estimate from the sizes of the files and the beginning of the text; None where there are no files."""
    files: Sequence[Path] | None = getattr(source, "files", None)
    wrapped = files is None or any(path.suffix == ".jsonl" for path in files)
    if files is None:
        if data.path is None:
            return None
        files = [path for path in Path(data.path).expanduser().rglob("*") if path.is_file()]
    packed = any(path.suffix in _PACKED for path in files)
    total = sum(round(path.stat().st_size * _PACKED.get(path.suffix, 1.0)) for path in files)
    digest = ContentDigest()
    pieces, characters = [], 0
    for piece in digest.watch(source.pieces()):
        pieces.append(piece)
        characters += piece.characters
        if characters >= PIECE_CHARACTERS:
            break
    if sentences:
        texts = [sentence for piece in pieces for sentence in cut_sentences(piece.text)]
    else:
        texts = [piece.text for piece in pieces]
    tokens = len(tokenizer.encode_rows(texts, literally=sentences)[0])
    ended = sum(piece.ends_document for piece in pieces)
    scale = _MARGIN * total / digest.bytes if digest.bytes else 0.0
    documents = max(len(files), round(ended * scale))
    sequences = round(len(texts) * scale) + documents
    return Expected(total, not (wrapped or packed), packed, round(tokens * scale) + documents, sequences, documents)


def check_room(needed: int, held: int, output: Path, announce: Callable[[str], None], *, packed: bool) -> None:
    """Announces how much disk `output` needs.

    Args:
        held: bytes of `needed` that are written already.
        packed: the text is packed, so the estimate is too rough to refuse for.

    Raises:
        DataError: the disk has less.
    """
    free = free_bytes(output)
    missing = max(needed - held, 0)
    if missing > free and missing > _LEAST and packed:
        announce(
            f"preparing {output}: may take {size(missing)}, as its text is packed, and {size(free)} are free: where "
            "they do not do, make room, and the same command goes on"
        )
        return
    if missing > free and missing > _LEAST:
        raise DataError(
            f"the disk under {output} ({size(free)} free) must have about {size(missing)} free: make room, or name "
            "another place"
        )
    announce(f"preparing {output}: takes about {size(missing)} of the {size(free)} that are free")


def held_by(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
