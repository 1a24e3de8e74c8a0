"""Tensors of tensor-parallel ranks, put together: no more than a few rows are in memory at a time."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.base.units import counted
from shardwise.checkpoint.format.stored_tensors import TRAINABLE, Shapes, lines_of_layers, tensor_mismatches
from shardwise.checkpoint.format.writing import StreamedWeight
from shardwise.checkpoint.weight_writers import DTYPE_NAMES
from shardwise_use.importing.torch_dcp import LazyTensor

_SHOWN = 8
_DIVIDED_FILES = re.compile(r"mp_rank_\d+_\d+_\d+|dp_rank_\d+_ep_rank_\d+_.*\.pt")
"""Names of the files of ranks that divide experts, of Megatron-LM and of neuronx-distributed."""
_DRIFT_REFUSED = "replicas have drifted apart (--allow-drift takes the first ones), or are of different checkpoints"
_DRIFT_TOO_LARGE = (
    "they differ by more than their norm, as unrelated matrices do: they are of different checkpoints, or the model's "
    "configuration (such as num_key_value_heads) is not that of the shards"
)
_MOST_DRIFT = 1.0
"""The largest `replica_drift` of matrices that may be replicas: that of two random ones is √2, whatever their scale."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size → integers with the same bits."""


def _same_bits(tensor: Tensor, replica: Tensor) -> bool:
    """True if two tensors are equal; a NaN equals itself."""
    if tensor is replica:
        return True
    if tensor.dtype != replica.dtype or tensor.shape != replica.shape:
        return False
    integers = _INTEGERS[tensor.element_size()] if tensor.is_floating_point() else tensor.dtype
    return torch.equal(tensor.view(integers), replica.view(integers))


def replica_drift(tensor: Tensor, replica: Tensor) -> float:
    """The norm of the difference of two imported replicas, relative to the larger norm; infinite if it is no number."""
    if _same_bits(tensor, replica):
        return 0.0
    if tensor.shape != replica.shape:
        return math.inf
    # Relative to the larger norm the result is symmetric, and at most 2.
    norm = float(torch.maximum(tensor.float().norm(), replica.float().norm()))
    # 0 and -0 are equal and have other bits.
    if norm == 0.0:
        return 0.0
    relative = float((tensor.float() - replica.float()).norm()) / norm
    return relative if math.isfinite(relative) else math.inf


