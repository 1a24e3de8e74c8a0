"""Facts of the wrapped class: what it does and which state it keeps, found out by running it on a small parameter.

ZeRO-1 gives the wrapped optimizer flat slices of many parameters. This is right for Adam, SGD and their like, and wrong
for a class that looks at a whole parameter (somebody's LAMB, Muon's matrix, Adafactor's factors), at all of them
(LBFGS's line search) or at sparse gradients. There is no list of good classes.

A class that looks at a whole tensor, and which ZeRO-1 can shard all the same, derives from `SliceOptimizer`: it says
how it updates the slices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, cast, overload

import torch
from torch import Tensor, nn

from shardwise.base.errors import RAISED, ConfigError, error_text, listing
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Pieces
from shardwise.distributed.torch_private import step_optimizer, without_compiler
from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import CanonicalNorms, ElementRun
from shardwise.optim.sharding import OptimizerDtypes, Ranks, Sharding

_ADVICE = (
    "each rank gives it flat slices of parameters, so it must update each element by itself, as AdamW does, "
    "or be shardwise.LAMB or shardwise.Muon"
)
_TRIAL_STEPS = 12
"""Steps of the trial. RAdam changes its update at step 6; a class that does so later than step 12 is not noticed."""
_CLASSES_WITH_ADAM_STATE = {"Adam", "AdamW", "LAMB"}  # classes with equal states, which each may continue from

MakeOptimizer = Callable[[dict[str, Any]], torch.optim.Optimizer]
"""Makes an optimizer of the wrapped class from a parameter group."""


def require_elementwise(optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> list[str]:
    """Refuse a class that updates a matrix otherwise than two optimizers of it update the matrix's halves, in 12 steps.

    The numbers that it keeps must be equal too: Prodigy's and D-Adaptation's estimates of a distance, which are sums
    over all weights, begin so small that weights differ much later.

    Returns:
        the entries of its state that no checkpoint stores.

    Raises:
        ValueError: names the class and what it did. Errors of its constructor about its options are passed on.
    """
    name = optimizer_class.__name__
    if callable(getattr(optimizer_class, "eval", None)):  # schedule-free classes; others have no such method
        raise ValueError(
            f"optimizer_class {name} cannot be sharded: its eval() gives the averaged weights that are to be evaluated "
            "and saved, and a training would take those of its steps: choose a class without eval()"
        )
    weight, gradients = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
        for seed, shape in enumerate(((6, 4), (_TRIAL_STEPS, 6, 4)))
    )
    # Rows of different size, so that a norm over all of them shows.
    gradients[:, 3:] *= 100.0
    options = _trial_options(defaults)
    matrix = nn.Parameter(weight.clone())
    whole = optimizer_class([matrix], **options)
    refusal = f"optimizer_class {name} cannot be sharded: {_ADVICE}"
    try:
        _run(whole, matrix, gradients)
        numbers = [_numbers(whole, matrix)]
        halves: list[Tensor] = []
        for part, gradient in zip(weight.flatten().chunk(2), gradients.flatten(1).chunk(2, dim=1), strict=True):
            half = nn.Parameter(part.clone())
            optimizer = optimizer_class([half], **options)
            _run(optimizer, half, gradient)
            numbers.append(_numbers(optimizer, half))
            halves.append(half)
    except RAISED as error:
        raise ValueError(f"{refusal}; its trial failed with: {error_text(error)}") from error
    # Equal up to rounding: a fused kernel may add in another order at another length.
    is_elementwise = torch.allclose(matrix.flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7)
    if not is_elementwise or any(
        each.shape != numbers[0].shape or not torch.allclose(each, numbers[0], rtol=1e-5, atol=0.0, equal_nan=True)
        for each in numbers[1:]
    ):
        raise ValueError(f"{refusal}; its result depends on the whole parameter")
    return unstorable(whole.state[matrix], matrix)


def class_for_slices(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]
) -> type[torch.optim.Optimizer]:
    """Make the child of a class that gets the flat slices of this rank; refuse a class that cannot update them."""
    child = without_compiler(optimizer_class)
    if _updates_slices(optimizer_class):
        cast("type[SliceOptimizer]", child).has_slices = True
    elif (tried := (optimizer_class, repr(defaults))) not in _elementwise:
        require_elementwise(child, defaults)
        _elementwise.add(tried)
    return child


_elementwise: set[tuple[type[torch.optim.Optimizer], str]] = set()
"""Classes that this process has tried, with the text of their options."""


def kept_state(make: MakeOptimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Return the state that a class makes for a parameter in its first step, by name: tensors and numbers.

    The trial's parameter has two elements, so a tensor of that shape is state of each element, and a tensor of one
    element is a number.

    Args:
        make: makes an optimizer of the class from a parameter group; the optimizer of the run is not touched.

    Raises:
        Exception: any error that the class raises for a wrong option.
    """
    trial = nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    trial.grad = torch.zeros_like(trial)
    optimizer = make({**_trial_options(options), "params": [trial]})
    if isinstance(optimizer, SliceOptimizer) and optimizer.whole_tensor_groups():
        optimizer.direction(trial, optimizer.param_groups[0], torch.empty_like(trial))
    else:
        step_optimizer(optimizer)
    return {name: value for name, value in optimizer.state[trial].items() if isinstance(value, Tensor | int | float)}


def may_continue(optimizer_class: type[torch.optim.Optimizer], saved: str) -> bool:
    """True if a class may have the state of the class `saved`: itself, a parent, a child, or an Adam of an Adam."""
    parents = optimizer_class.__mro__[: optimizer_class.__mro__.index(torch.optim.Optimizer)]
    # The wrapped class is a child of the user's class and has its name: the user's class is the last of that name.
    relatives = [[parent for parent in parents if parent.__name__ == optimizer_class.__name__][-1]]
    for relative in relatives:  # also those that the next line adds
        relatives += relative.__subclasses__()
    names = {relative.__name__ for relative in (*parents, *relatives)}
    return saved in names or (saved in _CLASSES_WITH_ADAM_STATE and not names.isdisjoint(_CLASSES_WITH_ADAM_STATE))


def unstorable(state: Mapping[str, Any], parameter: Tensor) -> list[str]:
    """Return the entries of a parameter's state that no checkpoint stores, with their kinds."""
    entries: list[str] = []
    for name, value in state.items():
        if value is None or is_number(value, parameter):
            continue
        if not isinstance(value, Tensor):
            entries.append(f"{name} ({type(value).__name__})")
        elif value.shape != parameter.shape:
            entries.append(f"{name} (shape {list(value.shape)})")
    return entries


def is_number(value: object, parameter: Tensor) -> bool:
    """Return whether an entry of a parameter's state is a single number, such as a count of steps."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.shape != parameter.shape
    return isinstance(value, int | float)


def _trial_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a class as a trial on the CPU can have them: `capturable` needs an accelerator."""
    replaced = {"lr": 0.01, "capturable": False}
    return {key: replaced.get(key, value) for key, value in options.items()}


def _numbers(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """Return the numbers of an optimizer's group and of its parameter's state by the order of names, without counts."""
    entries = {**options_of(optimizer.param_groups[0]), **optimizer.state[parameter]}
    numbers = [entries[name] for name in sorted(entries, key=str) if is_number(entries[name], parameter)]
    reals = [float(number) for number in numbers if isinstance(number, float) or torch.is_tensor(number)]
    return torch.tensor(reals, dtype=torch.float64, device="cpu")


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    options = group.copy()
    del options["params"]
    return options


def _run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: Tensor) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step_optimizer(optimizer)


