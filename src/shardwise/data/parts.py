"""The parts of data: what is trained on, what is evaluated, and what is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from shardwise.base.errors import listing
from shardwise.base.units import count

Part = Literal["train", "eval", "test"]
PART_NAMES: dict[Part, str] = {"train": "training", "eval": "evaluation", "test": "test"}
"""All parts in the order of the weights of `data.split`, as messages call them."""
PARTS: tuple[Part, ...] = tuple(PART_NAMES)


def part_bounds(number: int, weights: Sequence[float]) -> list[int]:
    """The first of `number` things of each part, then `number`: cumulative shares, each rounded, as Megatron cuts."""
    total, share, bounds = sum(weights), 0.0, [0]
    for weight in weights:
        share += weight / total
        bounds.append(round(share * number))
    return bounds


def describe_sizes(sizes: Mapping[Part, int]) -> str:
    """The size of each part, such as "1.2 M training and 40 k evaluation"; an empty test part is left out."""
    return listing([f"{count(size)} {PART_NAMES[part]}" for part, size in sizes.items() if part != "test" or size])
