"""The update of master weights: the wrapped optimizer's step on the slices that this rank owns.

Masters are the parameters in the optimizer's dtype, such as float32 masters of bfloat16 weights. ZeRO-1 gives the
wrapped optimizer flat slices of many parameters. This is right for Adam, SGD and their like, and wrong for a class that
looks at a whole parameter (somebody's LAMB, Muon's matrix, Adafactor's factors), at all of them (LBFGS's line search)
or at sparse gradients. There is no list of good classes: what a class does, and which state it keeps, is found out by
running it on a small parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.base.user_code import RAISED, error_text
from shardwise.distributed.torch_private import (
    divides_gradients,
    dividing_gradients,
    step_optimizer,
    without_compiler,
)
from shardwise.optim.buckets import Bucket
from shardwise.optim.model_slices import ModelSlices
from shardwise.optim.slice_optimizer import SliceOptimizer, updates_slices

MakeSlices = Callable[[list[list[Bucket]]], ModelSlices]
"""Describes the buckets of each parameter group as the slices of the model that this rank owns."""


class Update:
    """Updates in the optimizer's dtype: each result is rounded to the nearest number of that dtype.

    Args:
        inner: the wrapped optimizer, whose parameters are the masters of `buckets`.
        make_slices: describes `buckets` to a `SliceOptimizer`.
    """

    def __init__(self, inner: torch.optim.Optimizer, buckets: Sequence[Bucket], make_slices: MakeSlices) -> None:
        bucket_of = {bucket.master: bucket for bucket in buckets}
        self._inner = inner
        self._groups = [[bucket_of[master] for master in group["params"]] for group in inner.param_groups]
        self._model = make_slices(self._groups)
        self._in_forward_order = [(number, bucket) for number, group in enumerate(self._groups) for bucket in group]
        # Buckets were filled from the last parameter to the first, and equal ones keep their order.
        self._in_forward_order.reverse()
        self._in_forward_order.sort(key=lambda entry: entry[1].order)

    def step(self, groups: Sequence[dict[str, Any]], factor: Tensor | float, number: int) -> Iterator[Bucket]:
        """Update all masters by `factor` times their reduced gradients; yield each bucket once its masters are new.

        Buckets come in the order in which the next forward pass uses them.

        Args:
            groups: parameter groups whose options count now; they get back what the wrapped optimizer changed.
            factor: multiplies the gradients: 1 / ranks for their mean, the clipping factor, or both.
            number: number of this step, from 1.
        """
        for outer, inner in zip(groups, self._inner.param_groups, strict=True):
            inner.update(options_of(outer))
        yield from self._update(factor, number)
        for outer, inner in zip(groups, self._inner.param_groups, strict=True):
            outer.update(options_of(inner))

    def _update(self, factor: Tensor | float, number: int) -> Iterator[Bucket]:
        if isinstance(self._inner, SliceOptimizer):
            yield from self._update_all_at_once(self._inner, factor)
            return
        divisor = _divisor(factor, self._model.device)
        for group, bucket in self._buckets_with_options():
            is_divided = divides_gradients(self._inner, group)
            bucket.master.grad = scaled_gradient(bucket, 1.0 if is_divided else factor)
            with dividing_gradients(self._inner, divisor) if is_divided else nullcontext():
                self._step_alone(group, bucket.master)
            bucket.master.grad = None
            yield bucket

    def _update_all_at_once(self, inner: SliceOptimizer, factor: Tensor | float) -> Iterator[Bucket]:
        buckets = [bucket for _, bucket in self._in_forward_order]
        for bucket in buckets:
            bucket.master.grad = scaled_gradient(bucket, factor)
        inner.step_slices(self._model)
        for bucket in buckets:
            bucket.master.grad = None
            yield bucket

    def _buckets_with_options(self, without: Collection[int] = ()) -> Iterator[tuple[dict[str, Any], Bucket]]:
        """Yield each bucket with its parameter group, whose options are the same for every bucket.

        Groups whose number is in `without` are left out.

        Afterwards the group has the options that the update of its last bucket left: what the class keeps there, such
        as a count of steps, is the same after each.
        """
        options = [options_of(group) for group in self._inner.param_groups]
        for number, bucket in self._in_forward_order:
            if number not in without:
                group = self._inner.param_groups[number]
                group.update(copy.deepcopy(options[number]))
                yield group, bucket

    def _step_alone(self, group: dict[str, Any], master: nn.Parameter) -> None:
        """Do a step of the wrapped optimizer as if it had this master alone."""
        all_groups = self._inner.param_groups
        all_masters = group["params"]
        self._inner.param_groups = [group]
        group["params"] = [master]
        try:
            step_optimizer(self._inner)
        finally:
            self._inner.param_groups = all_groups
            group["params"] = all_masters


def scaled_gradient(bucket: Bucket, factor: Tensor | float) -> Tensor:
    """Return `factor` times a bucket's reduced gradients, in the dtype of its masters; may use the gradients up."""
    gradient = bucket.gradient.to(bucket.master.dtype)
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    return gradient.mul_(factor)