def _updates_slices(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class updates slices as its `step` updates whole tensors.

    A child that replaces `step` or `step_tensors` alone does not: its `step_slices` is still that of its parent.
    """
    if not issubclass(optimizer_class, SliceOptimizer):
        return False
    parent = next(ancestor for ancestor in optimizer_class.__mro__ if "step_slices" in vars(ancestor))
    assert issubclass(parent, SliceOptimizer)
    # torch wraps `step` to profile it.
    is_step_kept = inspect.unwrap(optimizer_class.step) is inspect.unwrap(parent.step)
    return is_step_kept and optimizer_class.step_tensors is parent.step_tensors


# ---- state to load

_KEYS = ("state", "param_groups", "masters", "layout")


def layout_of(buckets: Sequence[Bucket], ranks: Group) -> dict[str, Any]:
    """Return the layout of an optimizer's buckets, which decides which elements' state a rank has."""
    orders = [bucket.orders for bucket in buckets]
    layout: dict[str, Any] = {}
    # Left out for contiguous parameters: states of earlier versions lack it.
    if any(list(order) != sorted(order) for bucket_orders in orders for order in bucket_orders):
        layout["orders"] = orders
    return layout | {
        "rank": ranks.rank,
        "ranks": ranks.size,
        "buckets": [bucket.numel for bucket in buckets],
        "dtypes": [f"{bucket.values.dtype}/{bucket.master.dtype}" for bucket in buckets],
    }


def require_loadable(
    state_dict: object, inner: torch.optim.Optimizer, make: MakeOptimizer, layout: dict[str, Any]
) -> None:
    """Raise ValueError for state of another layout, or of a class that keeps other state; nothing is changed."""
    given = state_dict if isinstance(state_dict, Mapping) else {}
    lacked = [key for key in _KEYS if key not in given]
    if lacked:
        raise ValueError(
            f"optimizer state must be what ZeroRedundancyOptimizer.state_dict() gave, and it lacks {listing(lacked)}: "
            "state of another optimizer cannot be loaded"
        )
    stored = given["layout"]
    if stored != layout:
        raise ValueError(f"optimizer state is of layout {stored}, which must be this optimizer's {layout}")
    saved_class = given.get("class")
    for group, loaded in zip(inner.param_groups, given["param_groups"], strict=False):
        kept = kept_state(make, {**group, **loaded})
        loaded_states = [given["state"][number] for number in loaded["params"] if number in given["state"]]
        if given.get("steps") and group["params"] and not given["state"]:
            # A class without state must not take over from one that keeps some.
            loaded_states = [{}]
        for state in loaded_states:
            _require_kept(state, kept, type(inner), saved_class)


def _require_kept(
    state: Mapping[str, Any], kept: Mapping[str, Any], optimizer_class: type[torch.optim.Optimizer], saved: str | None
) -> None:
    names = {key for key, value in state.items() if value is not None}
    name = optimizer_class.__name__
    # A class may make more state in later steps than in its first.
    is_whole = kept.keys() <= names and (saved == name or not names - kept.keys())
    if not is_whole or (saved is not None and not may_continue(optimizer_class, saved)):
        kept_names = listing(sorted(kept)) or "nothing"
        loaded_names = listing(sorted(names)) or "nothing"
        raise ValueError(
            f"optimizer state ({loaded_names}, of {saved or 'another class'}) must be what {name} keeps "
            f"({kept_names}): make the optimizer of the class whose state it is"
        )


@dataclass(frozen=True)
class ModelSlices:
    """The slices of the model that this rank owns, and the ranks that own the others.

    Attributes:
        pieces: pieces of canonical tensors that each parameter holds.
        sum_dtype: argument of `CanonicalNorms`.
    """

    groups: list[list[Bucket]]
    pieces: Pieces
    device: torch.device
    ranks: Ranks
    sum_dtype: torch.dtype | None

    @cached_property
    def norms(self) -> CanonicalNorms:
        """L2 norms of the canonical tensors. The first use is collective over the world."""
        return CanonicalNorms(self.groups, self.pieces, self.device, self.ranks, self.sum_dtype)


class RoundedSlices(Protocol):
    """Slices whose masters and state are bfloat16: each update is computed in float32, of a chunk of a run at a time.

    A chunk has at most `chunk_elements`. The state that counts is that from before this step, until it is stored.
    """

    def load(self, chunk: ElementRun) -> Tensor:
        """Copy a chunk's masters, gradients and state to float32; return the copy of the masters `[N]`."""
        ...

    def load_direction(self, chunk: ElementRun) -> tuple[Tensor, Tensor]:
        """Load a chunk and take its gradient into the copy of its state; return also its direction `[N]`."""
        ...

    def store(self, chunk: ElementRun) -> None:
        """Round the copies of masters and state, of the chunk that was loaded last, to where the chunk has them."""
        ...


class SliceOptimizer(torch.optim.Optimizer):
    """An optimizer that `ZeroRedundancyOptimizer` steps by `step_slices`, and not one bucket after the other.

    Attributes:
        has_slices: True if the parameters are flat slices; `ZeroRedundancyOptimizer` sets it in a child of its own.
    """

    has_slices: ClassVar[bool] = False

    @classmethod
    def require_tensor(cls, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        """Raise ValueError if no canonical tensor of this `shape` may be in a parameter group with these `options`."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, each as one tensor; `closure` computes the loss before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_tensors()
        return loss

    def step_tensors(self) -> None:
        """Update every parameter that has a gradient, each as one tensor."""
        raise NotImplementedError

    def step_slices(self, model: ModelSlices) -> None:
        """Update the masters of the buckets of `model`, whose gradients are set. Every rank of the model calls this."""
        raise NotImplementedError

    @staticmethod
    def _needs_whole_tensors(group: dict[str, Any]) -> bool:
        """Return whether the update of a parameter group needs more than each element by itself."""
        raise NotImplementedError

    def whole_tensor_groups(self) -> list[int]:
        """Return the numbers of the parameter groups that `_needs_whole_tensors`."""
        return [number for number, group in enumerate(self.param_groups) if self._needs_whole_tensors(group)]

    def step_rounded(self, model: ModelSlices, slices: RoundedSlices) -> None:
        """Update the masters of the `whole_tensor_groups` as `step_slices` does, with stochastic rounding by `slices`.

        The reduced gradients are neither averaged nor clipped yet.
        """
        raise NotImplementedError

    def direction(self, p: nn.Parameter, group: dict[str, Any], out: Tensor) -> Tensor:
        """Take the gradient of p, of the parameter group `group`, into the state, and write the direction to `out`.

        `out` has p's shape `[…]` and may be the gradient's own memory.
        """
        raise NotImplementedError

    def _gradient(self, p: nn.Parameter) -> Tensor:
        """Return the gradient of p in its dtype; RuntimeError if it is sparse or complex."""
        assert p.grad is not None
        if p.grad.is_sparse or p.is_complex():
            name = type(self).__name__
            raise RuntimeError(f"{name} takes dense and real gradients: make embeddings with sparse=False")
        return p.grad.to(p.dtype)


def gradient_of(bucket: Bucket) -> Tensor:
    """Return the gradient of a bucket's master, which `step_slices` may replace by a direction."""
    assert bucket.master.grad is not None
    return bucket.master.grad


def require_suitable(
    optimizer_class: type[torch.optim.Optimizer], sharding: Sharding, dtypes: OptimizerDtypes, model: nn.Module | None
) -> None:
    """Refuse what does not go together: ZeRO-3 without a model, and options of elementwise classes with others."""
    if sharding.stage == 3 and model is None:
        raise ValueError("stage (3) must have model=, whose units gather their parameters when they run")
    if sharding.offload and dtypes.rounds_at_random:
        raise ConfigError(
            "offload (True) must be False with rounding='stochastic' or a state_dtype, whose random bits the device "
            "draws: leave them out, with optimizer_dtype=torch.float32"
        )
    for name, value in (("offload", sharding.offload or None), ("state_dtype", dtypes.state)):
        if value is not None and issubclass(optimizer_class, SliceOptimizer):
            raise ConfigError(
                f"{name} ({value}) must be left out with {optimizer_class.__name__}, which needs whole tensors: give "
                "an elementwise class, such as torch.optim.AdamW"
            )
