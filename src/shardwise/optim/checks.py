"""The requirements of `ZeroRedundancyOptimizer`: refusals before the damage of a wrong call, in five parts.

Parameters must be plain, the same on all ranks, and still those of the model. Arguments of other libraries' ZeRO
optimizers are taken if they change nothing, and else the message says what replaces them. State may be loaded into an
optimizer of the same layout whose class keeps the same state. A `torch.amp.GradScaler` must find the same on all ranks:
it skips the step and changes its factor by the gradients of its own rank, and one rank's step must not pair with
another rank's next step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.base.errors import ConfigError, listing
from shardwise.config import Frequency
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.arguments import by_name, refuse_unless_neutral
from shardwise.optim.buckets import Bucket
from shardwise.optim.master_update import MakeOptimizer, is_of_elements, kept_state, may_continue

# ---- plain parameters


def require_plain(parameters: Iterable[nn.Parameter], *, has_mesh: bool) -> None:
    """Raise ValueError for parameters of DDP, FSDP or DTensor, complex ones, and a cut model without a mesh."""
    parameters = list(parameters)
    for p in parameters:
        if hasattr(p, "device_mesh") or hasattr(p, "_fsdp_flattened"):
            raise ValueError(
                "a parameter is a DTensor or FSDP's: its owner already shards it; "
                "give the optimizer a model of plain parameters"
            )
        if p.is_complex() and p.requires_grad:
            raise ValueError(f"a parameter's dtype ({p.dtype}) must be real: keep it as torch.view_as_real gives it")
        record = placement.of(p)
        if record is not None and record.group.size > 1 and not has_mesh:
            raise ValueError(
                f"a parameter is cut over {record.group.size} tensor-parallel ranks: give mesh= so that the "
                "data-parallel group and the gradient norm are the model's"
            )
    refuse_wrapped(parameters)


def require_sharding(
    stage: int, model: nn.Module | None, bucket_mib: float | None, *, replicate: int, prefetch: int, **frequencies: str
) -> None:
    """Raise ValueError for arguments that do not say how the parameters are cut into buckets and over ranks.

    frequencies: `micro_batch` or `step` each.
    """
    for name, number, least in (("replicate", replicate, 1), ("prefetch", prefetch, 0)):
        if number < least:
            raise ValueError(f"{name} ({number}) must be at least {least}")
    if bucket_mib is not None and not bucket_mib > 0:
        raise ValueError(f"bucket_mib ({bucket_mib}) must be positive")
    if isinstance(stage, bool) or stage not in range(4):
        raise ValueError(f"stage ({stage}) must be 0, 1, 2 or 3")
    if stage == 3 and model is None:
        raise ValueError("stage (3) must have model=, whose units gather their parameters when they run")
    for name, value in frequencies.items():
        if value not in get_args(Frequency):
            raise ValueError(f"{name} ({value!r}) must be {listing(map(repr, get_args(Frequency)), 'or')}")


def refuse_wrapped(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError for parameters whose gradients a DistributedDataParallel reduces, whenever it was made."""
    accumulated = {id(p) for p in parameters if p.requires_grad and _is_accumulator_held(p)}
    if accumulated and any(id(p) in accumulated for wrapper in _wrappers() for p in wrapper.parameters()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces every gradient by itself: "
            "give ZeroRedundancyOptimizer the parameters of the unwrapped model; its step() does the reduction"
        )


def _is_accumulator_held(parameter: nn.Parameter) -> bool:
    """Return whether DDP or a graph holds the autograd node that accumulates the parameter's gradient.

    Otherwise torch makes a new node for each call, which lacks what was written to the metadata of the last one.
    """

    def metadata() -> Any:  # a dict, though torch annotates it as a method
        return get_gradient_edge(parameter).node.metadata

    metadata()["shardwise"] = True
    return "shardwise" in metadata()


