"""How two checkpoints differ: configuration, and each tensor's values, whatever layouts wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.safetensors import cast
from shardwise.checkpoint.format.stored_tensors import StoredTensors, ordered_names, ordered_states, segments
from shardwise.checkpoint.storage.root import Root

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
        only_a, only_b: (state, name) of tensors that only one of them holds.
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
        return not (self.only_a or self.only_b or self.shapes) and all(tensor.equal for tensor in self.tensors)


def diff(a: Root, b: Root, progress: Callable[[int], None] | None = None) -> Difference:
    """Compare two folders, each a checkpoint or Hugging Face weights; a few MiB are held at a time.

    Of two checkpoints the resolved configurations are compared, else what `config.json` says.

    Args:
        progress: called with the number of bytes of A that were compared since the last call.
    """
    ours, theirs = StoredTensors.of(a), StoredTensors.of(b)
    entries_a, entries_b = _entries(ours), _entries(theirs)
    both = {key: (entry, entries_b[key]) for key, entry in entries_a.items() if key in entries_b}
    return Difference(
        config=tuple(_config(ours, theirs)),
        only_a=tuple(key for key in entries_a if key not in both),
        only_b=tuple(key for key in entries_b if key not in both),
        shapes=tuple((*key, one.shape, other.shape) for key, (one, other) in both.items() if one.shape != other.shape),
        tensors=tuple(
            _compare(ours, theirs, *key, progress) for key, (one, other) in both.items() if one.shape == other.shape
        ),
    )


def _entries(tensors: StoredTensors) -> dict[tuple[str, str], TensorEntry]:
    states = tensors.states
    return {
        (state, name): states[state][name] for state in ordered_states(states) for name in ordered_names(states[state])
    }


def _compare(
    a: StoredTensors, b: StoredTensors, state: str, name: str, progress: Callable[[int], None] | None
) -> TensorDifference:
    entry = a.states[state][name]
    dtypes = entry.dtype, b.states[state][name].dtype
    equal, has_values = dtypes[0] == dtypes[1], not any(dtype in _CODED for dtype in dtypes)
    largest, squares, reference = 0.0, 0.0, 0.0
    for box in segments(entry.shape, _SEGMENT_ELEMENTS):
        bits_a, bits_b = a.read(state, name, box), b.read(state, name, box)
        if progress is not None:
            progress(bits_a.nbytes)
        same = dtypes[0] == dtypes[1] and bits_a.tobytes() == bits_b.tobytes()
        equal = equal and same
        if not has_values:
            continue
        values = _values(bits_a, dtypes[0])
        reference += float(np.vdot(values, values))
        if not same:
            others = _values(bits_b, dtypes[1])
            with np.errstate(invalid="ignore", over="ignore"):
                change = np.abs(others - values)
                # The same infinity or NaN in both is no change, though their difference is NaN.
                change[(values == others) | (np.isnan(values) & np.isnan(others))] = 0.0
                largest = float(np.maximum(largest, change.max()))
                squares += float(np.vdot(change, change))
    if not has_values:
        return TensorDifference(state, name, entry.shape, dtypes, equal, None, None)
    relative = 0.0 if squares == 0 else math.sqrt(squares / reference) if reference else math.inf
    return TensorDifference(state, name, entry.shape, dtypes, equal, largest, relative)


def _values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """All values of a tensor, in one dim."""
    flat = bits.reshape(-1)
    return (cast(flat, dtype, "F32") if dtype == "BF16" else flat).astype(np.float64)


def _config(a: StoredTensors, b: StoredTensors) -> Iterator[tuple[str, Any, Any]]:
    if a.manifest is not None and b.manifest is not None:
        ours, theirs = by_dotted_key(a.manifest.config), by_dotted_key(b.manifest.config)
    else:
        ours, theirs = by_dotted_key(a.config()), by_dotted_key(b.config())
    for key in {**ours, **theirs}:
        value, other = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if value != other:
            yield key, value, other


def by_dotted_key(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        is_section = isinstance(value, Mapping) and prefix.count(".") < _DEEPEST
        flat |= by_dotted_key(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat
