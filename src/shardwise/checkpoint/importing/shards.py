"""Tensors of tensor-parallel ranks, put together as views: no more than a few rows are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.checkpoint.dtypes import DTYPE_NAMES
from shardwise.checkpoint_format.comparison import TRAINABLE, Shapes, lines_of_layers, mismatches
from shardwise.checkpoint_format.manifest import TensorEntry
from shardwise.checkpoint_format.writing import STREAM_BYTES, StreamedWeight
from shardwise.errors import ConfigError, listing
from shardwise.storage.root import Buffer

_SHOWN = 8
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Stacked:
    """`torch.cat(parts)`, transposed or not, and never made whole."""

    parts: tuple[Tensor, ...]
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
        held, at = [], 0
        for part in self.parts:
            low, high = max(start - at, 0), min(stop - at, len(part))
            if low < high:
                held.append(part[low:high])
            at += len(part)
        return Stacked(tuple(held))

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

    def weight(self, name: str) -> StreamedWeight:
        return StreamedWeight(name, DTYPE_NAMES[self.parts[0].dtype], self.shape, self.segments)


def stack(parts: Iterable[Stacked | Tensor]) -> Stacked:
    """One below the other."""
    held: list[Tensor] = []
    for part in parts:
        held += [part] if isinstance(part, Tensor) else part.parts
    return Stacked(tuple(held))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; a NaN equals itself."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = _BITS[one.element_size()] if one.is_floating_point() else one.dtype
    return torch.equal(one.view(bits), other.view(bits))


def require_ranks(
    where: str, found: Set[tuple[int, int]], tensor: int, pipeline: int, name: Callable[[int, int], str]
) -> None:
    """ConfigError where (tensor-parallel rank, pipeline stage) are not those of the degrees; `name`: of a rank."""
    wanted = {(t, p) for t in range(tensor) for p in range(pipeline)}
    problems = [
        f"{where} must have {text} {listing((name(*rank) for rank in sorted(ranks)), most=_SHOWN)}"
        for text, ranks in (
            (f"every rank of TP {tensor} × PP {pipeline}: it lacks", wanted - found),
            (f"the ranks of TP {tensor} × PP {pipeline} alone: it also has", found - wanted),
        )
        if ranks
    ]
    if problems:
        raise ConfigError(problems)


@dataclass
class Shards:
    """What the tensor-parallel ranks hold, all pipeline stages together.

    A method that finds a problem adds it to `problems` and returns None instead of raising, so that the user reads all
    problems at once.

    Attributes:
        where: names the source in messages.
        tensors: name → its tensors, one for each tensor-parallel rank.
        problems: what was found to be wrong, one line each.
    """

    where: str
    tensors: dict[str, list[Tensor]]
    problems: list[str] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)
    _missing: list[tuple[str, str]] = field(default_factory=list)

    def add(self, ranks: Sequence[Mapping[str, Tensor]], place: str) -> None:
        """Add one pipeline stage's tensors, by tensor-parallel rank; `place` names the stage in messages."""
        for name in dict.fromkeys(name for tensors in ranks for name in tensors):
            if lacking := [rank for rank, tensors in enumerate(ranks) if name not in tensors]:
                self.problems.append(
                    f"{self.where}: tensor-parallel rank {', '.join(map(str, lacking))} lacks {name} {place}"
                )
                continue
            parts = [tensors[name] for tensors in ranks]
            known = self.tensors.setdefault(name, parts)
            if not all(same_bits(one, other) for one, other in zip(known, parts, strict=True)):
                self.problems.append(f"{self.where}: {name} must be the same on every pipeline stage that has it")

    def require_tied(self, name: str, copy: str) -> None:
        """Note where a copy of a tied weight, if there is one, differs from it."""
        if not self.has(copy) or not self.has(name):
            return
        pairs = zip(self.tensors[name], self.tensors[copy], strict=True)
        self._used.add(copy)
        if differing := [str(rank) for rank, (one, other) in enumerate(pairs) if not same_bits(one, other)]:
            self.problems.append(
                f"{self.where}: {copy} must equal {name}, the model has one weight for both: they differ on "
                f"tensor-parallel rank {', '.join(differing)}"
            )

    def require_floats(self) -> None:
        """Note tensors that cannot be a model's weights, and ranks that disagree on a shape; these are left out."""
        strange, ragged = [], []
        for name, parts in list(self.tensors.items()):
            dtypes = {part.dtype for part in parts}
            if len(dtypes) > 1 or not dtypes <= set(DTYPE_NAMES):
                strange.append((name, " and ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))))
            if len({part.shape for part in parts}) > 1 or not parts[0].dim():
                ragged.append((name, ", ".join(f"{list(part.shape)}" for part in parts)))
        self.problems += [
            f"{self.where}: dtype of {name} ({dtypes}) must be {TRAINABLE}, the same on every tensor-parallel rank"
            for name, dtypes in lines_of_layers(strange)
        ]
        self.problems += [
            f"{self.where}: shape of {name} must be the same on every tensor-parallel rank: it is {shapes}"
            for name, shapes in lines_of_layers(ragged)
        ]
        for name, _ in strange + ragged:
            self.tensors.pop(name, None)
            self._used.add(name)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def parts(self, name: str) -> list[Tensor] | None:
        """The tensors of a name, one for each rank; None where no rank has it, which is noted."""
        if name in self.tensors:
            self._used.add(name)
            return self.tensors[name]
        if name not in self._used:
            self._missing.append((name, ""))
        return None

    def columns(self, name: str) -> Stacked | None:
        """Of a column-parallel layer or an embedding: cut along dim 0."""
        parts = self.parts(name)
        return None if parts is None else Stacked(tuple(parts))

    def rows(self, name: str) -> Stacked | None:
        """Of a row-parallel layer: cut along dim 1."""
        parts = self.parts(name)
        if parts is not None and parts[0].dim() != 2:
            self.misshapen(name, parts[0].shape, "a matrix")
            return None
        return None if parts is None else Stacked(tuple(part.t() for part in parts)).t

    def copies(self, name: str) -> Stacked | None:
        """What every rank has whole: all copies must agree to the bit."""
        parts = self.parts(name)
        if parts is None:
            return None
        differing = [rank for rank, part in enumerate(parts) if not same_bits(parts[0], part)]
        if differing:
            ranks = ", ".join(map(str, differing))
            self.problems.append(
                f"{self.where}: {name} must be the same on every tensor-parallel rank, and differs between rank 0 and "
                f"rank {ranks}: the replicas have drifted apart, or are of different checkpoints"
            )
        return Stacked(tuple(parts[:1]))

    def split(self, name: str, sizes: Sequence[int]) -> list[Stacked] | None:
        """Each rank's tensor holds several, one below the other, of `sizes` rows: these, each over all ranks."""
        parts = self.parts(name)
        if parts is None:
            return None
        if any(len(part) != sum(sizes) for part in parts):
            self.misshapen(name, parts[0].shape, f"{sum(sizes)} rows on each tensor-parallel rank")
            return None
        return [stack(each) for each in zip(*(part.split(list(sizes)) for part in parts), strict=True)]

    def misshapen(self, name: str, shape: Sequence[int], wanted: str) -> None:
        self.problems.append(f"{self.where}: shape of {name} {list(shape)} must be {wanted}")

    def weights(self, shapes: Shapes, found: dict[str, Stacked | None]) -> list[StreamedWeight]:
        """The canonical weights, in the order of `shapes`.

        Raises:
            ConfigError: with everything that was wrong.
        """
        known = {name: each for name, each in found.items() if each is not None}
        problems = list(self.problems)
        problems += [f"{self.where} lacks {name}" for name, _ in lines_of_layers(self._missing)]
        unused = [(n, f"{list(parts[0].shape)}") for n, parts in self.tensors.items() if n not in self._used]
        problems += [
            f"{self.where} has {name} {shape}, which the model lacks" for name, shape in lines_of_layers(unused)
        ]
        absent = dict.fromkeys(name for name in shapes if found.get(name, 0) is None)
        wanted = {name: shape for name, shape in shapes.items() if name not in absent}
        problems += mismatches(self.where, wanted, {name: each.entry for name, each in known.items()})
        if problems:
            raise ConfigError(problems)
        return [known[name].weight(name) for name in shapes]