def _wrappers() -> Iterator[DistributedDataParallel]:
    """Yield all instances in this process: the garbage collector knows the objects that refer to their classes."""
    classes = [DistributedDataParallel]
    for wrapper_class in classes:  # also those that the next line adds
        classes += wrapper_class.__subclasses__()
    return (item for item in gc.get_referrers(*classes) if issubclass(type(item), DistributedDataParallel))


# ---- the same parameters on all ranks


def require_same_parameters(groups: Sequence[dict[str, Any]], group: Group, device: torch.device) -> None:
    """Require the same parameters in the same order on all ranks of `group`; one all-reduce of a digest.

    Args:
        groups: parameter groups of the optimizer.
        group: ranks that must agree.
        device: device on which the ranks compute.

    Raises:
        ConfigError: the parameters differ; raised on every rank, with the first one that does.
    """
    if group.size == 1:
        return
    descriptions = [text for number, options in enumerate(groups) for text in _descriptions(number, options)]
    digest = hashlib.blake2b("\n".join(descriptions).encode(), digest_size=8).digest()
    # 63 bits, so that the number and its negative are int64.
    number = int.from_bytes(digest, "little") >> 1
    digests = torch.tensor([number, -number], device=device)
    if torch.equal(collectives.all_reduce_(digests.clone(), group, op="max"), digests):
        return  # the largest digest of any rank is also the smallest
    by_rank = collectives.all_gather_objects(descriptions, group)
    differing_rank = next(rank for rank, texts in enumerate(by_rank) if texts != by_rank[0])
    pairs = zip_longest(by_rank[0], by_rank[differing_rank], fillvalue="missing")
    at, (first, second) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
    raise ConfigError(
        f"all ranks must give the optimizer the same parameters in the same order; parameter {at} is {first} on rank "
        f"{group.ranks[0]}, but {second} on rank {group.ranks[differing_rank]}"
    )


def _descriptions(number: int, options: dict[str, Any]) -> Iterable[str]:
    """Yield a text for each parameter of a group: the properties, without values, that must be equal on all ranks."""
    parameters: list[nn.Parameter] = options["params"]
    for name, p in zip(options.get("param_names") or [""] * len(parameters), parameters, strict=True):
        name = name or "+".join(piece.name for piece in placement.of_or_whole(p).pieces)
        strides = "" if p.is_contiguous() else f" with strides {list(p.stride())}"
        frozen = "" if p.requires_grad else " (frozen)"
        yield f"{name} {list(p.shape)}{strides} of {p.dtype} in group {number}{frozen}".lstrip()


def described(parameters: Sequence[nn.Parameter]) -> list[str]:
    """Return names of parameters for a message: the longest path that a module has for each, or the shape."""
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    paths: dict[nn.Parameter, str] = {}
    for module in modules:
        with contextlib.suppress(AttributeError):  # its class, or a child's, has not called super().__init__()
            for path, p in module.named_parameters():
                paths[p] = max(paths.get(p, ""), path, key=len)
    return [paths.get(p, f"one of shape {list(p.shape)}") for p in parameters]


def device_of(groups: Sequence[dict[str, Any]], mesh: Mesh | None) -> torch.device:
    """Return the device of the parameters in some parameter groups, trained or frozen; without any, the mesh's."""
    otherwise = torch.device("cpu") if mesh is None else mesh.device
    first = next((p.device for options in groups for p in options["params"]), otherwise)
    return torch.device("cpu") if first.type == "meta" else first


def broadcast_value(parameter: nn.Parameter, group: Group) -> None:
    """Give a parameter the value of the group's first rank, whatever its dtype and memory format."""
    if group.size == 1 or not parameter.numel():
        return
    value = parameter.detach()
    contiguous = value.contiguous()
    # As bytes: backends lack broadcasts of some dtypes.
    collectives.broadcast_(contiguous.view(-1).view(torch.uint8), group)
    if contiguous is not value:
        value.copy_(contiguous)


