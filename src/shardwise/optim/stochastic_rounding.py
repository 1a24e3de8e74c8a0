"""Stochastic rounding: bfloat16 training without float32 masters (Gupta et al., arXiv:1502.02551, section 3.2).

With x between two neighbouring bfloat16 numbers a < b, x becomes b with probability (x − a) / (b − a), else a: its mean
is x. Rounding to nearest instead loses each update smaller than half the distance of neighbours, about 2^-9 of the
weight: at a small learning rate the weight never changes.

The random bits are a function of (seed, step, canonical tensor, element). Equal inputs give equal results at any
layout, with or without ZeRO and at any bucket size, and copies of a tensor stay equal without communication.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.distributed import devices
from shardwise.distributed.placement import Piece, Pieces
from shardwise.distributed.random_bits import INCREMENT_32, hashed, scramble_, wrapped
from shardwise.distributed.torch_private import step_optimizer
from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import ElementRun, chunk_elements
from shardwise.optim.master_update import Update
from shardwise.optim.wrapped_class import MakeOptimizer, ModelSlices, SliceOptimizer, options_of

_BITS = 16  # bits of a float32 that bfloat16 lacks


def cast_states(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Give the elementwise states of an optimizer this dtype, as `load_state_dict` gives them that of the masters."""
    for master, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == master.shape and value.is_floating_point():
                entries[name] = value.to(dtype)


def round_into(target: Tensor, x: Tensor, bits: Tensor, *, keeps_nan: bool = True) -> None:
    """Round float32 numbers to bfloat16: up in magnitude where the bits that are cut off, plus `bits`, carry.

    Args:
        target: bfloat16 tensor that gets the result.
        x: float32 tensor of the same shape; it is used up.
        bits: int32 numbers, uniform in [0, 2^16).
        keeps_nan: True if a quiet NaN, the only kind that arithmetic gives, must stay one. False takes half the time.
    """
    number = x.view(torch.int32)
    if keeps_nan:
        # The largest numbers may carry into infinity, as they should, but a NaN may not carry into the sign. Without
        # its low bits it is still a NaN, since its highest payload bit is set.
        sign = (number >> 31).bitwise_and_(-0x8000)
        number.bitwise_and_(0x7FFFFFFF).clamp_(max=0x7FFF0000).add_(bits).bitwise_right_shift_(_BITS).bitwise_or_(sign)
    else:
        number.add_(bits).bitwise_right_shift_(_BITS)
    target.view(torch.int16).copy_(number)


