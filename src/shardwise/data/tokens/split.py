"""The held-out part: whole documents where that comes close to the share asked for, else the end of the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.parts import Part
from shardwise.data.reading.sources import TextPiece
from shardwise.data.samples.hashing import mix

_WHOLE_DOCUMENTS_LEAST = 0.75


@dataclass(frozen=True)
class Split:
    """Which documents are held out (a mask), or at which character of the whole text the held-out end begins."""

    documents: npt.NDArray[np.bool_] | None
    boundary: int

    def parts(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[Part, TextPiece]]:
        """Each piece with its part; the piece with the boundary becomes two, cut at the next line if there is one."""
        if self.documents is not None:
            document = 0
            for piece in pieces:
                yield ("eval" if self.documents[document] else "train"), piece
                document += piece.ends_document
            return
        start = 0
        for piece in pieces:
            end = start + len(piece.text)
            if end <= self.boundary:
                yield "train", piece
            elif start >= self.boundary:
                yield "eval", piece
            else:
                cut = self.boundary - start
                line = piece.text.find("\n", cut) + 1
                if 0 < line < len(piece.text):
                    cut = line
                yield "train", TextPiece(piece.text[:cut], ends_document=False)
                yield "eval", TextPiece(piece.text[cut:], piece.ends_document)
            start = end


def plan_split(characters: npt.NDArray[np.int64], weights: Sequence[float]) -> Split:
    """Holds out the evaluation share, the second weight's, of documents of these lengths.

    Documents are taken in the order of a hash of their index, those above a quarter of the share left out so that
    the last one taken decides little. Where that yields under three quarters of the share (a single long file), the
    end of the text is held out instead.
    """
    total = int(characters.sum())
    share = int(total * (weights[1] / sum(weights)))
    if share == 0:
        return Split(None, total)
    order = np.argsort(mix(np.arange(len(characters), dtype=np.uint64)), kind="stable")
    order = order[characters[order] <= share / 4]
    taken = order[np.cumsum(characters[order]) <= share]
    if int(characters[taken].sum()) < _WHOLE_DOCUMENTS_LEAST * share:
        return Split(None, total - share)
    documents = np.zeros(len(characters), dtype=np.bool_)
    documents[taken] = True
    return Split(documents, total)