# ---- parameters that the model still uses


class Assignments:
    """A record of the module parameters that are replaced, by `load_state_dict(assign=True)` or `module.weight = …`.

    An optimizer that was made before would train the old one.

    Args:
        parameters: parameters of the optimizer.
    """

    def __init__(self, parameters: Container[nn.Parameter]) -> None:
        self._parameters = parameters
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}  # in order, so that ranks report the same
        _watch_assignments()
        _watching.add(self)

    def note(self, module: nn.Module, name: str) -> None:
        """Remember `name` of a module, which is about to be replaced, if it is one of the parameters."""
        replaced = _direct_parameter(module, name)
        if replaced is not None and replaced in self._parameters:
            self._places[weakref.ref(module), name] = None

    def check(self) -> None:
        """Raise RuntimeError if a trainable parameter that is not watched has replaced a watched one."""
        for reference, name in self._places:
            module = reference()
            current = None if module is None else _direct_parameter(module, name)
            if current is not None and current.requires_grad and current not in self._parameters:
                raise RuntimeError(
                    f"{name} of a {type(module).__name__}, of shape {tuple(current.shape)}, replaced a parameter of "
                    "the optimizer and would not be trained: load weights without assign=True, or make the optimizer "
                    "again"
                )


_watching: weakref.WeakSet[Assignments] = weakref.WeakSet()


@functools.cache
def _watch_assignments() -> None:
    """Register torch's hook, once for the process: it cannot be limited to some modules."""
    register_module_parameter_registration_hook(_note_assignment)


def _note_assignment(module: nn.Module, name: str, _parameter: Tensor | None) -> None:
    for assignments in list(_watching):
        assignments.note(module, name)


def _direct_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter `name` of a module itself; a plain attribute of that name is none."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)


# ---- arguments of other libraries

_POSITIONAL = ("pin_layout", "sharding_groups", "grad_norm_groups", "lazy_init")
"""The arguments of torch_xla's class after `max_norm`, in its order."""


def known_options(
    sharded: type[torch.optim.Optimizer],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    given: Mapping[str, object],
    further: Sequence[object] = (),
) -> dict[str, Any]:
    """Return the arguments of a call that are for the wrapped class.

    Args:
        sharded: class that is called.
        optimizer_class: class that it wraps.
        given: keyword arguments of the call that `sharded` does not name.
        further: torch_xla's positional arguments after `max_norm`.

    Raises:
        ArgumentError: neither class takes an argument; the message says what replaces it.
    """
    taken = inspect.signature(optimizer_class).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    passed_on = [*taken, *given] if takes_any else [*taken]
    options = by_name(sharded.__name__, further, _POSITIONAL, given)
    unknown = {name: value for name, value in options.items() if name not in passed_on}
    named = [name for name in inspect.signature(sharded).parameters if name not in ("further", "defaults")]
    refuse_unless_neutral(sharded.__name__, unknown, dict.fromkeys([*named, *passed_on]), "optimizer")
    return {name: value for name, value in options.items() if name in passed_on}


# ---- state to load

_KEYS = ("state", "param_groups", "masters", "layout")


