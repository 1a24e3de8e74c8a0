"""Layers whose sums are made of parts of fixed shape, which no layout changes by a bit (docs/bitwise.md).

Here is the choice of a layer's class: a bit-equal one in a group whose sums are made of parts (`Group.grain`).

Ordinary layers know nothing of parts. A layer whose group has a grain takes a class of this folder when it is made, as
torch's `fully_shard` gives a module another class. Ordinary runs load none of these classes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from shardwise.distributed.mesh import Group

_Class = TypeVar("_Class", bound=type)


class _Layer(Protocol):
    group: Group


def choose_class(layer: _Layer) -> None:
    """Give a layer the class that its group needs. Its constructor calls this last."""
    if layer.group.grain is not None:
        kind: Any = bit_equal(type(layer))
        layer.__class__ = kind
        if hasattr(kind, "prepare"):
            kind.prepare(layer)


@cache
def bit_equal(ordinary: _Class) -> _Class:
    """Return the bit-equal class of an ordinary one; of a user's subclass one that is bit-equal in what it inherits."""
    # By name: `layers.py` imports the ordinary layers, which import this file.
    kinds = vars(import_module(f"{__package__}.layers"))
    classes = {kind.__bases__[0]: kind for name, kind in kinds.items() if name.startswith("BitEqual")}
    base = next(base for base in ordinary.__mro__ if base in classes)
    if base is ordinary:
        return cast(_Class, classes[base])
    # The subclass comes first, so that its methods override and call those of the bit-equal class.
    kind = classes[base]
    return cast(_Class, type(f"BitEqual{ordinary.__name__}", (ordinary, kind), {"__module__": kind.__module__}))
