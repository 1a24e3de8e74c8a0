"""The tensors of a place against those of a model: names, shapes, dtypes, and second copies of a tied weight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from shardwise.boxes import Box
from shardwise.checkpoint_format.casting import FLOATING, cast
from shardwise.checkpoint_format.manifest import MODEL, TensorEntry
from shardwise.checkpoint_format.spelling import spelling
from shardwise.checkpoint_format.tensors import StoredTensors
from shardwise.checkpoint_format.verify import consecutive

Shapes = Mapping[str, tuple[int, ...]]
TRAINABLE = "float64, float32, float16 or bfloat16"
"""What the dtype of a weight must be, for messages."""
_LAYER = re.compile(r"(?<![^.])\d+(?=\.)")
"""The part of a name that is a number; the first one is the layer's."""


def mismatches(
    where: str,
    shapes: Shapes,
    stored: Mapping[str, TensorEntry],
    *,
    canonical: Mapping[str, str] | None = None,
    needed: Iterable[str] | None = None,
    state: str = MODEL,
) -> list[str]:
    """Every way in which the tensors of a place are not the model's; layers with the same problem share a line.

    Args:
        where: names the place in the lines.
        shapes: canonical name → shape, of the model.
        stored: name at the place → tensor.
        canonical: name at the place → canonical name; other tensors there are no weights. Default: they are the same.
        needed: canonical names that must be there, unless they have no elements. Default: all of the model's.
        state: `model`, or the optimizer state that the tensors belong to.
    """
    names = {name: name for name in stored} if canonical is None else canonical
    known = {name: own for name, own in names.items() if own in shapes}
    lacked = (set(shapes) if needed is None else set(needed)) - set(known.values())
    facts: dict[str, list[tuple[str, object]]] = {
        " lacks {} {}": [(name, list(shapes[name])) for name in shapes if name in lacked and 0 not in shapes[name]],
        " has {} {}, which the model lacks": [(name, list(stored[name].shape)) for name in names if name not in known],
        ": shape of {} {}": [
            (name, f"{list(stored[name].shape)} must be {list(shapes[own])}")
            for name, own in known.items()
            if stored[name].shape != shapes[own]
        ],
        f": dtype of {{}} ({{}}) must be {TRAINABLE}: quantized weights cannot be trained": [
            (name, stored[name].dtype) for name in known if stored[name].dtype not in FLOATING
        ],
    }
    of = "" if state == MODEL else f"the {state} of "
    return [line for text, found in facts.items() for line in lines_of_layers(where, text, found, of)]


def find_sources(
    where: str, family: str, shapes: Shapes, stored: Mapping[str, TensorEntry]
) -> tuple[dict[str, list[str]], list[str]]:
    """Under which names a place holds each canonical tensor, the one to read first; and every mismatch.

    Names may be spelled as `spelling.py` says for the model's family.
    """
    spelled = spelling(family)
    canonical = spelled.canonical(list(stored), set(shapes))
    sources: dict[str, list[str]] = {name: [] for name in shapes}
    for name, own in canonical.items():
        sources.setdefault(own, []).append(name)
    for own, names in sources.items():
        names.sort(key=lambda name: (name != own, name in spelled.tied))
    return sources, mismatches(where, shapes, stored, canonical=canonical)


def differing_copies(
    where: str, tensors: StoredTensors, sources: Mapping[str, Sequence[str]], boxes: Iterable[tuple[str, Box]]
) -> list[str]:
    """Second copies of a tied weight that differ from the first in one of the boxes (canonical name, box).

    Raises:
        StoreError: the weights cannot be read.
    """
    stored = tensors.states[MODEL]
    problems: dict[str, None] = {}
    for own, box in boxes:
        first, *copies = sources[own]
        for copy in copies:
            values = cast(tensors.read(MODEL, copy, box), stored[copy].dtype, stored[first].dtype)
            if not np.array_equal(tensors.read(MODEL, first, box), values):
                problems[f"{where}: {copy} must equal {first}: the model has one weight for both"] = None
    return list(problems)


def lines_of_layers(where: str, text: str, facts: Iterable[tuple[str, object]], of: str = "") -> Iterator[str]:
    """Lines `where` + `text`, one for all layers with the same fact.

    Args:
        where: names the place.
        text: a format of the name and the fact.
        facts: (name, fact); `h.0.ln.bias` … `h.11.ln.bias` are shown as `h.{0…11}.ln.bias`.
        of: stands before each name.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for name, fact in facts:
        numbers = layers.setdefault((_LAYER.sub("*", name, count=1), str(fact)), [])
        numbers += map(int, _LAYER.findall(name)[:1])
    for (pattern, fact), numbers in layers.items():
        runs = ", ".join(f"{a}…{b}" if a < b else f"{a}" for a, b in consecutive(sorted(numbers)))
        name = pattern.replace("*", runs if runs.isdigit() else f"{{{runs}}}", 1)
        yield where + text.format(of + name, fact)
