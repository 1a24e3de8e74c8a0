"""The gradient norm and other L2 norms over all ranks: of the whole model, and of each canonical tensor.

Each rank sums the squares of the elements that it owns, divided by the number of ranks that own the same element; one
all-reduce adds up the ranks' sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.distributed import collectives, devices, placement
from shardwise.distributed.mesh import Group
from shardwise.optim.bucket_layout import rounding_chunk_elements
from shardwise.optim.buckets import Bucket
from shardwise.optim.sharding import OptimizerDtypes, Ranks

_ROW = 1 << 14
"""Elements of a sum of squares: in float32 on the CPU, a single sum over 40 million elements has an error of 0.3 %."""


def row_norms(flat: Tensor) -> Tensor:
    """Return norms of a flat tensor's rows of 16,384 elements, the last maybe shorter, in float32 or float64."""
    in_rows = flat.numel() // _ROW * _ROW
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norms: list[Tensor] = []
    if in_rows < flat.numel() or not in_rows:  # an empty tensor has one empty row, whose norm is 0
        norms.append(torch.linalg.vector_norm(flat[in_rows:].view(1, -1), dim=1, dtype=dtype))
    if in_rows:
        norms.append(torch.linalg.vector_norm(flat[:in_rows].view(-1, _ROW), dim=1, dtype=dtype))
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def require_max_norm(max_norm: float | None) -> None:
    """Raise ConfigError unless the norm to clip to is positive, or None for no clipping."""
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm ({max_norm}) must be positive, or None for no clipping")


def clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips a gradient of this norm, as torch does: 1 if the norm is at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True)
class ElementRun:
    """Consecutive elements of the part of a bucket that this rank owns."""

    bucket: Bucket
    start: int
    length: int

    @classmethod
    def owned(cls, bucket: Bucket) -> ElementRun:
        """Return all of the owned part."""
        return cls(bucket, 0, len(bucket.master))

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a flat tensor over the bucket's owned part."""
        return flat[self.start : self.start + self.length]

    @property
    def end(self) -> int:
        return self.start + self.length

    def gradient(self) -> Tensor:
        """Return the reduced gradients of these elements."""
        return self.of(self.bucket.gradient)

    def master(self) -> Tensor:
        """Return the masters of these elements."""
        return self.of(self.bucket.master.detach())

    def weights(self) -> Tensor:
        """Return the masters of these elements, or the parameters if the masters are in the host's memory."""
        return self.of(self.bucket.shard if self.bucket.on_host else self.bucket.master.detach())

    def split(self, length: int) -> Iterator[ElementRun]:
        """Yield the parts of `length` elements, of which the last may be shorter."""
        for start in range(self.start, self.end, length):
            yield ElementRun(self.bucket, start, min(length, self.end - start))


def chunk_elements(bucket: Bucket) -> int:
    """Return the number of a bucket's elements that are computed in a wider dtype at once."""
    return rounding_chunk_elements(bucket.values.device.type != "cpu")


Take = Callable[[ElementRun], Tensor]
"""Returns the values of some elements, such as their gradients; a norm is taken of these."""


def _norm(runs: Sequence[ElementRun], take: Take, dtype: torch.dtype) -> Tensor:
    """Return the norm of the values of some runs; in float64 a part at a time, as each part is copied."""
    norms = []
    for run in runs:
        if dtype == torch.float64:
            norms += [torch.linalg.vector_norm(take(part).double()) for part in run.split(chunk_elements(run.bucket))]
        else:
            norms.append(row_norms(take(run)))
    norm: Tensor = torch.linalg.vector_norm(torch.hstack(norms))
    return norm


def _owners(bucket: Bucket, index: int, tensor: Group) -> Iterator[tuple[placement.Piece, int]]:
    """Yield the pieces of a bucket's parameter, each with the number of ranks that own the same elements."""
    for piece in placement.of_or_whole(bucket.parameters[index], tensor=tensor).pieces:
        yield piece, bucket.copies.size * piece.copies.size


def sum_dtype(dtypes: OptimizerDtypes, data: Group, device: torch.device) -> torch.dtype | None:
    """Return the dtype in which squares are added; None for sums that have the same bits at every layout.

    With stochastic rounding it is float64, if the device has it: the order of the sum, which depends on the layout,
    then hardly ever changes the norm, which is float32 in any case.
    """
    if data.grain is not None:
        return None
    return devices.widest_dtype(device) if dtypes.is_stochastic else torch.float32


