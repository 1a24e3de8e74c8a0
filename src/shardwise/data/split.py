"""The parts of data: documents that are trained on, evaluated and tested, and the rules that divide them.

Megatron data and HDF5 shards are cut at cumulative shares of their documents or rows (`part_bounds`). Of text,
documents are held out by a hash of their number, or its end if that comes too far from the share asked for
(`formats.text.plan_split`). A stream holds documents out by where they begin (`samples.streaming.HeldOut`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.base.errors import listing
from shardwise.base.units import count
from shardwise.data.rows import PART_NAMES, Part


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
