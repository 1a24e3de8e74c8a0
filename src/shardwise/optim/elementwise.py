"""How an optimizer class updates a parameter, and what state it keeps for one, found out by running it.

ZeRO-1 gives the wrapped optimizer flat slices of many parameters. That is right for Adam, SGD and their like, and wrong
for a class that looks at a whole parameter (somebody's LAMB, Muon's matrix, Adafactor's factors), at all of them
(LBFGS's line search) or at sparse gradients. `shardwise.LAMB` is the one whole-tensor class that knows about slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_private import step_optimizer
from shardwise.user_code import RAISED, error_text

_ADVICE = (
    "each rank gives it flat slices of parameters, so it must update each element by itself, as AdamW does, "
    "or be shardwise.LAMB"
)
_STEPS = 12
"""Of the trial. RAdam updates otherwise from step 6 on; a class that does so later than this passes."""

_ADAMS = {"Adam", "AdamW", "LAMB"}
"""Classes with the same moments, which differ in what they do with them."""
MakeOptimizer = Callable[[dict[str, Any]], torch.optim.Optimizer]
"""Makes an optimizer of the wrapped class from a parameter group."""


def require_elementwise(optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
    """Refuse a class that updates a matrix otherwise than two optimizers of it update the matrix's halves, in 12 steps.

    Raises:
        ValueError: with the class's name and what it did. What its constructor says of its options is passed on.
    """
    weight, gradients = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
        for seed, shape in enumerate([(6, 4), (_STEPS, 6, 4)])
    )
    gradients[:, 3:] *= 100.0  # rows of different size, so that a norm over all of them shows
    options = trial_options(defaults)
    whole = nn.Parameter(weight.clone())
    optimizer = optimizer_class([whole], **options)
    refusal = f"optimizer_class {optimizer_class.__name__} cannot be sharded: {_ADVICE}"
    try:
        _run(optimizer, whole, gradients)
        halves: list[Tensor] = []
        for part, gradient in zip(weight.flatten().chunk(2), gradients.flatten(1).chunk(2, dim=1), strict=True):
            half = nn.Parameter(part.clone())
            _run(optimizer_class([half], **options), half, gradient)
            halves.append(half)
    except RAISED as error:
        raise ValueError(f"{refusal}; its trial failed with: {error_text(error)}") from error
    if not torch.allclose(whole.flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
        raise ValueError(f"{refusal}; its result depends on the whole parameter")


def kept_state(make: MakeOptimizer, options: dict[str, Any]) -> dict[str, Any]:
    """The state that a class makes for a parameter in its first step, by name: tensors and numbers.

    The parameter has two elements: a tensor of that shape is state of each element, and one element is a number.

    Args:
        make: makes an optimizer of the class from a parameter group; that of the run is not touched.
        options: of the parameter group.

    Raises:
        Exception: whatever the class raises where an option is wrong.
    """
    trial = nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    trial.grad = torch.zeros_like(trial)
    optimizer = make({**trial_options(options), "params": [trial]})
    step_optimizer(optimizer)
    return {name: value for name, value in optimizer.state[trial].items() if isinstance(value, Tensor | int | float)}


def may_continue(optimizer_class: type[torch.optim.Optimizer], saved: str) -> bool:
    """True if a class may have the state of the one named `saved`: itself, a parent, a child, or an Adam of an Adam."""
    parents = optimizer_class.__mro__[: optimizer_class.__mro__.index(torch.optim.Optimizer)]
    # The wrapped class is a child of the user's that has its name.
    given = [parent for parent in parents if parent.__name__ == optimizer_class.__name__][-1]
    names = {of_class.__name__ for of_class in (*parents, *_children(given))}
    return saved in names or (saved in _ADAMS and not names.isdisjoint(_ADAMS))


def _children(parent: type[Any]) -> Iterator[type[Any]]:
    for child in parent.__subclasses__():
        yield child
        yield from _children(child)


def is_of_elements(kept: object) -> bool:
    """Whether an entry of `kept_state` has a value for each element of a parameter."""
    return isinstance(kept, Tensor) and kept.shape == (2,)


def is_number(value: object, parameter: Tensor) -> bool:
    """Whether an entry of a parameter's state is one number, such as a count of steps."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.shape != parameter.shape
    return isinstance(value, int | float)


def trial_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a class as a trial on the CPU can have them."""
    return {**options, **{k: v for k, v in {"lr": 0.01, "capturable": False}.items() if k in options}}


def _run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: Tensor) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_optimizer(optimizer)
