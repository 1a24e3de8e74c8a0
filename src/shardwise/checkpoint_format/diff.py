"""How two checkpoints differ: configuration, and each tensor's values, whatever layouts wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint_format.casting import cast
from shardwise.checkpoint_format.manifest import TensorEntry
from shardwise.checkpoint_format.safetensors import DTYPES
from shardwise.checkpoint_format.tensors import StoredTensors, ordered_names, ordered_states, segments
from shardwise.storage.root import Root

ABSENT = "(not set)"
"""The value of a key that only the other configuration has."""
_SEGMENT_ELEMENTS = 2**20
_DEEPEST = 20
_CODED = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that both have in the same shape.

    Attributes:
        dtypes: A's and B's.
        equal: both have the same dtype and the same bits.
        largest: max |B − A|, NaN where only one of them is; None for a dtype that is compared by its bits alone.
        relative: ‖B − A‖ / ‖A‖; None as above.
    """

    state: str
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    equal: bool
    largest: float | None
    relative: float | None


@dataclass(frozen=True)
class Difference:
    """What differs between A and B.

    Attributes:
        config: (dotted key, A's value, B's value).
        only_a: (state, name) of tensors that only A holds.
        only_b: (state, name) of tensors that only B holds.
        shapes: (state, name, A's shape, B's shape) where the shapes differ.
        tensors: every tensor that was compared.
    """

    config: tuple[tuple[str, Any, Any], ...]
    only_a: tuple[tuple[str, str], ...]
    only_b: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether the tensors are the same to the bit; the configuration may differ, the layout does by design."""
        return not (self.only_a or self.only_b or self.shapes) and all(each.equal for each in self.tensors)


def diff(a: Root, b: Root, progress: Callable[[int], None] | None = None) -> Difference:
    """Compare two folders, each a checkpoint or Hugging Face weights; a few MiB are held at a time.

    Of two checkpoints the resolved configurations are compared, else what `config.json` says.

    Args:
        progress: called with the number of bytes of A that were compared since the last call.
    """
    ours, theirs = StoredTensors.of(a), StoredTensors.of(b)
    names_a, names_b = list(_names(ours)), list(_names(theirs))
    in_a, in_b = set(names_a), set(names_b)
    shapes, tensors = [], []
    for state, name in names_a:
        if (state, name) not in in_b:
            continue
        entry_a, entry_b = ours.states[state][name], theirs.states[state][name]
        if entry_a.shape != entry_b.shape:
            shapes.append((state, name, entry_a.shape, entry_b.shape))
        else:
            tensors.append(_compare(ours, theirs, state, name, progress))
    return Difference(
        tuple(_config(ours, theirs)),
        tuple(key for key in names_a if key not in in_b),
        tuple(key for key in names_b if key not in in_a),
        tuple(shapes),
        tuple(tensors),
    )


def nbytes(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _names(tensors: StoredTensors) -> Iterator[tuple[str, str]]:
    return ((state, name) for state in ordered_states(tensors.states) for name in ordered_names(tensors.states[state]))


def _compare(
    a: StoredTensors, b: StoredTensors, state: str, name: str, progress: Callable[[int], None] | None
) -> TensorDifference:
    entry = a.states[state][name]
    dtypes = entry.dtype, b.states[state][name].dtype
    equal = dtypes[0] == dtypes[1]
    largest, squares, reference = 0.0, 0.0, 0.0
    for box in segments(entry.shape, _SEGMENT_ELEMENTS):
        bits_a, bits_b = a.read(state, name, box), b.read(state, name, box)
        if progress is not None:
            progress(bits_a.nbytes)
        same = dtypes[0] == dtypes[1] and bits_a.tobytes() == bits_b.tobytes()
        equal = equal and same
        if any(dtype in _CODED for dtype in dtypes):
            continue
        values = _values(bits_a, dtypes[0])
        reference += float(np.vdot(values, values))
        if not same:
            with np.errstate(invalid="ignore", over="ignore"):
                change = np.abs(_values(bits_b, dtypes[1]) - values)
                change[np.isnan(change) & _equally_non_finite(bits_a, bits_b, dtypes)] = 0.0
                largest = float(np.maximum(largest, change.max()))
                squares += float(np.vdot(change, change))
    if any(dtype in _CODED for dtype in dtypes):
        return TensorDifference(state, name, entry.shape, dtypes, equal, None, None)
    relative = 0.0 if squares == 0 else math.sqrt(squares / reference) if reference else math.inf
    return TensorDifference(state, name, entry.shape, dtypes, equal, largest, relative)


def _equally_non_finite(a: npt.NDArray[Any], b: npt.NDArray[Any], dtypes: tuple[str, str]) -> npt.NDArray[np.bool_]:
    """Where both hold the same infinity or NaN: no change, though their difference is NaN."""
    values_a, values_b = _values(a, dtypes[0]), _values(b, dtypes[1])
    both: npt.NDArray[np.bool_] = (values_a == values_b) | (np.isnan(values_a) & np.isnan(values_b))
    return both


def _values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """All values of a tensor, in one dim."""
    flat = cast(bits.reshape(-1), dtype, "F32") if dtype == "BF16" else bits.reshape(-1)
    values: npt.NDArray[np.float64] = flat.astype(np.float64)
    return values


def _config(a: StoredTensors, b: StoredTensors) -> Iterator[tuple[str, Any, Any]]:
    if a.manifest is not None and b.manifest is not None:
        ours, theirs = _flat(a.manifest.config), _flat(b.manifest.config)
    else:
        ours, theirs = _flat(a.config()), _flat(b.config())
    for key in dict.fromkeys([*ours, *theirs]):
        value, other = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if value != other:
            yield key, value, other


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and prefix.count(".") < _DEEPEST:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