@dataclass(frozen=True)
class _Share:
    """This rank's parts of the tensors of one parameter group that the same number of ranks own."""

    group: int
    copies: int  # number of ranks that own the same elements
    tensors: Mapping[int, list[ElementRun]]  # owned runs of each tensor, by the tensor's number
    atoms: Mapping[int, int]  # elements of an atom of each tensor (`exact_sums`)
    numbers: Tensor | None  # keys of `tensors`, on the device; None: all, in order


class _Norms:
    """L2 norms of tensors, whatever ranks own their elements."""

    def __init__(self, count: int, shares: Sequence[_Share], world: Group, dtype: torch.dtype | None) -> None:
        self.count = count
        self._shares = shares
        self._world = world
        self._dtype = dtype

    def _measured(self, shares: Sequence[_Share], takes: Sequence[Take | None], device: torch.device) -> Tensor:
        """Return norms `[len(takes), T]` in float32, by one all-reduce; 0 for None, for which nothing is read."""
        if self._dtype is None:
            return self._exactly_measured(shares, takes, device)
        squares = torch.zeros((len(takes), self.count), dtype=self._dtype, device=device)
        for share in shares:
            for column, take in enumerate(takes):
                if take is not None:
                    norms = torch.stack([_norm(runs, take, self._dtype) for runs in share.tensors.values()])
                    # `copies` ranks add the same square, so that the sum over the ranks counts it once.
                    terms = norms.to(squares).square_().div_(share.copies)
                    if share.numbers is None:
                        squares[column] += terms
                    else:
                        squares[column].index_add_(0, share.numbers, terms)
        return collectives.all_reduce_(squares, self._world).sqrt().float()

    def _exactly_measured(self, shares: Sequence[_Share], takes: Sequence[Take | None], device: torch.device) -> Tensor:
        from shardwise.optim import exact_sums

        ranks = self._world.size
        sums = [0] * (len(takes) * self.count)
        for share in shares:
            for column, take in enumerate(takes):
                if take is None:
                    continue
                for number, runs in share.tensors.items():
                    total = _exact_sum_of_squares(runs, take, share.atoms[number])
                    if total != exact_sums.NOT_A_NUMBER:
                        # `copies` ranks together have it 2 · world times, a whole number of times each.
                        total *= 2 * ranks // share.copies
                    place = column * self.count + number
                    sums[place] = exact_sums.joined((sums[place], total))
        limbs = collectives.all_reduce_(exact_sums.limbs(sums, device), self._world)
        norms = torch.tensor(exact_sums.norms(limbs, 2 * ranks), dtype=torch.float32, device=device)
        return norms.view(len(takes), self.count)


def _exact_sum_of_squares(runs: Sequence[ElementRun], take: Take, atom: int) -> int:
    from shardwise.optim import exact_sums

    # A part at a time, as `take` may copy it in a wider dtype. Parts have whole atoms, and are not too short.
    parts = (part for run in runs for part in run.split(max(chunk_elements(run.bucket), 1 << 20)))
    # The bins of an exact sum need float64: without it on the device, the host adds.
    wide = (taken if devices.widest_dtype(taken.device) == torch.float64 else taken.cpu() for taken in map(take, parts))
    squares = [exact_sums.atom_squares(values, atom) for values in wide]
    terms = torch.cat(squares)
    # On a CPU such runs stay in its caches. Elsewhere short kernels would wait for the host.
    runs_of_terms = terms.split(1 << (15 if terms.device.type == "cpu" else 22))
    return exact_sums.joined(map(exact_sums.exact_sum, runs_of_terms))


class ModelNorms(_Norms):
    """L2 norms over the whole model."""

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, ranks: Ranks, dtype: torch.dtype | None
    ) -> None:
        self._device = device
        by_kind: dict[tuple[int, int], list[ElementRun]] = {}
        for bucket in buckets:
            end = 0
            for index, p in enumerate(bucket.parameters):
                first = bucket.offsets[index] - bucket.owned.start
                for piece, copies in _owners(bucket, index, ranks.tensor):
                    atom = 1 if dtype is not None else _atom(bucket, index, piece, ranks.tensor)
                    runs = by_kind.setdefault((copies, atom), [])
                    for start, length in bucket.owned_runs(index, piece.local):
                        # Between the end of one parameter and the start of the next all is 0: one run covers both.
                        _append(runs, ElementRun(bucket, start, length), joint=end if start == first else start)
                end = first + p.numel()
        shares = [_Share(0, copies, {0: runs}, {0: atom}, None) for (copies, atom), runs in by_kind.items() if runs]
        super().__init__(1, shares, ranks.world, dtype)

    def measure(self, *takes: Take | None) -> Tensor:
        """Return a norm for each of `takes`, `[len(takes)]`; 0 for None, for which nothing is read. Collective."""
        return self._measured(self._shares, takes, self._device).flatten()