def layout_of(buckets: Sequence[Bucket], ranks: Group) -> dict[str, Any]:
    """Return the facts that decide which elements' state a rank has.

    Args:
        buckets: buckets of this rank.
        ranks: ranks that share the state.
    """
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
    state_dict: object,
    inner: torch.optim.Optimizer,
    make: MakeOptimizer,
    layout: dict[str, Any],
) -> None:
    """Refuse state of another layout, or of a class that keeps other state; nothing is changed.

    Args:
        state_dict: state to load.
        inner: wrapped optimizer that gets it.
        make: makes an optimizer of its class from a parameter group.
        layout: layout of the optimizer.

    Raises:
        ValueError: the state is no `state_dict()` of this optimizer, or is of another layout, bucket size, model or
            class.
    """
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
    groups = inner.param_groups
    loaded_groups = given["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    loaded_sizes = [len(group["params"]) for group in loaded_groups]
    if sizes != loaded_sizes:
        raise ValueError(
            f"optimizer state has parameter groups of {loaded_sizes} buckets, which must be this optimizer's {sizes}"
        )
    states = given["state"]
    saved_class = given.get("class")
    for group, loaded in zip(groups, loaded_groups, strict=True):
        kept = kept_state(make, {**group, **loaded})
        loaded_states = [states[number] for number in loaded["params"] if number in states]
        if given.get("steps") and group["params"] and not states:
            # A class without state must not take over from one that keeps some.
            loaded_states = [{}]
        for state in loaded_states:
            _require_kept(state, kept, type(inner), saved_class)
        for number, master in zip(loaded["params"], group["params"], strict=True):
            _require_shapes(states.get(number, {}), kept, master)
    shapes = _master_shapes(groups, layout)
    stored_shapes = [list(m.shape) if isinstance(m, torch.Tensor) else None for m in given["masters"] or ()]
    if stored_shapes != shapes:
        raise ValueError(f"optimizer state has masters of shapes {stored_shapes}, which must be {shapes}")


def _master_shapes(groups: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]) -> list[list[int] | None]:
    """Return the shapes of the masters by bucket; None for masters that are the parameters' own memory."""
    masters = [master for group in groups for master in group["params"]]
    shapes: list[list[int] | None] = []
    for master, dtypes in zip(masters, layout["dtypes"], strict=True):
        parameter_dtype, _, master_dtype = dtypes.partition("/")
        shapes.append(None if parameter_dtype == master_dtype else list(master.shape))
    return shapes


def _require_kept(
    state: Mapping[str, Any], kept: Mapping[str, Any], optimizer_class: type[torch.optim.Optimizer], saved: str | None
) -> None:
    """Raise ValueError for the state of a bucket that is not what the class keeps, or is of another class."""
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


def _require_shapes(state: Mapping[str, Any], kept: Mapping[str, Any], master: torch.Tensor) -> None:
    """Raise ValueError for a tensor that holds a value for each element, and not for each of this bucket's."""
    for key, value in state.items():
        shape = list(getattr(value, "shape", ()))
        if is_of_elements(kept.get(key)) and shape != list(master.shape):
            raise ValueError(f"optimizer state has {key} of shape {shape}, which must be {list(master.shape)}")


# ---- a torch.amp.GradScaler


@torch.no_grad()
def spread_non_finite(buckets: Sequence[Bucket], gradient_norm: Tensor) -> None:
    """Make a gradient of each bucket NaN if the whole model's gradient norm is not finite; else change nothing."""
    for bucket in buckets:
        # 0 times a finite norm is 0, and NaN otherwise: no synchronisation with the device is needed.
        if bucket.frees_gradients:
            smallest = min(bucket.parameters, key=lambda p: p.numel())
            smallest.grad = torch.zeros(smallest.shape, dtype=bucket.gradients.dtype, device=gradient_norm.device)
            smallest.grad += gradient_norm * 0
        else:
            bucket.gradients[0] += gradient_norm * 0
            bucket.note_gradients()


def require_scaled(scale: Tensor | None, *, clipped: bool) -> Tensor:
    """Return the factor that a scaler gives to `step`, by which it has multiplied the loss and so the gradients.

    Raises:
        RuntimeError: the gradients were unscaled, or clipped, before.
    """
    if scale is None:
        raise RuntimeError(
            "scaler.unscale_(optimizer) looked for inf in one rank's gradients before they were reduced: leave it out; "
            "optimizer.step() unscales the gradients and clips them to max_norm"
        )
    if clipped:
        raise RuntimeError(
            "optimizer.clip_grad_norm_() clipped the gradients of a scaled loss: leave it out and set max_norm; "
            "optimizer.step() clips to it after it unscales"
        )
    return scale
