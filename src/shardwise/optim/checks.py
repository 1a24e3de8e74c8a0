"""The requirements of `ZeroRedundancyOptimizer`: refusals before the damage of a wrong call.

Parameters must be plain, the same on all ranks, and still those of the model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.base.errors import ConfigError
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.arguments import refuse_unknown

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


def refuse_wrapped(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError for parameters whose gradients a DistributedDataParallel reduces."""
    classes = [DistributedDataParallel]
    for wrapper_class in classes:  # also those that the next line adds
        classes += wrapper_class.__subclasses__()
    # The garbage collector knows the objects that refer to their classes.
    wrappers = (item for item in gc.get_referrers(*classes) if issubclass(type(item), DistributedDataParallel))
    trained = {id(p) for p in parameters if p.requires_grad}
    if any(id(p) in trained for wrapper in wrappers for p in wrapper.parameters()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces every gradient by itself: "
            "give ZeroRedundancyOptimizer the parameters of the unwrapped model; its step() does the reduction"
        )


# ---- the same parameters on all ranks


def require_same_parameters(groups: Sequence[dict[str, Any]], group: Group, device: torch.device) -> None:
    """Require the same parameters in the same order on all ranks of `group`; one all-reduce of a digest.

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


class ParameterWatch:
    """A watch over what happens to the parameters of an optimizer after it was made, which then would not train them.

    Modules' parameters are replaced by `load_state_dict(assign=True)` or `module.weight = …`, or a
    DistributedDataParallel wraps them.

    Attributes:
        is_due: False while nothing happened that a check could find.
    """

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        self._parameters = parameters
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}  # in order, so that ranks report the same
        self.is_due = True
        _watch_assignments()
        _watching.add(self)

    def note(self, module: nn.Module, name: str) -> None:
        """Remember `name` of a module, which is about to be replaced, if it is one of the parameters."""
        replaced = _direct_parameter(module, name)
        if replaced is not None and replaced in self._parameters:
            self._places[weakref.ref(module), name] = None
            self.is_due = True

    def check(self) -> None:
        """Raise if a trainable parameter that is not watched has replaced a watched one, or a wrapper took them."""
        refuse_wrapped(self._parameters)
        for reference, name in self._places:
            module = reference()
            current = None if module is None else _direct_parameter(module, name)
            if current is not None and current.requires_grad and current not in self._parameters:
                raise RuntimeError(
                    f"{name} of a {type(module).__name__}, of shape {tuple(current.shape)}, replaced a parameter of "
                    "the optimizer and would not be trained: load weights without assign=True, or make the optimizer "
                    "again"
                )
        self.is_due = False


_watching: weakref.WeakSet[ParameterWatch] = weakref.WeakSet()


@functools.cache
def _watch_assignments() -> None:
    """Register torch's hook, once for the process: it cannot be limited to some modules."""

    def note(module: nn.Module, name: str, _parameter: Tensor | None) -> None:
        for watch in list(_watching):
            watch.note(module, name)

    register_module_parameter_registration_hook(note)


def _direct_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter `name` of a module itself; a plain attribute of that name is none."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)


def require_known_options(
    sharded: type[torch.optim.Optimizer], wrapped: Callable[..., torch.optim.Optimizer], options: Mapping[str, object]
) -> None:
    """Refuse keyword arguments of a call of `sharded` that neither its own signature has nor the wrapped class's.

    Raises:
        ArgumentError: there are some; the message says what replaces those of other libraries.
    """
    taken = inspect.signature(wrapped).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        refuse_unknown(sharded, options, taken, "optimizer")


# ---- a torch.amp.GradScaler


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