def _atom(bucket: Bucket, index: int, piece: placement.Piece, tensor: Group) -> int:
    """Return the elements of an atom of a bucket's parameter (`exact_sums`)."""
    from shardwise.optim import exact_sums

    dims = bucket.orders[index]
    if dims != tuple(range(len(dims))):
        return 1
    shape = piece.shape[::-1] if piece.transposed else piece.shape
    return exact_sums.atom_elements(shape, tensor.grain or 1)


def _append(runs: list[ElementRun], run: ElementRun, joint: int) -> None:
    """Add a run; if the last one ends at `joint` in the same bucket, it is extended to the end of `run` instead."""
    if runs and runs[-1].bucket is run.bucket and runs[-1].end == joint:
        start = runs.pop().start
        run = ElementRun(run.bucket, start, run.end - start)
    runs.append(run)


_Key = tuple[str, tuple[int, ...]]  # name and shape of a canonical tensor


class CanonicalNorms(_Norms):
    """L2 norms of each canonical tensor, wherever its elements are.

    The constructor is collective over `world`: it gives each tensor the same number on every rank. A fused weight is
    several tensors, a tensor that is cut into several pieces is one, padding is none, and copies count once.

    Attributes:
        count: T, the number of canonical tensors of the model.

    Raises:
        ValueError: the ranks do not hold each canonical tensor exactly once; raised on every rank.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Bucket]],
        pieces: placement.Pieces,
        device: torch.device,
        ranks: Ranks,
        dtype: torch.dtype | None,
    ) -> None:
        self._device = device
        atoms: dict[_Key, int] = {}
        owned: dict[tuple[int, int], dict[_Key, list[ElementRun]]] = {}
        elements: dict[_Key, Fraction] = {}  # fractions, as copies share an element
        for group, buckets in enumerate(groups):
            for bucket in buckets:
                for index, parameter in enumerate(bucket.parameters):
                    owners = _owners(bucket, index, ranks.tensor)
                    for piece, (_, copies) in zip(pieces[parameter], owners, strict=True):
                        key = (piece.name, piece.shape)
                        atoms[key] = _atom(bucket, index, piece, ranks.tensor)
                        runs = owned.setdefault((group, copies), {}).setdefault(key, [])
                        for start, length in bucket.owned_runs(index, piece.local):
                            _append(runs, ElementRun(bucket, start, length), joint=start)
                            elements[key] = elements.get(key, Fraction()) + Fraction(length, copies)
        numbers = _agreed_numbers({key: elements.get(key, Fraction()) for key in atoms}, ranks.world)
        atom_of_number = {numbers[key]: atom for key, atom in atoms.items()}
        shares = []
        for (group, copies), by_key in owned.items():
            tensors = {numbers[key]: runs for key, runs in by_key.items() if runs}
            if tensors:
                share_numbers = torch.tensor(list(tensors), device=device)
                shares.append(_Share(group, copies, tensors, atom_of_number, share_numbers))
        super().__init__(len(numbers), shares, ranks.world, dtype)

    def measure(self, groups: Sequence[int], *takes: Take) -> Tensor:
        """Return norms `[len(takes), T]` in float32 of the tensors of some parameter groups; 0 for all others.

        Collective: one all-reduce of these numbers over the world.
        """
        return self._measured([share for share in self._shares if share.group in groups], takes, self._device)

    def runs(self, group: int) -> Iterator[tuple[int, ElementRun]]:
        """Yield the runs that this rank owns of a parameter group, each with its tensor's number."""
        for share in self._shares:
            if share.group == group:
                for number, runs in share.tensors.items():
                    for run in runs:
                        yield number, run


def _agreed_numbers(elements: dict[_Key, Fraction], world: Group) -> dict[_Key, int]:
    """Return a number for each tensor of any rank, the same on every rank.

    The first rank alone adds up the elements of all ranks. With thousands of ranks this is less work than on each.
    """
    total: Counter[_Key] = Counter()
    for rank_elements in collectives.gather_objects(elements, world) or ():
        total.update(rank_elements)
    total = collectives.broadcast_object(total, world)
    incomplete = [
        f"{name} of shape {shape}: {float(count):g} of {math.prod(shape)} elements"
        for (name, shape), count in total.items()
        if count != math.prod(shape)
    ]
    if incomplete:
        raise ValueError(
            f"the ranks of {world} must together hold each canonical tensor once, which its norm needs; they hold "
            f"{'; '.join(incomplete)}. Give mesh=, and each layer a name of its own"
        )
    return {key: number for number, key in enumerate(sorted(total))}
