"""The buckets of a rank, and what ZeRO-2 and ZeRO-3 have only while it is used: weights, gradients under reduction.

Legend: see `estimates/rank_workload.py`.

The passes of a stage are replayed as `optim/unit_weights.py` gathers and releases weights, and as `optim/zero.py`
starts and ends reductions of gradients, but with bytes in place of tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import merge
from operator import itemgetter
from typing import Literal

from shardwise.config import DTYPE_BYTES, FamilyConfig
from shardwise.config.layout import LayoutStage
from shardwise.estimates.activations import BlockStack
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.models.parameter_counts import EMBEDDING, HEAD, OUTSIDE, LocalParameter, LocalWidths, local_parameters
from shardwise.optim.bucket_layout import bucket_bytes, offsets_and_length, packed
from shardwise.pipeline.action_order import action_order

_MIB = 2**20


@dataclass(frozen=True)
class BucketShape:
    """The estimated shape of a bucket: (offset, parameter) of its parameters, padded elements, number of slices."""

    parameters: tuple[tuple[int, LocalParameter], ...]
    elements: int
    slices: int

    @property
    def is_orthogonalized(self) -> bool:
        """True for a bucket of matrices of blocks alone: with Muon, these are in buckets of their own."""
        return all(parameter.is_block_matrix for _, parameter in self.parameters)

    @cached_property
    def has_matrices(self) -> bool:
        """True for a bucket that ZeRO-3 cuts: vectors stay whole."""
        return any(parameter.matrix for _, parameter in self.parameters)

    @property
    def divided_over(self) -> int:
        """The data-parallel ranks that divide the tensors of its kind among them."""
        return self.parameters[0][1].divided_over

    @property
    def stage(self) -> int:
        """The number of the pipeline stage that has the parameters."""
        return self.parameters[0][1].place.stage

    def partial(self, ranks: int, data_rank: int | None = None) -> int:
        """Return the elements whose gradient is partial over `ranks` ranks, in a data-parallel rank's slice, or all."""
        return sum(
            self._owned(offset + parameter.partial_from, offset + parameter.elements, data_rank)
            for offset, parameter in self.parameters
            if parameter.partial_over == ranks
        )

    def at_both_ends(self, unpadded: int, data_rank: int) -> int:
        """Return the elements, in that slice, of a parameter at both ends of a pipeline, without its padding.

        unpadded: elements of the parameter before its padding.
        """
        return sum(
            self._owned(offset, offset + min(unpadded, parameter.elements), data_rank)
            for offset, parameter in self.parameters
            if parameter.at_both_ends
        )

    def _owned(self, start: int, stop: int, data_rank: int | None) -> int:
        """Return the number of elements from `start` to `stop` of the bucket that are in a rank's slice, or in any."""
        if data_rank is None:
            return stop - start
        share = self.elements // self.slices
        low = share * data_rank if self.slices > 1 else 0
        return max(min(stop, low + share) - max(start, low), 0)


@lru_cache(maxsize=64)
def bucket_shapes(workload: RankWorkload) -> tuple[BucketShape, ...]:
    """Estimate the rank's buckets of gradients by `optimizer.bucket_mib`, in the order in which they are begun.

    Matrices, which weight decay applies to, and vectors are in separate buckets; with Muon also matrices of blocks and
    others. A parameter at both ends of a pipeline has a bucket to itself.
    """
    optimizer = workload.config.optimizer
    layout = workload.layout
    gradient = DTYPE_BYTES[workload.precision.gradient]
    stored = (workload.model, layout.tensor, layout.sequence_parallel, workload.local, workload.stages)
    kinds = ("is_block_matrix", "matrix") if optimizer.spec.orthogonalizes else ("matrix",)
    slices = workload.shard_ranks
    return _shapes(stored, gradient, optimizer.bucket_mib, layout.replicas, slices, workload.accelerator, kinds)


