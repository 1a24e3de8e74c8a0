"""The axes of the mesh, one record each, and the places of ranks along them.

`Layout` and `Mesh` are built from these records. A further axis is an entry of `AXES`, with a field of `Layout` and,
where users choose its degree, a key of the section `parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        name: short name, which groups, reports and the files of a run use; capital letters in texts.
        degree: name of the number of ranks along the axis, which is an attribute of `Layout` and a key of `parallel`.
        title: words for the degree in messages.
        fills_world: True if no key gives the degree: the axis has the ranks that the degrees of the others leave.
    """

    name: str
    degree: str
    title: str
    fills_world: bool = False

    @property
    def key(self) -> str:
        """The configuration key of the degree."""
        return f"parallel.{self.degree}"


PIPELINE = Axis("pp", "pipeline", "pipeline degree")
DATA = Axis("dp", "data", "data-parallel degree", fills_world=True)
CONTEXT = Axis("cp", "context", "context-parallel degree")
TENSOR = Axis("tp", "tensor", "tensor-parallel degree")

AXES = (PIPELINE, DATA, CONTEXT, TENSOR)
"""All axes, the outermost first: rank = ((pp · DP + dp) · CP + cp) · TP + tp.

Tensor-parallel ranks are neighbours, since they communicate most: they should share a node and its links. Ranks that
share samples come next. The pipeline is the outermost axis, as its ranks send least (Megatron-LM, arXiv:2104.04473
§3.2).
"""
CHOSEN_AXES = tuple(axis for axis in reversed(AXES) if not axis.fills_world)
"""The axes whose degrees the user chooses, the innermost first, as texts name them."""


def replicas_name(data: int, context: int) -> str:
    """The name of the group of ranks that have the same part of the model: those of data and context parallelism."""
    if context == 1:
        return DATA.name
    return CONTEXT.name if data == 1 else f"{DATA.name}_{CONTEXT.name}"


def layout_text(degrees: Mapping[str, int], *, sequence: bool = False, ones: bool = True) -> str:
    """A layout as every text writes it: `TP 2 + SP × PP 2 × DP 2`.

    Args:
        degrees: ranks along each axis, by the name of the degree; other entries do not count.
        sequence: activations are cut along the sequence too (SP).
        ones: name degrees of 1, but for that of context parallelism.
    """
    words = []
    for axis in (*CHOSEN_AXES, DATA):
        # Files of runs before context parallelism lack its degree.
        degree = degrees.get(axis.degree, 1) if axis is CONTEXT else degrees[axis.degree]
        if degree > 1 or (ones and axis is not CONTEXT):
            words.append(f"{axis.name.upper()} {degree}{' + SP' if axis is TENSOR and sequence and degree > 1 else ''}")
    return " × ".join(words)


def coordinates(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """The place of a rank along each axis, by the axis' short name, the outermost axis first.

    Args:
        rank: number of the rank in the job.
        degrees: ranks along each axis, by the name of the degree.
    """
    places = {}
    for axis in reversed(AXES):
        rank, places[axis.name] = divmod(rank, degrees[axis.degree])
    return {axis.name: places[axis.name] for axis in AXES}