def tensor_parallel_files(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """(tensor rank, stage) → the file or folder with these numbers; ConfigError: no such folder, or a sparse model."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} must be the folder of a checkpoint: there is no folder of that name")
    ranks: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        if _DIVIDED_FILES.fullmatch(path.name):
            raise ConfigError(f"{folder} is of a model with experts ({path.name}): save it again as torch_dist")
        if match := pattern.fullmatch(path.name):
            numbers = [int(number) for number in match.groups() if number]
            ranks[numbers[0], numbers[1] if len(numbers) > 1 else 0] = path
    return ranks


def require_all_ranks(where: str, ranks: Set[tuple[int, int]], tensor: int, pipeline: int, name: str) -> None:
    """Raise ConfigError where a checkpoint's ranks are not those of its degrees; `name`: format of ranks."""
    expected = {(t, p) for t in range(tensor) for p in range(pipeline)}
    degrees = f"TP {tensor} × PP {pipeline}"
    problems = [
        f"{where} must have {text} {listing((name.format(*rank) for rank in sorted(wrong)), most=_SHOWN)}"
        for text, wrong in (
            (f"every rank of {degrees}: it lacks", expected - ranks),
            (f"the ranks of {degrees} alone: it also has", ranks - expected),
        )
        if wrong
    ]
    if problems:
        raise ConfigError(problems)


@dataclass
class TensorParallelShards:
    """The tensors of an imported checkpoint, of all tensor-parallel ranks and pipeline stages.

    What ranks disagree on is collected, so that the user reads all of it at once. A tensor that is missing or has
    another shape is an error by itself. Replicas that differ are a problem unless drift is allowed: stochastic
    rounding, for one, draws other bits on every rank.
    """

    where: str
    ranks: int  # tensor-parallel degree
    allow_drift: bool = False
    # Name → its tensors, one for each tensor-parallel rank.
    tensors: dict[str, list[LazyTensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)
    _accepted_drifts: dict[str, float] = field(default_factory=dict)
    """Name → drift of replicas of which the first is taken."""
    _refused_drifts: list[tuple[str, str]] = field(default_factory=list)
    """(name, what the replicas must be)."""

    def add(self, tensors_by_rank: Sequence[Mapping[str, Tensor | LazyTensor]], place: str) -> None:
        """Add one pipeline stage's tensors, by tensor-parallel rank; `place` names the stage in messages."""
        for name in dict.fromkeys(name for tensors in tensors_by_rank for name in tensors):
            lacking = [rank for rank, tensors in enumerate(tensors_by_rank) if name not in tensors]
            if lacking:
                self.problems.append(
                    f"{self.where}: tensor-parallel rank {', '.join(map(str, lacking))} lacks {name} {place}"
                )
                continue
            held = [tensors[name] for tensors in tensors_by_rank]
            parts = [part if isinstance(part, LazyTensor) else LazyTensor.of(part) for part in held]
            same = "must be the same on every pipeline stage that has it: they differ on tensor-parallel rank {}"
            # Several stages may have a tensor, such as a tied embedding: the first one counts.
            self._require_equal(name, self.tensors.setdefault(name, parts), parts, same)

    def require_tied(self, name: str, copy: str) -> None:
        """Note where a copy of a tied weight, if there is one, differs from it."""
        if not self.has(copy) or not self.has(name):
            return
        self._used.add(copy)
        equal = f"must equal {name}, the model has one weight for both: they differ on tensor-parallel rank {{}}"
        self._require_equal(copy, self.tensors[name], self.tensors[copy], equal)

    def _require_equal(self, name: str, parts: Sequence[LazyTensor], replicas: Sequence[LazyTensor], text: str) -> None:
        """Note replicas that differ, rank by rank; `text`: what the tensor must be, with a place for the ranks."""
        drifts = {
            str(rank): replica_drift(part.read(), replica.read())
            for rank, (part, replica) in enumerate(zip(parts, replicas, strict=True))
            if part is not replica and not _same_bits(part.read(), replica.read())
        }
        if drifts:
            requirement = text.format(", ".join(drifts))
            self.note_drift(name, max(drifts.values()), requirement, are_matrices=len(parts[0].shape) > 1)

    def note_drift(self, name: str, drift: float, requirement: str, *, are_matrices: bool) -> None:
        """Note the `replica_drift` of replicas; `requirement`: what the tensor must be.

        Vectors are not bounded: biases begin at 0, so that their drift may be larger than they are, and norm weights
        are much alike in any model.
        """
        if not self.allow_drift:
            self._refused_drifts.append((name, requirement))
        elif drift <= _MOST_DRIFT if are_matrices else math.isfinite(drift):
            self._accepted_drifts[name] = drift
        else:
            self._refused_drifts.append((name, f"{requirement} ({drift:.0%} of their norm)"))

    @property
    def notes(self) -> list[str]:
        """A sentence for the user on replicas that differ and are taken."""
        if not self._accepted_drifts:
            return []
        name, largest = max(self._accepted_drifts.items(), key=lambda accepted: accepted[1])
        return [
            f"replicas of {counted(len(self._accepted_drifts), 'tensor')} differ, at most by "
            f"{largest:.2%} of their norm ({name}): the first ones are taken"
        ]

    def require_floats(self) -> None:
        """Refuse tensors that cannot be weights, and ranks that differ; ConfigError with all that was noted."""
        wrong_dtypes: list[tuple[str, str]] = []
        wrong_shapes: list[tuple[str, str]] = []
        for name, parts in self.tensors.items():
            dtypes = {part.dtype for part in parts}
            if len(dtypes) > 1 or not dtypes <= set(DTYPE_NAMES):
                dtype_names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
                wrong_dtypes.append((name, " and ".join(dtype_names)))
            if len({part.shape for part in parts}) > 1 or not parts[0].shape:
                wrong_shapes.append((name, ", ".join(f"{list(part.shape)}" for part in parts)))
        same = "the same on every tensor-parallel rank"
        dtype_line = f": dtype of {{}} ({{}}) must be {TRAINABLE}, {same}"
        self.problems += lines_of_layers(self.where, dtype_line, wrong_dtypes)
        self.problems += lines_of_layers(self.where, f": shape of {{}} must be {same}: it is {{}}", wrong_shapes)
        if self.problems:
            raise ConfigError(self.problems)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def parts(self, name: str) -> list[LazyTensor]:
        """The tensors of a name, one for each rank; ConfigError: no rank has it."""
        if name not in self.tensors:
            raise ConfigError(f"{self.where} lacks {name}")
        self._used.add(name)
        return self.tensors[name]

    def columns(self, name: str) -> LazyTensor:
        """A weight of a column-parallel layer or an embedding: cut along dim 0."""
        return LazyTensor.cat(self.parts(name))

    def rows(self, name: str) -> LazyTensor:
        """A weight of a row-parallel layer: cut along dim 1."""
        parts = self.parts(name)
        if any(len(part.shape) != 2 for part in parts):
            raise self.misshapen(name, parts[0].shape, "a matrix")
        return LazyTensor.cat([part.t for part in parts]).t

    def copies(self, name: str) -> LazyTensor:
        """A tensor that every rank has whole: all copies must agree to the bit."""
        parts = self.parts(name)
        # Each copy is compared with the first one, which is taken.
        same = "must be the same on every tensor-parallel rank, and differs between rank 0 and rank {}"
        self._require_equal(name, parts[:1] * len(parts), parts, same)
        return parts[0]

    def split(self, name: str, sizes: Sequence[int]) -> list[LazyTensor]:
        """Tensors of `sizes` rows on each rank, which the ranks hold one below the other as one tensor."""
        parts = self.parts(name)
        if any(len(part) != sum(sizes) for part in parts):
            raise self.misshapen(name, parts[0].shape, f"{sum(sizes)} rows on each tensor-parallel rank")
        stops = list(itertools.accumulate(sizes))
        return [
            LazyTensor.cat([part.rows(stop - size, stop) for part in parts])
            for size, stop in zip(sizes, stops, strict=True)
        ]

    def misshapen(self, name: str, shape: Sequence[int], requirement: str) -> ConfigError:
        """Return the error of a tensor of a wrong shape; `requirement`: what the shape must be."""
        return ConfigError(f"{self.where}: shape of {name} {list(shape)} must be {requirement}")

    def weights(self, shapes: Shapes, tensors: Mapping[str, LazyTensor]) -> list[StreamedWeight]:
        """The canonical weights, in the order of `shapes`, of `tensors` by name; ConfigError with everything wrong."""
        unused = [(name, list(parts[0].shape)) for name, parts in self.tensors.items() if name not in self._used]
        drift_line = f": {{}} {{}}: {_DRIFT_TOO_LARGE if self.allow_drift else _DRIFT_REFUSED}"
        problems = [
            *lines_of_layers(self.where, drift_line, self._refused_drifts),
            *lines_of_layers(self.where, " has {} {}, which the model lacks", unused),
            *tensor_mismatches(self.where, shapes, {name: tensor.entry for name, tensor in tensors.items()}),
        ]
        if problems:
            raise ConfigError(problems)
        return [tensors[name].streamed(name) for name in shapes]