_ModelPart = tuple[FamilyConfig, int, bool, LocalWidths, tuple[LayoutStage, ...]]
"""The model, the tensor-parallel degree, sequence parallelism, the widths and the stages of a rank."""


@lru_cache(maxsize=64)
def _stored(model_part: _ModelPart) -> tuple[LocalParameter, ...]:
    model, tensor, sequence, local, stages = model_part
    parameters = local_parameters(model, tensor, sequence, local=local, stages=stages)
    return tuple(parameter for parameter in parameters if parameter.is_trained)


@lru_cache(maxsize=4096)
def _shapes(
    model_part: _ModelPart,
    gradient: int,
    bucket_mib: float | None,
    data: int,
    slices: int,
    accelerator: bool,
    kinds: tuple[str, ...],
) -> tuple[BucketShape, ...]:
    by_kind: dict[tuple[bool, ...], dict[int, list[tuple[int, LocalParameter]]]] = {}
    for number, parameter in enumerate(_stored(model_part)):
        kind = tuple(getattr(parameter, name) for name in kinds)
        by_kind.setdefault(kind, {}).setdefault(parameter.divided_over, []).append((number, parameter))
    shapes: list[BucketShape] = []
    # The order of `build._parameter_groups`: matrices first.
    for _, groups in sorted(by_kind.items(), reverse=True):
        alike: list[list[tuple[int, BucketShape]]] = []
        for divided, group in groups.items():
            ranks = slices // divided if slices > 1 else 1
            sizes = [((p.place.stage, p.at_both_ends), gradient * p.elements, p.place.unit) for _, p in group]
            if bucket_mib is not None:
                most = bucket_mib * _MIB
            else:
                most = bucket_bytes(sum(size for _, size, _ in sizes), data // divided, accelerator=accelerator)
            buckets = []
            for indices in packed(sizes, most):
                members = [group[index][1] for index in indices]
                offsets, length = offsets_and_length([member.elements for member in members], ranks)
                shape = BucketShape(tuple(zip(offsets, members, strict=True)), length, ranks)
                buckets.append((-group[indices[-1]][0], shape))
            alike.append(buckets)
        # A backward pass completes last what comes first in the model.
        shapes += [shape for _, shape in merge(*alike, key=itemgetter(0))]
    return tuple(shapes)


_MOST_REDUCTIONS = 2  # reductions of buckets that are under way at once, at most

ByUnit = dict[int, int]
"""Bytes while the pass is at a unit, by the unit's number in `UnitPlace`."""


@dataclass(frozen=True)
class _GatherState:
    """Weights on a rank between two passes."""

    gathered: frozenset[int] = frozenset()  # numbers of the buckets whose values are whole
    users: frozenset[tuple[int, int]] = frozenset()  # (bucket, unit) of each unit that still needs a bucket


@dataclass(frozen=True)
class _GatherPass:
    """One pass of a micro-batch through a stage."""

    state: _GatherState  # weights on the rank afterwards
    sent: Counter[int]  # bytes of values that were gathered, by the number of ranks that divide the tensors among them
    values: ByUnit  # bytes of whole values at each unit


class _StageGathers:
    """The gathers of the weights of one stage; `sizes`: bytes of the whole values of each freed bucket."""

    def __init__(self, workload: RankWorkload, stage: LayoutStage) -> None:
        width = DTYPE_BYTES[workload.precision.parameter]
        self._releases = workload.config.gather == "micro_batch"
        shapes = bucket_shapes(workload) if workload.frees_values else []
        freed = [shape for shape in shapes if shape.has_matrices and shape.slices > 1 and shape.stage == stage.index]
        self._divided = [shape.divided_over for shape in freed]
        self.sizes = {number: width * shape.elements for number, shape in enumerate(freed)}
        self._prefetch = workload.config.optimizer.prefetch
        self._buckets: dict[int, list[int]] = {}
        for number in self.sizes:
            for _, parameter in freed[number].parameters:
                for unit in _users(parameter.place.unit, stage, is_tied=workload.model.tie_word_embeddings):
                    self._buckets.setdefault(unit, [])
                    if number not in self._buckets[unit]:
                        self._buckets[unit].append(number)
        in_order = [unit for unit in (EMBEDDING.unit, *stage.layers, HEAD.unit) if unit in self._buckets]
        self._forward = in_order
        self._backward = [unit for unit in reversed(in_order) if unit >= 0]
        self._cache: dict[tuple[str, _GatherState], _GatherPass] = {}

    @property
    def whole(self) -> Counter[int]:
        """Bytes of all whole values, as in `_GatherPass.sent`."""
        total: Counter[int] = Counter()
        for number, size in self.sizes.items():
            total[self._divided[number]] += size
        return total

    def forward(self, state: _GatherState, *, keeps_last: bool = True) -> _GatherPass:
        """Do a forward pass; in training, the last block's weights stay for the backward pass."""
        return self._run("forward" if keeps_last else "evaluation", state)

    def backward(self, state: _GatherState) -> _GatherPass:
        """Do a backward pass, which gathers the weights of blocks, and those that no smaller unit has."""
        return self._run("backward", state)

    def _run(self, kind: Literal["forward", "backward", "evaluation"], state: _GatherState) -> _GatherPass:
        if (kind, state) not in self._cache:
            order = self._backward if kind == "backward" else self._forward
            last = self._backward[:1] if kind == "forward" else []
            self._cache[kind, state] = self._replay(order, last, state)
        return self._cache[kind, state]

    def _replay(self, order: Sequence[int], kept: Sequence[int], state: _GatherState) -> _GatherPass:
        gathered = set(state.gathered)
        users = set(state.users)
        values: ByUnit = {}
        sent: Counter[int] = Counter()

        def begin(units: Iterable[int]) -> None:
            new = {number for unit in units for number in self._buckets[unit]} - gathered
            gathered.update(new)
            for number in new:
                sent[self._divided[number]] += self.sizes[number]

        def release(unit: int) -> None:
            for number in self._buckets[unit]:
                users.discard((number, unit))
                if self._releases and not any(bucket == number for bucket, _ in users):
                    gathered.discard(number)

        outside = [OUTSIDE.unit] if OUTSIDE.unit in self._buckets else []
        for unit in [*outside, *order]:
            following = order[order.index(unit) + 1 :] if unit in order else order
            needed = [unit, *following[: self._prefetch]]
            users.update((number, user) for user in needed for number in self._buckets[user])
            begin(needed)
            values[unit] = sum(self.sizes[number] for number in gathered)
            if unit not in (*outside, *kept):
                release(unit)
        # The last part of a backward pass, which gathers nothing.
        values.setdefault(EMBEDDING.unit, sum(self.sizes[number] for number in gathered))
        for unit in outside:
            release(unit)
        return _GatherPass(_GatherState(frozenset(gathered), frozenset(users)), sent, values)


def _users(unit: int, stage: LayoutStage, *, is_tied: bool) -> Iterator[int]:
    """Yield the units of a stage that use a parameter of a unit: a tied weight is the embedding's and the head's."""
    if unit != EMBEDDING.unit:
        yield unit
        return
    if stage.is_first:
        yield unit
    if stage.is_last and is_tied:
        yield HEAD.unit


def gathered_bytes(workload: RankWorkload) -> Counter[int]:
    """Estimate the bytes of whole weights that a rank gathers for the passes of a step of training.

    They stand by the number of ranks that divide the tensors among them (`BucketShape.divided_over`).
    """
    total: Counter[int] = Counter()
    for stage in workload.stages:
        gathers = _StageGathers(workload, stage)
        if workload.config.gather == "step":
            total += gathers.whole
            continue
        state = _GatherState()
        parallel = workload.config.parallel
        for action in action_order(parallel, workload.micro_batches, workload.pipeline_rank, workload.recompute):
            if gathers.sizes and action.stage == stage.index:
                done = gathers.forward(state) if action.kind == "forward" else gathers.backward(state)
                state = done.state
                total += done.sent
    return total


def evaluation_bytes(workload: RankWorkload) -> Counter[int]:
    """Estimate the bytes of whole weights that a rank gathers for the forward passes of one global batch."""
    total: Counter[int] = Counter()
    for stage in workload.stages:
        gathers = _StageGathers(workload, stage)
        state = _GatherState()
        for _ in range(workload.micro_batches):
            done = gathers.forward(state, keeps_last=False)
            state = done.state
            total += done.sent
    return total


# ---- gradients


def _reduction_copies(workload: RankWorkload, shape: BucketShape) -> int:
    """Return the bytes of copies for each element of a bucket under reduction.

    One copy is made if the dtype of the reduction is not that of the gradients. On a CPU with ZeRO, and with
    bit-equal sums, one more holds the slices that arrive, which are summed.
    """
    precision = workload.precision
    if workload.layout.replicas == shape.divided_over:
        return 0
    sums_slices = workload.is_bit_equal or (not workload.accelerator and shape.slices > 1)
    return DTYPE_BYTES[precision.reduce] * (int(precision.reduce != precision.gradient) + int(sums_slices))


@dataclass
class _Reductions:
    """The buckets of one stage, in the order in which their reductions begin."""

    shapes: Sequence[BucketShape]
    gradient: int  # bytes of an element of gradients that have memory only until they are reduced; 0: all have memory
    copies: Sequence[int]  # bytes of copies of an element under reduction, of each bucket
    filling: set[int] = field(default_factory=set)  # numbers of buckets that have some of their gradients
    under_way: deque[int] = field(default_factory=deque)  # numbers of buckets that are being reduced
    size: int = 0  # bytes of gradients and copies now
    started: int = 0  # number of reductions that have begun in this round
    missing: Counter[int] = field(default_factory=Counter)  # parameters without a gradient, by the number of the bucket

    def begin_round(self) -> None:
        self.started = 0
        self.missing = Counter({number: len(shape.parameters) for number, shape in enumerate(self.shapes)})

    def begin(self, number: int) -> None:
        """Take the first gradient in a bucket."""
        if number in self.under_way:
            while self._end_oldest() != number:
                pass
        if number not in self.filling:
            self.filling.add(number)
            self.size += self.shapes[number].elements * self.gradient

    def _end_oldest(self) -> int:
        """End the reduction that began first; return the number of its bucket."""
        number = self.under_way.popleft()
        self.size -= self.shapes[number].elements * (self.gradient + self.copies[number])
        return number

    def add(self, gradients: Iterable[tuple[int, int]]) -> int:
        """Take parameters' gradients in buckets; return the most bytes that are held meanwhile.

        gradients: number of the bucket, and bytes of a copy of the gradient that autograd makes before, of each.
        """
        most = self.size
        for number, copy in gradients:
            self.begin(number)
            self.missing[number] -= 1
            most = max(most, self.size + copy)
            while self.started < len(self.shapes) and not self.missing[self.started]:
                while len(self.under_way) >= _MOST_REDUCTIONS:
                    self._end_oldest()
                # Its gradients stay, and copies are made.
                self.filling.discard(self.started)
                self.under_way.append(self.started)
                self.size += self.shapes[self.started].elements * self.copies[self.started]
                self.started += 1
                most = max(most, self.size)
        return most


def _gradients_in_flight(workload: RankWorkload, stage: LayoutStage) -> tuple[ByUnit, dict[int, tuple[int, int]], int]:
    """Return bytes of gradients and their copies at each unit of a backward pass, before it, and those left at the end.

    With those before it come those while its experts get their gradients, which the rest of a block gets later.
    At the embedding they are those beside its new gradient, which is free before a reduction begins; the unit of what
    no smaller unit has comes last, and has all that is held from then on.

    Where gradients are reduced once a step, the backward pass is that of the last micro-batch. Whole gradients that
    have memory during the whole step are not among these bytes.
    """
    each_pass = workload.frees_gradients and workload.config.reduce == "micro_batch"
    # What no other rank has keeps its memory.
    least = 2 if each_pass else 1
    shapes = [shape for shape in bucket_shapes(workload) if shape.stage == stage.index and shape.slices >= least]
    gradient = DTYPE_BYTES[workload.precision.gradient] if each_pass else 0
    reductions = _Reductions(shapes, gradient, [_reduction_copies(workload, shape) for shape in shapes])
    # A gradient that is the first of a sum is copied once, into the dtype of the sum, and into the order of its weight
    # in memory, which those of routed weights have.
    is_copied = workload.frees_gradients and (each_pass or workload.micro_batches == 1)
    copy = DTYPE_BYTES[workload.precision.gradient] if is_copied else 0
    is_cast = workload.precision.gradient != workload.precision.parameter
    copies: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    # Kinds of buckets of which a parameter of a block came already: buckets begin at the end of the model.
    in_blocks: set[bool] = set()
    for number, shape in enumerate(shapes):
        for _, parameter in shape.parameters:
            unit = parameter.place.unit
            if parameter.in_block:
                in_blocks.add(shape.has_matrices)
            elif unit == OUTSIDE.unit and shape.has_matrices not in in_blocks:
                unit = HEAD.unit  # after the blocks, as a last norm
            is_routed = parameter.is_routed
            copied = copy * parameter.elements if parameter.in_block and (is_cast or not is_routed) else 0
            copies[unit, is_routed].append((number, copied))
    rounds = min(workload.micro_batches, 2) if each_pass else 1
    gradients: ByUnit = {}
    before: dict[int, tuple[int, int]] = {}
    for _ in range(rounds):
        reductions.begin_round()
        gradients = {}
        # What no smaller unit has comes last: a table of positions is added to the embedding.
        for unit in (HEAD.unit, *reversed(stage.layers), EMBEDDING.unit, OUTSIDE.unit):
            before[unit] = reductions.size, reductions.add(copies[unit, True])
            # The last products of attention and MLP that are computed side by side get their gradients first.
            for number, _ in copies[unit, False] if workload.model.parallel_residual or unit == EMBEDDING.unit else ():
                reductions.begin(number)
            beside = reductions.size
            gradients[unit] = max(gradients.get(unit, 0), reductions.add(copies[unit, False]))
            if unit == EMBEDDING.unit:
                gradients |= {unit: beside, OUTSIDE.unit: gradients[unit]}
    return gradients, before, reductions.size if rounds > 1 else 0


# ---- both at the peak


@dataclass(frozen=True)
class StageInFlightBytes:
    """Estimated bytes of one pipeline stage that are in memory only while they are used."""

    weights: tuple[ByUnit, ByUnit]  # whole weights at each unit of a forward and of a backward pass
    gradients: ByUnit  # gradients and copies at each unit of any backward pass; none where they are reduced once a step
    reduced: ByUnit  # likewise of the last micro-batch's backward pass
    # Likewise before the unit has a gradient of a weight, and while its routed weights get theirs.
    before: dict[int, tuple[int, int]] = field(default_factory=dict)
    left: int = 0  # gradients and copies between two passes
    # Weights of the rank's other stages, which stay from their forward pass to their backward pass.
    other_weights: int = 0

    @staticmethod
    def of_reduction(workload: RankWorkload, stage: LayoutStage) -> StageInFlightBytes:
        """Copies while gradients are reduced, which there are at each stage of ZeRO."""
        if workload.frees_gradients or not any(_reduction_copies(workload, s) for s in bucket_shapes(workload)):
            return StageInFlightBytes(({}, {}), {}, {HEAD.unit: 0})
        return StageInFlightBytes(({}, {}), {}, *_gradients_in_flight(workload, stage)[:2])

    @staticmethod
    def of(
        workload: RankWorkload, stage: LayoutStage, gathers: _StageGathers, other_weights: int
    ) -> StageInFlightBytes:
        """All of it, in steps that are not the first."""
        first = gathers.forward(_GatherState())
        # In a pipeline, further forward passes come before the first backward pass, and weights may stay for these.
        second = gathers.forward(first.state)
        back = gathers.backward(second.state)
        forward = {unit: max(first.values[unit], second.values[unit]) for unit in first.values}
        reduced, before, left = _gradients_in_flight(workload, stage)
        gradients = reduced if workload.config.reduce == "micro_batch" else {}
        return StageInFlightBytes((forward, back.values), gradients, reduced, before, left, other_weights)

    def forward(self, unit: int) -> int:
        """Bytes at a unit of a forward pass."""
        return self.weights[0].get(unit, 0) + self.other_weights + self.left

    def backward(self, unit: int) -> int:
        """Bytes at a unit of a backward pass."""
        return self.weights[1].get(unit, 0) + self.other_weights + self.gradients.get(unit, 0)

    def last(self, unit: int) -> int:
        """Bytes at a unit of the last micro-batch's backward pass."""
        return self.weights[1].get(unit, 0) + self.other_weights + self.reduced.get(unit, 0)

    def at_block(self, layer: int, level: BlockStack, *, last: bool = False) -> int:
        """The most at a block of a backward pass, with its activations."""
        gradients = self.reduced if last else self.gradients
        first, early = self.before.get(layer, (0, 0)) if gradients else (0, 0)
        most = max(level.peak + first, level.early + early, level.later + gradients.get(layer, 0))
        return self.weights[1].get(layer, 0) + self.other_weights + most


@dataclass(frozen=True)
class InFlightBytes:
    """Estimated bytes of a rank's weights and gradients that are in memory only while they are used."""

    stages: dict[int, StageInFlightBytes]
    constant: int  # whole gradients and weights that have memory until the end of the step

    @staticmethod
    def of(workload: RankWorkload) -> InFlightBytes:
        constant = whole_gradient_bytes(workload, are_freed=True) if workload.config.reduce == "step" else 0
        gathers = [_StageGathers(workload, stage) for stage in workload.stages]
        kept = []
        for stage_gathers in gathers:
            buckets = stage_gathers.forward(_GatherState()).state.gathered
            kept.append(sum(stage_gathers.sizes[number] for number in buckets))
        stages = {
            stage.index: StageInFlightBytes.of(workload, stage, stage_gathers, sum(kept) - kept_bytes)
            for stage, stage_gathers, kept_bytes in zip(workload.stages, gathers, kept, strict=True)
        }
        return InFlightBytes(stages, constant)


def whole_gradient_bytes(workload: RankWorkload, *, are_freed: bool = False) -> int:
    """Estimate the bytes of all gradients, or of those that a step's end frees, with copies for bit-equal sums.

    With these, tensors that ranks divide have a gradient for each of these ranks.
    """
    # A binary counter of the groups of a data-parallel rank (`optim/buckets.py`).
    copies = workload.config.train.groups_apart(workload.layout.data).bit_length()
    elements = copies * workload.head_gradient_elements
    for bucket in bucket_shapes(workload):
        # A bucket of one rank is not cut: of it only the copies are freed.
        kept = are_freed and bucket.slices == 1
        elements += (copies - kept) * bucket.elements * (bucket.divided_over if workload.is_bit_equal else 1)
    return elements * DTYPE_BYTES[workload.precision.gradient]


def owned_elements(elements: Mapping[int, int], shards: int) -> float:
    """Estimate how many parameters, of `elements_by_ranks`, a rank updates where ZeRO cuts over so many ranks."""
    return sum(count / max(1, shards // divided) for divided, count in elements.items())
