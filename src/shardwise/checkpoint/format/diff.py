"""Differences of two checkpoints: configuration, and each tensor's values, whatever layouts wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import StoreError
from shardwise.base.tensor_box import box_segments
from shardwise.base.yaml_and_json import by_dotted_key, json_value
from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.safetensors import CODED, Values, cast_values
from shardwise.checkpoint.format.stored_tensors import StoredTensors, ordered_names, ordered_states
from shardwise.checkpoint.format.weight_files import MAX_INDEX_BYTES
from shardwise.checkpoint.format.writing import CONFIG
from shardwise.checkpoint.storage.root import Root

ABSENT = "(not set)"
_SEGMENT_ELEMENTS = 2**20


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor that two checkpoints have in the same shape."""

    state: str
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]  # A's and B's
    equal: bool  # both have the same dtype and the same bits
    # Max |B − A|, NaN where only one of them is; None for a dtype that is compared by its bits alone.
    largest: float | None
    relative: float | None  # ‖B − A‖ / ‖A‖; None as above


@dataclass(frozen=True)
class FolderDifference:
    """The differences between two checkpoints A and B."""

    config: tuple[tuple[str, Any, Any], ...]  # (dotted key, A's value, B's value)
    only_a: tuple[tuple[str, str], ...]  # (state, name) of tensors that only A holds
    only_b: tuple[tuple[str, str], ...]  # (state, name) of tensors that only B holds
    # (state, name, A's shape, B's shape) where the shapes differ.
    shapes: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """True if the tensors are the same to the bit; the configuration may differ, the layout does by design."""
        return self._has_same_names and all(tensor.equal for tensor in self.tensors)

    def within(self, tolerance: float) -> bool:
        """Return whether both have the same tensors, in any dtypes, each with a relative difference within a bound."""
        return self._has_same_names and all(
            tensor.equal or (tensor.relative is not None and tensor.relative <= tolerance) for tensor in self.tensors
        )

    @property
    def _has_same_names(self) -> bool:
        return not (self.only_a or self.only_b or self.shapes)


def diff_folders(a: Root, b: Root, progress: Callable[[int], None] = lambda _: None) -> FolderDifference:
    """Compare two folders, each a checkpoint or Hugging Face weights; a few MiB are held at a time.

    Of two checkpoints the resolved configurations are compared, else what `config.json` says. `progress` is called with
    the number of bytes of A that were compared since the last call.
    """
    tensors_a = StoredTensors.of(a)
    tensors_b = StoredTensors.of(b)
    entries_a = _entries(tensors_a)
    entries_b = _entries(tensors_b)
    shapes: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = []
    compared: list[TensorDifference] = []
    for (state, name), entry in entries_a.items():
        entry_b = entries_b.get((state, name))
        if entry_b is None:
            continue
        if entry.shape == entry_b.shape:
            compared.append(_compare(tensors_a, tensors_b, state, name, progress))
        else:
            shapes.append((state, name, entry.shape, entry_b.shape))
    return FolderDifference(
        config=tuple(_config_differences(tensors_a, tensors_b)),
        only_a=tuple(key for key in entries_a if key not in entries_b),
        only_b=tuple(key for key in entries_b if key not in entries_a),
        shapes=tuple(shapes),
        tensors=tuple(compared),
    )


def _entries(tensors: StoredTensors) -> dict[tuple[str, str], TensorEntry]:
    entries: dict[tuple[str, str], TensorEntry] = {}
    for state in ordered_states(tensors.states):
        for name in ordered_names(tensors.states[state]):
            entries[state, name] = tensors.states[state][name]
    return entries


def _compare(
    a: StoredTensors, b: StoredTensors, state: str, name: str, progress: Callable[[int], None]
) -> TensorDifference:
    """Compare a tensor that both hold in one shape, a segment at a time."""
    entry = a.states[state][name]
    dtype_a = entry.dtype
    dtype_b = b.states[state][name].dtype
    has_values = dtype_a not in CODED and dtype_b not in CODED
    is_equal = dtype_a == dtype_b
    largest = 0.0
    change_squares = 0.0
    reference_squares = 0.0
    for box in box_segments(entry.shape, _SEGMENT_ELEMENTS):
        bits_a = a.read(state, name, box)
        bits_b = b.read(state, name, box)
        progress(bits_a.nbytes)
        # Bytes are compared, because a NaN is not equal to itself.
        has_same_bits = dtype_a == dtype_b and bits_a.tobytes() == bits_b.tobytes()
        is_equal = is_equal and has_same_bits
        if not has_values:
            continue
        values_a = _values(bits_a, dtype_a)
        reference_squares += float(np.vdot(values_a, values_a))
        if not has_same_bits:
            values_b = _values(bits_b, dtype_b)
            with np.errstate(invalid="ignore", over="ignore"):
                change = np.abs(values_b - values_a)
                # The same infinity or NaN in both is no change, though their difference is NaN.
                change[(values_a == values_b) | (np.isnan(values_a) & np.isnan(values_b))] = 0.0
                largest = float(np.maximum(largest, change.max()))
                change_squares += float(np.vdot(change, change))
    dtypes = (dtype_a, dtype_b)
    if not has_values:
        return TensorDifference(state, name, entry.shape, dtypes, is_equal, None, None)
    relative = 0.0
    # A sum that is NaN is unequal to 0 too, and so is the result.
    if change_squares != 0:
        relative = math.sqrt(change_squares / reference_squares) if reference_squares else math.inf
    return TensorDifference(state, name, entry.shape, dtypes, is_equal, largest, relative)


def _values(bits: Values, dtype: str) -> npt.NDArray[np.float64]:
    # numpy has no bfloat16: its bits become those of a float32.
    flat = bits.reshape(-1)
    if dtype == "BF16":
        flat = cast_values(flat, dtype, "F32")
    return flat.astype(np.float64)


def _config_differences(a: StoredTensors, b: StoredTensors) -> Iterator[tuple[str, Any, Any]]:
    configs = [tensors.manifest.config for tensors in (a, b) if tensors.manifest is not None]
    if len(configs) < 2:
        configs = [_described(tensors.folder) for tensors in (a, b)]
    config_a, config_b = map(by_dotted_key, configs)
    for key in {**config_a, **config_b}:
        value_a = config_a.get(key, ABSENT)
        value_b = config_b.get(key, ABSENT)
        if value_a != value_b:
            yield key, value_a, value_b


def _described(folder: Root) -> dict[str, Any]:
    try:
        fields = json_value((folder / CONFIG).read(0, MAX_INDEX_BYTES))
    except (StoreError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
