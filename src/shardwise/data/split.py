"""The parts of data: documents that are trained on, evaluated and tested, and the rules that divide them.

Megatron data and HDF5 shards are cut at cumulative shares of their documents or rows (`part_bounds`). Of text,
documents are held out by a hash of their number, or its end if that comes too far from the share asked for
(`plan_split`). A stream holds documents out by where they begin (`samples.streaming.HeldOut`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import listing
from shardwise.base.units import count
from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.rows import PART_NAMES, Part
from shardwise.data.samples.order import mix

# A document larger than this fraction of the held-out share is never held out: whether the last one still fits then
# changes the share by a quarter at most.
_LARGEST_HELD_OUT = 1 / 4
# Below this fraction of the share the documents are too few or too long, and the end of the text is held out instead.
# Documents of at most a quarter of the share always reach it, unless there are too few of them.
_LEAST_HELD_OUT = 3 / 4


def part_bounds(number: int, weights: Sequence[float]) -> list[int]:
    """The first document (or row) of each part, then `number`.

    The bounds are cumulative shares, each rounded, as Megatron-LM cuts the documents of BERT and the sequences of GPT.
    """
    total = sum(weights)
    share = 0.0
    bounds = [0]
    for weight in weights:
        share += weight / total
        bounds.append(round(share * number))
    return bounds


def describe_sizes(sizes: Mapping[Part, int]) -> str:
    """The size of each part, such as "1.2 M training and 40 k evaluation"; an empty test part is left out."""
    return listing([f"{count(size)} {PART_NAMES[part]}" for part, size in sizes.items() if part != "test" or size])


@dataclass(frozen=True)
class TextSplit:
    """The division of a text into a training and an evaluation part.

    Attributes:
        held_out: True for each document that is evaluated, [documents]; None if the end of the text is evaluated.
        boundary: character of the text at which the held-out end begins, if `held_out` is None.
    """

    held_out: npt.NDArray[np.bool_] | None
    boundary: int

    def parts(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[Part, TextPiece]]:
        """Each piece with its part; the piece with the boundary becomes two, cut at the next line if there is one."""
        if self.held_out is not None:
            document = 0
            for piece in pieces:
                yield ("eval" if self.held_out[document] else "train"), piece
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


def plan_split(characters: npt.NDArray[np.int64], weights: Sequence[float]) -> TextSplit:
    """The split that holds out the evaluation share, the second weight's, of documents of these lengths.

    Documents are taken in the order of a hash of their number, so that the choice is spread over the text and is the
    same on every machine, for as long as the sum of their lengths stays within the share.
    """
    total = int(characters.sum())
    share = int(total * (weights[1] / sum(weights)))
    if share == 0:
        return TextSplit(None, total)
    order = np.argsort(mix(np.arange(len(characters), dtype=np.uint64)), kind="stable")
    order = order[characters[order] <= _LARGEST_HELD_OUT * share]
    taken = order[np.cumsum(characters[order]) <= share]
    if int(characters[taken].sum()) < _LEAST_HELD_OUT * share:
        return TextSplit(None, total - share)
    held_out = np.zeros(len(characters), dtype=np.bool_)
    held_out[taken] = True
    return TextSplit(held_out, total)
