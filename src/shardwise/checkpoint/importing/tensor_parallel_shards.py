"""Tensors of tensor-parallel ranks, put together as views: no more than a few rows are in memory at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.base.units import counted
from shardwise.checkpoint.collective_reading import DTYPE_NAMES
from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.stored_tensors import TRAINABLE, Shapes, lines_of_layers, mismatches
from shardwise.checkpoint.format.writing import STREAM_BYTES, StreamedWeight
from shardwise.checkpoint.storage.root import Buffer

_SHOWN = 8
_DRIFT = "replicas have drifted apart (--allow-drift takes the first ones), or are of different checkpoints"
_NO_DRIFT = (
    "they differ by more than their norm, as unrelated matrices do: they are of different checkpoints, or the model's "
    "configuration (such as num_key_value_heads) is not that of the shards"
)
_MOST_DRIFT = 1.0
"""The largest `difference` of matrices that may be replicas: that of two random ones is √2, whatever their scale."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Stacked:
    """`torch.cat(parts)`, transposed or not, which is never in memory as a whole.

    Without parts it stands for a tensor that is missing or misshapen, which `Shards` has noted.
    """

    parts: tuple[Tensor, ...] = ()
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = (sum(len(part) for part in self.parts), *self.parts[0].shape[1:])
        return rows[::-1] if self.transposed else rows

    @property
    def t(self) -> Stacked:
        return Stacked(self.parts, not self.transposed)

    def rows(self, start: int, stop: int) -> Stacked:
        assert not self.transposed
        inside, at = [], 0
        for part in self.parts:
            low, high = max(start - at, 0), min(stop - at, len(part))
            if low < high:
                inside.append(part[low:high])
            at += len(part)
        return Stacked(tuple(inside))

    def read(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, in memory."""
        if self.transposed:
            return torch.cat([part[:, start:stop] for part in self.parts]).t()
        return torch.cat(self.rows(start, stop).parts)

    def segments(self) -> Iterator[Buffer]:
        """The bytes, row-major, as many at a time as `STREAM_BYTES` allows, and no less than a row."""
        total = self.shape[0]
        row = max(1, torch.Size(self.shape[1:]).numel() * self.parts[0].element_size())
        step = max(1, STREAM_BYTES // row)
        for start in range(0, total, step):
            data = self.read(start, min(start + step, total)).contiguous()
            yield data.view(torch.uint8).numpy().data.cast("B")

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.shape, DTYPE_NAMES[self.parts[0].dtype], ())


def stack(tensors: Iterable[Stacked]) -> Stacked:
    """One below the other."""
    return Stacked(tuple(part for tensor in tensors for part in tensor.parts))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; a NaN equals itself."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = _BITS[one.element_size()] if one.is_floating_point() else one.dtype
    return torch.equal(one.view(bits), other.view(bits))


def difference(one: Tensor, other: Tensor) -> float:
    """The norm of the difference of two tensors as a part of the larger norm of both; infinite if it is no number."""
    if same_bits(one, other):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    norm = float(torch.maximum(one.float().norm(), other.float().norm()))
    part = float((one.float() - other.float()).norm()) / norm if norm else 0.0  # 0 and -0 have other bits
    return part if math.isfinite(part) else math.inf


def _differing(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> str:
    """The ranks whose tensors differ, such as `1, 3`."""
    pairs = zip(tensors, others, strict=True)
    return ", ".join(str(rank) for rank, (one, other) in enumerate(pairs) if not same_bits(one, other))


def require_ranks(
    where: str, ranks: Set[tuple[int, int]], tensor: int, pipeline: int, name: Callable[[int, int], str]
) -> None:
    """ConfigError where (tensor-parallel rank, pipeline stage) are not those of the degrees; `name`: of a rank."""
    wanted = {(t, p) for t in range(tensor) for p in range(pipeline)}
    problems = [
        f"{where} must have {text} {listing((name(*rank) for rank in sorted(wrong)), most=_SHOWN)}"
        for text, wrong in (
            (f"every rank of TP {tensor} × PP {pipeline}: it lacks", wanted - ranks),
            (f"the ranks of TP {tensor} × PP {pipeline} alone: it also has", ranks - wanted),
        )
        if wrong
    ]
    if problems:
        raise ConfigError(problems)


@dataclass
class Shards:
    """The tensors of all tensor-parallel ranks and pipeline stages.

    A method that finds a problem adds it to `problems` and returns a `Stacked` without parts instead of raising, so
    that the user reads all problems at once. Replicas that differ are a problem unless drift is allowed: stochastic
    rounding, for one, draws other bits on every rank.

    Attributes:
        where: names the source in messages.
        ranks: the tensor-parallel degree.
        allow_drift: whether the first of several replicas is taken although others differ.
        tensors: name → its tensors, one for each tensor-parallel rank.
        problems: one line each.
    """

    where: str
    ranks: int
    allow_drift: bool = False
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)
    _missing: list[tuple[str, str]] = field(default_factory=list)
    _drifted: list[tuple[str, str]] = field(default_factory=list)
    _differences: dict[str, float] = field(default_factory=dict)

    def add(self, ranks: Sequence[Mapping[str, Tensor]], place: str) -> None:
        """Add one pipeline stage's tensors, by tensor-parallel rank; `place` names the stage in messages."""
        for name in dict.fromkeys(name for tensors in ranks for name in tensors):
            if lacking := [rank for rank, tensors in enumerate(ranks) if name not in tensors]:
                self.problems.append(
                    f"{self.where}: tensor-parallel rank {', '.join(map(str, lacking))} lacks {name} {place}"
                )
                continue
            parts = [tensors[name] for tensors in ranks]
            same = "must be the same on every pipeline stage that has it: they differ on tensor-parallel rank {}"
            self._compare(name, self.tensors.setdefault(name, parts), parts, same)

    def require_tied(self, name: str, copy: str) -> None:
        """Note where a copy of a tied weight, if there is one, differs from it."""
        if not self.has(copy) or not self.has(name):
            return
        self._used.add(copy)
        equal = f"must equal {name}, the model has one weight for both: they differ on tensor-parallel rank {{}}"
        self._compare(copy, self.tensors[name], self.tensors[copy], equal)

    def _compare(self, name: str, first: Sequence[Tensor], others: Sequence[Tensor], text: str) -> None:
        """Note whether replicas differ, rank by rank; `text`: what the tensor must be, with a place for the ranks."""
        if ranks := _differing(first, others):
            drift = max(difference(one, other) for one, other in zip(first, others, strict=True))
            self.note_drift(name, drift, text.format(ranks), are_matrices=first[0].dim() > 1)

    def note_drift(self, name: str, drift: float, fact: str, *, are_matrices: bool) -> None:
        """Note that replicas have such a `difference`; `fact`: what the tensor must be.

        Vectors are not bounded: biases begin at 0, so that their drift may be larger than they are, and norm weights
        are much alike in any model.
        """
        if self.allow_drift and drift <= (_MOST_DRIFT if are_matrices else sys.float_info.max):
            self._differences[name] = drift
        else:
            self._drifted.append((name, f"{fact} ({drift:.0%} of their norm)" if self.allow_drift else fact))

    @property
    def notes(self) -> list[str]:
        """What the user should know of replicas that differ."""
        if not self._differences:
            return []
        most = max(self._differences, key=lambda name: self._differences[name])
        return [
            f"replicas of {counted(len(self._differences), 'tensor')} differ, at most by "
            f"{self._differences[most]:.2%} of their norm ({most}): the first ones are taken"
        ]

    def require_floats(self) -> None:
        """Note tensors that cannot be a model's weights, and ranks that disagree on a shape; these are left out."""
        strange, ragged = [], []
        for name, parts in list(self.tensors.items()):
            dtypes = {part.dtype for part in parts}
            if len(dtypes) > 1 or not dtypes <= set(DTYPE_NAMES):
                strange.append((name, " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))))
            if len({part.shape for part in parts}) > 1 or not parts[0].dim():
                ragged.append((name, ", ".join(f"{list(part.shape)}" for part in parts)))
        same = "the same on every tensor-parallel rank"
        self.problems += lines_of_layers(self.where, f": dtype of {{}} ({{}}) must be {TRAINABLE}, {same}", strange)
        self.problems += lines_of_layers(self.where, f": shape of {{}} must be {same}: it is {{}}", ragged)
        for name, _ in strange + ragged:
            self.tensors.pop(name, None)
            self._used.add(name)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def parts(self, name: str) -> list[Tensor]:
        """The tensors of a name, one for each rank; none where no rank has it, which is noted."""
        if name not in self.tensors and name not in self._used:
            self._missing.append((name, ""))
        self._used.add(name)
        return self.tensors.get(name, [])

    def columns(self, name: str) -> Stacked:
        """Of a column-parallel layer or an embedding: cut along dim 0."""
        return Stacked(tuple(self.parts(name)))

    def rows(self, name: str) -> Stacked:
        """Of a row-parallel layer: cut along dim 1."""
        parts = self.parts(name)
        if any(part.dim() != 2 for part in parts):
            self.misshapen(name, parts[0].shape, "a matrix")
            return Stacked()
        return Stacked(tuple(part.t() for part in parts)).t

    def copies(self, name: str) -> Stacked:
        """What every rank has whole: all copies must agree to the bit."""
        parts = self.parts(name)
        same = "must be the same on every tensor-parallel rank, and differs between rank 0 and rank {}"
        self._compare(name, parts[:1] * len(parts), parts, same)
        return Stacked(tuple(parts[:1]))

    def split(self, name: str, sizes: Sequence[int]) -> list[Stacked]:
        """Each rank's tensor holds several, one below the other, of `sizes` rows: these, each over all ranks."""
        parts = self.parts(name)
        if any(len(part) != sum(sizes) for part in parts):
            self.misshapen(name, parts[0].shape, f"{sum(sizes)} rows on each tensor-parallel rank")
            parts = []
        of_ranks = [part.split(list(sizes)) for part in parts]
        return [Stacked(tuple(split[i] for split in of_ranks)) for i in range(len(sizes))]

    def misshapen(self, name: str, shape: Sequence[int], wanted: str) -> None:
        self.problems.append(f"{self.where}: shape of {name} {list(shape)} must be {wanted}")

    def weights(self, shapes: Shapes, tensors: Mapping[str, Stacked]) -> list[StreamedWeight]:
        """The canonical weights, in the order of `shapes`; `tensors`: by canonical name.

        Raises:
            ConfigError: with everything that was wrong.
        """
        unused = [(n, list(parts[0].shape)) for n, parts in self.tensors.items() if n not in self._used]
        wanted = {name: shape for name, shape in shapes.items() if name not in tensors or tensors[name].parts}
        problems = [
            *self.problems,
            *lines_of_layers(self.where, f": {{}} {{}}: {_NO_DRIFT if self.allow_drift else _DRIFT}", self._drifted),
            *lines_of_layers(self.where, " lacks {}", self._missing),
            *lines_of_layers(self.where, " has {} {}, which the model lacks", unused),
            *mismatches(self.where, wanted, {name: tensor.entry for name, tensor in tensors.items() if tensor.parts}),
        ]
        if problems:
            raise ConfigError(problems)
        return [
            StreamedWeight(name, tensors[name].entry.dtype, shape, tensors[name].segments)
            for name, shape in shapes.items()
        ]
