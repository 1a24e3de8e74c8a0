"""The axes of the mesh, one record each, and the places of ranks along them.

`Layout` and `Mesh` are built from these records. A further axis is an entry of `AXES`, with a field of `Layout` and,
where users choose its degree, a key of the section `parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh."""

    name: str  # short name, which groups, reports and the files of a run use; capital letters in texts
    degree: str  # name of the number of ranks along the axis, which is an attribute of `Layout` and a key of `parallel`
    title: str
    # True if no key gives the degree: the axis has the ranks that the degrees of the others leave.
    fills_world: bool = False
    is_optional: bool = False  # True if texts and files name the axis only where its degree is above 1

    @property
    def key(self) -> str:
        """The configuration key of the degree."""
        return f"parallel.{self.degree}"


PIPELINE = Axis("pp", "pipeline", "pipeline degree")
DATA = Axis("dp", "data", "data-parallel degree", fills_world=True)
CONTEXT = Axis("cp", "context", "context-parallel degree", is_optional=True)
TENSOR = Axis("tp", "tensor", "tensor-parallel degree")

AXES = (PIPELINE, DATA, CONTEXT, TENSOR)
"""All axes, the outermost first: rank = ((pp · DP + dp) · CP + cp) · TP + tp.

Tensor-parallel ranks are neighbours, since they communicate most: they should share a node and its links. Ranks that
share samples come next. The pipeline is the outermost axis, as its ranks send least (Megatron-LM, arXiv:2104.04473
§3.2).
"""
CHOSEN_AXES = tuple(axis for axis in reversed(AXES) if not axis.fills_world)
"""The axes whose degrees the user chooses, the innermost first, as texts name them."""
EXPERT = Axis("ep", "expert", "expert-parallel degree", is_optional=True)
"""The ranks, of those of data and context parallelism, that divide the experts of a block: no axis of the mesh."""
CHOSEN_DEGREES = (*CHOSEN_AXES, EXPERT)
"""The records of all degrees that the user chooses."""

DIVIDING_KEYS = (TENSOR.key, EXPERT.key, PIPELINE.key)
"""The keys of the degrees that divide the weights of a model over ranks."""
ALIKE = "experts"
"""Name, within that of replicas, of the ranks that hold the same experts: `dp/experts`."""


def names_axis(axis: Axis, degrees: Mapping[str, int]) -> bool:
    """True if texts and files name this axis of a mesh with these degrees, by the name of the degree."""
    return not axis.is_optional or degrees.get(axis.degree, 1) > 1


def replica_axes_name(data: int, context: int) -> str:
    """The joint name of the mesh axes along which ranks have the same part of the model: data and context."""
    if context == 1:
        return DATA.name
    return CONTEXT.name if data == 1 else f"{DATA.name}_{CONTEXT.name}"


def layout_text(degrees: Mapping[str, int], *, sequence: bool = False, ones: bool = True) -> str:
    """The mesh's axes and degrees as every text writes them: `TP 2 + SP × PP 2 × DP 2`.

    Args:
        degrees: ranks along each axis, by the name of the degree, and the expert-parallel degree, which divides those
            of data and context parallelism; other entries do not count.
        sequence: activations are cut along the sequence too (SP).
        ones: name degrees of 1, but for those of optional axes.
    """
    words = []
    for axis in (*CHOSEN_AXES, DATA):
        if not names_axis(axis, degrees):
            continue
        degree = degrees[axis.degree]
        if ones or degree > 1:
            words.append(f"{axis.name.upper()} {degree}{' + SP' if axis is TENSOR and sequence and degree > 1 else ''}")
    text = " × ".join(words)
    return f"{text} ({EXPERT.name.upper()} {degrees[EXPERT.degree]})" if names_axis(EXPERT, degrees) else text


def degree_keys_text(degrees: Mapping[str, int]) -> str:
    """The mesh axes by keys with their degrees, without the outermost axes that have degree 1.

    An example is `parallel.tensor × parallel.context (2 × 4 = 8)`.
    """
    axes = [axis for axis in CHOSEN_AXES if names_axis(axis, degrees)]
    while len(axes) > 1 and degrees[axes[-1].degree] == 1:
        axes.pop()
    values = [degrees[axis.degree] for axis in axes]
    product = f" = {math.prod(values)}" if len(axes) > 1 else ""
    return f"{' × '.join(axis.key for axis in axes)} ({' × '.join(map(str, values))}{product})"


def rank_coordinates(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """The place of a rank along each axis, by the axis' short name, the outermost axis first."""
    places = {}
    for axis in reversed(AXES):
        rank, places[axis.name] = divmod(rank, degrees.get(axis.degree, 1))
    return {axis.name: places[axis.name] for axis in AXES if names_axis(axis, degrees)}
