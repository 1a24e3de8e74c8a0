"""Text becomes the files of a cache entry: tokens, and for sentence pairs where sentences and documents begin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.cache import BOUNDS, BOUNDS_DTYPE, ArrayWriter, TokenWriter, token_dtype
from shardwise.data.parts import PARTS, Part
from shardwise.data.reading.sources import TextPiece
from shardwise.data.tokens.cutting import batches, sentence_pieces
from shardwise.data.tokens.marks import DocumentMarks
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.windows import encode_windows, text_windows

_BATCH_CHARACTERS = 1 << 23


class ContentDigest:
    """A digest of all text that passes through `watch`, and of where documents and the text's own parts end.

    Attributes:
        bytes: the size of that text.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.bytes = 0

    def watch(self, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        """The pieces, unchanged, each added to the digest."""
        for piece in pieces:
            encoded = piece.text.encode()
            self._digest.update(encoded)
            self.bytes += len(encoded)
            if piece.ends_document:
                self._digest.update(b"\xff")  # in no UTF-8 text
            yield piece

    def end_part(self) -> None:
        self._digest.update(b"\xfe")  # in no UTF-8 text either

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def encode_documents(
    parts: Iterable[tuple[Part, TextPiece]], tokenizer: Tokenizer, marks: DocumentMarks, folder: Path
) -> dict[str, Any]:
    """Writes each part's tokens, documents with their marks; returns the manifest's records."""
    begun = False
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        for batch in batches(text_windows(parts, tokenizer), lambda item: item[1].characters, _BATCH_CHARACTERS):
            windows = [window for _, window in batch]
            ends = [window.ends_document for window in windows]
            tokens, sizes = marks.put(*encode_windows(windows, tokenizer), ends, begun=begun)
            for (part, window), row in zip(batch, np.split(tokens, np.cumsum(sizes)[:-1]), strict=True):
                writers[part].write(row)
                writers[part].documents += window.ends_document
            begun = not ends[-1]
    return {part: writer.facts() for part, writer in writers.items()}


def encode_sentences(parts: Iterable[tuple[Part, TextPiece]], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Writes each part's tokens and the bounds of its sentences and documents; returns the manifest's records.

    Each sentence is encoded by itself. One without tokens is left out, and so is a document without sentences.
    """
    with ExitStack() as files:
        writers = token_writers(files, token_dtype(tokenizer.vocab_size), folder)
        bounds = {
            part: {
                name: ArrayWriter(files.enter_context((folder / f"{part}.{name}.bin").open("wb")), BOUNDS_DTYPE)
                for name in BOUNDS
            }
            for part in PARTS
        }
        for part in PARTS:
            for row in bounds[part].values():
                row.write([0])
        begun = dict.fromkeys(PARTS, False)
        for batch in batches(sentence_pieces(parts), lambda item: item[1].characters, _BATCH_CHARACTERS):
            texts = [sentence for _, piece in batch for sentence in piece.texts]
            tokens, sizes = tokenizer.encode_rows(texts, literally=True)
            cuts = np.cumsum([len(piece.texts) for _, piece in batch])[:-1]
            starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
            pieces = zip(batch, np.split(tokens, starts[cuts]), np.split(sizes, cuts), strict=True)
            for (part, piece), own_tokens, own_sizes in pieces:
                writer, ends = writers[part], bounds[part]
                sentences = own_sizes[own_sizes > 0]
                ends["sentences"].write(writer.length + np.cumsum(sentences))
                writer.write(own_tokens)
                begun[part] = begun[part] or len(sentences) > 0
                if piece.ends_document and begun[part]:
                    ends["documents"].write([ends["sentences"].length - 1])
                    writer.documents += 1
                    begun[part] = False
    return {
        part: {**writer.facts(), "bounds": {name: row.facts() for name, row in bounds[part].items()}}
        for part, writer in writers.items()
    }


def token_writers(files: ExitStack, dtype: np.dtype[Any], folder: Path) -> dict[Part, TokenWriter]:
    """A file of tokens for each part, which `files` closes."""
    return {part: TokenWriter(files.enter_context((folder / f"{part}.bin").open("wb")), dtype) for part in PARTS}