def _divisor(factor: Tensor | float, device: torch.device) -> Tensor | None:
    """Return 1 / factor as a float32 number on the device, which does not wait for it; None for a factor of 1."""
    if isinstance(factor, Tensor):
        return factor.reciprocal().to(device, torch.float32)
    return None if factor == 1.0 else torch.full((), 1.0 / factor, dtype=torch.float32, device=device)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


# ---- properties of a class, found out by running it

_ADVICE = (
    "each rank gives it flat slices of parameters, so it must update each element by itself, as AdamW does, "
    "or be shardwise.LAMB or shardwise.Muon"
)
_TRIAL_STEPS = 12
"""Steps of the trial. RAdam changes its update at step 6; a class that does so later than step 12 is not noticed."""
_CLASSES_WITH_ADAM_STATE = {"Adam", "AdamW", "LAMB"}
"""Classes with equal states, which each may continue from."""

MakeOptimizer = Callable[[dict[str, Any]], torch.optim.Optimizer]
"""Makes an optimizer of the wrapped class from a parameter group."""


def require_elementwise(optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
    """Refuse a class that updates a matrix otherwise than two optimizers of it update the matrix's halves, in 12 steps.

    Raises:
        ValueError: names the class and what it did. Errors of its constructor about its options are passed on.
    """
    weight = _random((6, 4), seed=0)
    gradients = _random((_TRIAL_STEPS, 6, 4), seed=1)
    # Rows of different size, so that a norm over all of them shows.
    gradients[:, 3:] *= 100.0
    options = trial_options(defaults)
    matrix = nn.Parameter(weight.clone())
    optimizer = optimizer_class([matrix], **options)
    refusal = f"optimizer_class {optimizer_class.__name__} cannot be sharded: {_ADVICE}"
    try:
        _run(optimizer, matrix, gradients)
        halves: list[Tensor] = []
        for part, gradient in zip(weight.flatten().chunk(2), gradients.flatten(1).chunk(2, dim=1), strict=True):
            half = nn.Parameter(part.clone())
            _run(optimizer_class([half], **options), half, gradient)
            halves.append(half)
    except RAISED as error:
        raise ValueError(f"{refusal}; its trial failed with: {error_text(error)}") from error
    # Equal up to rounding: a fused kernel may add in another order at another length.
    if not torch.allclose(matrix.flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
        raise ValueError(f"{refusal}; its result depends on the whole parameter")


def class_for_slices(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
) -> type[torch.optim.Optimizer]:
    """Make the child of a class that gets the flat slices of this rank; refuse a class that cannot update them."""
    child = without_compiler(optimizer_class)
    if updates_slices(optimizer_class):
        cast("type[SliceOptimizer]", child).has_slices = True
    else:
        require_elementwise(child, defaults)
    return child


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def kept_state(make: MakeOptimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Return the state that a class makes for a parameter in its first step, by name: tensors and numbers.

    The trial's parameter has two elements, so a tensor of that shape is state of each element, and a tensor of one
    element is a number.

    Args:
        make: makes an optimizer of the class from a parameter group; the optimizer of the run is not touched.
        options: options of the parameter group.

    Raises:
        Exception: any error that the class raises for a wrong option.
    """
    trial = nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    trial.grad = torch.zeros_like(trial)
    optimizer = make({**trial_options(options), "params": [trial]})
    if isinstance(optimizer, SliceOptimizer) and optimizer.whole_tensor_groups():
        optimizer.direction(trial, optimizer.param_groups[0], torch.empty_like(trial))
    else:
        step_optimizer(optimizer)
    return {name: value for name, value in optimizer.state[trial].items() if isinstance(value, Tensor | int | float)}


def may_continue(optimizer_class: type[torch.optim.Optimizer], saved: str) -> bool:
    """True if a class may have the state of the class `saved`: itself, a parent, a child, or an Adam of an Adam."""
    parents = optimizer_class.__mro__[: optimizer_class.__mro__.index(torch.optim.Optimizer)]
    # The wrapped class is a child of the user's class and has its name: the user's class is the last of that name.
    user_class = [parent for parent in parents if parent.__name__ == optimizer_class.__name__][-1]
    names = {relative.__name__ for relative in (*parents, *_children(user_class))}
    has_adam_state = not names.isdisjoint(_CLASSES_WITH_ADAM_STATE)
    return saved in names or (saved in _CLASSES_WITH_ADAM_STATE and has_adam_state)


def _children(parent: type[Any]) -> Iterator[type[Any]]:
    for child in parent.__subclasses__():
        yield child
        yield from _children(child)


def is_of_elements(kept: object) -> bool:
    """Return whether an entry of `kept_state` has a value for each element of a parameter."""
    return isinstance(kept, Tensor) and kept.shape == (2,)


def is_number(value: object, parameter: Tensor) -> bool:
    """Return whether an entry of a parameter's state is a single number, such as a count of steps."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.shape != parameter.shape
    return isinstance(value, int | float)


def trial_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a class as a trial on the CPU can have them: `capturable` needs an accelerator."""
    replaced = {"lr": 0.01, "capturable": False}
    return {key: replaced.get(key, value) for key, value in options.items()}


def _run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: Tensor) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_optimizer(optimizer)