def _lanes_(words: Tensor, keys: Sequence[int | Tensor], count: int) -> Iterator[Tensor]:
    """Yield `count` int32 tensors, uniform in [0, 2^16), two for each key; `words` are used up."""
    for half in range(count):
        if half % 2 == 0:
            scramble_(words, keys[half // 2])
            yield words & 0xFFFF
        else:
            yield (words >> _BITS).bitwise_and_(0xFFFF)


def rounded(values: Sequence[Tensor], words: Tensor, keys: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 tensors `[N]`, of which the first alone may have NaNs, rounded to bfloat16.

    Compiled, it is one kernel, with the bits of the separate ones: all its arithmetic is that of integers.
    """
    results = []
    for number, (value, lane) in enumerate(zip(values, _lanes_(words.clone(), keys, len(values)), strict=True)):
        target = torch.empty_like(value, dtype=torch.bfloat16)
        round_into(target, value.clone(), lane, keeps_nan=number == 0)
        results.append(target)
    return results


@cache
def _compiled_rounded() -> Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], list[Tensor]]:
    # One kernel is compiled sooner than a pool of compilers has started.
    return torch.compile(rounded, fullgraph=True, dynamic=True, options={"compile_threads": 1})


@dataclass(frozen=True)
class _Block:
    """Elements of a canonical tensor that are consecutive in a run: element i, j, … has the number `first + i·s + …`.

    Attributes:
        name: canonical tensor of the elements.
        start: offset of the first element in the run.
        first: number of the first element in the canonical tensor.
        sizes: sizes of the dimensions, in the order of memory.
        strides: distances of neighbours along these dimensions, in elements of the canonical tensor.
    """

    name: str
    start: int
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(piece: Piece, box: Box, order: tuple[int, ...], start: int) -> _Block:
        """Make the block of a box of a piece's canonical tensor, whose dimensions lie in `order`, the slowest first."""
        strides = [1] * len(piece.shape)
        for dim in reversed(range(len(piece.shape) - 1)):
            strides[dim] = strides[dim + 1] * piece.shape[dim + 1]
        first = sum(a * stride for a, stride in zip(box.start, strides, strict=True))
        dims = [(box.size[dim], strides[dim]) for dim in order]
        # Neighbouring dimensions without a gap become one, so that most blocks have a single dimension.
        merged = [(1, 1)]
        for size, stride in dims:
            outer_size, outer_stride = merged[-1]
            if merged[-1] == (1, 1) or outer_stride == size * stride:
                merged[-1] = (outer_size * size, stride)
            else:
                merged.append((size, stride))
        return _Block(piece.name, start, first, *zip(*merged, strict=True))


class RandomBits:
    """16 bits for the rounding of each element of a bucket's owned part and of each tensor of its state.

    Two tensors share a 32-bit word: element i of a canonical tensor has `scramble(hash + i · INCREMENT_32)`.
    """

    def __init__(self, pieces: Pieces, seed: int) -> None:
        self._pieces = pieces
        self._seed = seed
        self._blocks: dict[ElementRun, list[_Block]] = {}
        self._ramps: dict[torch.device, Tensor] = {}
        self._keys: list[Tensor] = []
        self._step_of_keys = 0

    def of(self, run: ElementRun, step: int, count: int) -> Iterator[Tensor]:
        """Yield `count` int32 tensors over a run of at most `chunk_elements`, uniform in [0, 2^16)."""
        return _lanes_(self.words(run, step), [self._key(step, half) for half in range(0, count, 2)], count)

    def keys(self, step: int, count: int, device: torch.device) -> list[Tensor]:
        """Return the keys of `_lanes_` for `count` lanes as numbers on the device, which a compiled function takes."""
        if step != self._step_of_keys:
            self._keys.clear()
            self._step_of_keys = step
        for half in range(2 * len(self._keys), count, 2):
            key = wrapped(self._key(step, half), 32)
            self._keys.append(torch.full((), key, dtype=torch.int32, device=device))
        return self._keys[: -(-count // 2)]

    def _key(self, step: int, half: int) -> int:
        return hashed(self._seed, step, half)

    def words(self, run: ElementRun, step: int) -> Tensor:
        """Return a number for each element of a run, int32, from which `_lanes_` makes random bits."""
        if run not in self._blocks:
            self._blocks[run] = list(self._find_blocks(run))
        device = run.bucket.values.device
        if device not in self._ramps:
            ramp = torch.arange(chunk_elements(run.bucket), dtype=torch.int32, device=device)
            self._ramps[device] = ramp * INCREMENT_32
        ramp = self._ramps[device]
        words = torch.zeros(run.length, dtype=torch.int32, device=device)
        for block in self._blocks[run]:
            number: Tensor | int = wrapped(hashed(self._seed, step, block.name) + block.first * INCREMENT_32, 32)
            # Element (i, j, …) has hash + (first + i·s + j·t + …) · INCREMENT_32: dimensions are added one by one.
            by_dimension = [
                ramp[:size] if stride == 1 else ramp[:size] * wrapped(stride, 32)
                for size, stride in zip(block.sizes, block.strides, strict=True)
            ]
            for numbers in by_dimension[:-1]:
                number = (numbers + number).unsqueeze(-1)
            out = words[block.start : block.start + math.prod(block.sizes)].view(block.sizes)
            torch.add(by_dimension[-1], number, out=out)
        return words

    def _find_blocks(self, run: ElementRun) -> Iterator[_Block]:
        bucket = run.bucket
        first = bucket.owned.start + run.start
        for index in range(bisect_right(bucket.offsets, first) - 1, len(bucket.parameters)):
            if bucket.offsets[index] >= first + run.length:
                break
            pieces = self._pieces[bucket.parameters[index]]
            for piece, box, order, start in bucket.owned_boxes(index, pieces, slice(run.start, run.end)):
                yield _Block.of(piece, box, order, start - run.start)


class _FloatCopy:
    """A float32 copy of some masters and their state, which an optimizer updates; float32 masters in place."""

    def __init__(self, make: MakeOptimizer, inner: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        self.parameter = nn.Parameter(torch.empty(0, device=group["params"][0].device))
        self._options = options_of(group)
        self._state = inner.state
        self.optimizer = make(self._options | {"params": [self.parameter]})
        self.group = self.optimizer.param_groups[0]
        self._before: dict[Bucket, dict[str, Any]] = {}

    def load(self, run: ElementRun, factor: Tensor | float) -> None:
        """Take the masters of a run, `factor` times their gradients, and their state as it was before this step."""
        master = run.bucket.master
        before = self._before.setdefault(run.bucket, dict(self._state[master]))
        self.parameter.grad = None
        self.parameter.data = run.master().float()
        self.parameter.grad = run.gradient().to(torch.float32, copy=True).mul_(factor)
        # Each run begins with the same options: a class may count its steps there.
        self.group.update(copy.deepcopy(self._options))
        self.optimizer.state[self.parameter] = {
            name: _copy(run.of(value) if _has_shape_of(master, value) else value) for name, value in before.items()
        }

    def store(self, run: ElementRun, bits: RandomBits, step: int) -> None:
        """Round the new masters and their state to where the run has them."""
        master = run.bucket.master
        state = self._state[master]
        new_state = self.optimizer.state[self.parameter]
        # Sorted: the bits of a tensor of the state must not depend on the order in which a class makes its state.
        elementwise = {name: value for name, value in sorted(new_state.items()) if _has_shape_of(self.parameter, value)}
        for name, value in elementwise.items():
            if not isinstance(state.get(name), Tensor):
                dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
                state[name] = torch.zeros_like(master, dtype=dtype)
        targets = [run.of(state[name]) for name in elementwise]
        values = list(elementwise.values())
        # A float32 master was updated where it is.
        if master.dtype == torch.bfloat16:
            targets.insert(0, run.master())
            values.insert(0, self.parameter.detach())
        if devices.compiles_kernels(master.device) and all(value.is_floating_point() for value in values):
            keys = bits.keys(step, len(values), master.device)
            for target, result in zip(targets, _compiled_rounded()(values, bits.words(run, step), keys), strict=True):
                target.copy_(result)
        else:
            # A class that puts a NaN into its state puts one into the weight, too: a NaN need not be kept elsewhere.
            for target, value, lane in zip(targets, values, bits.of(run, step, len(values)), strict=True):
                if value.is_floating_point():
                    round_into(target, value, lane, keeps_nan=value is values[0])
                else:
                    target.copy_(value)
        state.update({name: value for name, value in new_state.items() if name not in elementwise})


def _copy(value: Any) -> Any:
    """Copy an entry of an optimizer's state, to float32 if it is rounded."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.float() if value.dtype == torch.bfloat16 else value.clone()


def _has_shape_of(parameter: nn.Parameter, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


class StochasticUpdate(Update):
    """Updates in float32, a chunk at a time, whose results are rounded stochastically to bfloat16.

    Each tensor of the state stays in bfloat16, 2 bytes an element, and so do masters, unless they are float32.

    Args:
        inner, model: arguments of `Update`; the masters are bfloat16 or float32.
        make: makes an optimizer of the wrapped class from a parameter group.
    """

    def __init__(self, inner: torch.optim.Optimizer, model: ModelSlices, make: MakeOptimizer, bits: RandomBits) -> None:
        super().__init__(inner, model)
        self._make = make
        self._bits = bits

    def _update(self, factor: Tensor | float, number: int) -> Iterator[Bucket]:
        tensor_groups: set[int] = set()
        if isinstance(self._inner, SliceOptimizer):
            tensor_groups |= set(self._inner.whole_tensor_groups())
            copies = {
                bucket: _FloatCopy(self._make, self._inner, self._inner.param_groups[i])
                for i in tensor_groups
                for bucket in self._model.groups[i]
            }
            self._inner.step_rounded(self._model, _FloatSlices(copies, factor, self._bits, number))
            yield from copies
        for group, bucket in self._buckets_with_options(without=tensor_groups):
            float_copy = _FloatCopy(self._make, self._inner, group)
            for run in ElementRun.owned(bucket).split(chunk_elements(bucket)):
                float_copy.load(run, factor)
                step_optimizer(float_copy.optimizer)
                float_copy.store(run, self._bits, number)
            group.update(options_of(float_copy.group))
            yield bucket


@dataclass(frozen=True)
class _FloatSlices:
    copies: Mapping[Bucket, _FloatCopy]
    factor: Tensor | float
    bits: RandomBits
    step: int

    def load(self, chunk: ElementRun) -> Tensor:
        self.copies[chunk.bucket].load(chunk, self.factor)
        return self.copies[chunk.bucket].parameter.detach()

    def load_direction(self, chunk: ElementRun) -> tuple[Tensor, Tensor]:
        masters = self.load(chunk)
        float_copy = self.copies[chunk.bucket]
        optimizer = float_copy.optimizer
        gradient = float_copy.parameter.grad
        assert isinstance(optimizer, SliceOptimizer)
        assert gradient is not None
        return masters, optimizer.direction(float_copy.parameter, float_copy.group, out=gradient)

    def store(self, chunk: ElementRun) -> None:
        self.copies[chunk.bucket].store(chunk, self.bits, self.step)
