"""What `ZeroRedundancyOptimizer` requires: plain parameters, the same on all ranks, which the model still uses."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise import comm, placement
from shardwise.errors import ConfigError
from shardwise.mesh import Group, Mesh

# ---- plain


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
    """Raise ValueError for parameters whose gradients a DistributedDataParallel reduces, whenever it was made."""
    accumulated = {id(p) for p in parameters if p.requires_grad and _is_accumulator_held(p)}
    if accumulated and any(id(p) in accumulated for wrapper in _wrappers() for p in wrapper.parameters()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which reduces every gradient by itself: "
            "give ZeroRedundancyOptimizer the parameters of the unwrapped model; its step() does the reduction"
        )


def _is_accumulator_held(parameter: nn.Parameter) -> bool:
    """Whether DDP or a graph holds the autograd node that accumulates the parameter's gradient.

    Otherwise torch makes a new node for each call, which lacks what was written to the metadata of the last one.
    """

    def metadata() -> Any:  # a dict, though torch annotates it as a method
        return get_gradient_edge(parameter).node.metadata

    metadata()["shardwise"] = True
    return "shardwise" in metadata()


def _wrappers() -> Iterator[DistributedDataParallel]:
    """All instances in this process: the garbage collector knows what refers to their classes."""
    classes = [DistributedDataParallel]
    for wrapper_class in classes:  # also those that the next line adds
        classes += wrapper_class.__subclasses__()
    return (item for item in gc.get_referrers(*classes) if issubclass(type(item), DistributedDataParallel))


# ---- the same on all ranks


def require_same_parameters(groups: Sequence[dict[str, Any]], group: Group, device: torch.device) -> None:
    """Require the same parameters in the same order on all ranks of `group`; one all-reduce of a digest.

    Args:
        groups: parameter groups of the optimizer. device: where the ranks compute.

    Raises:
        ConfigError: on every rank, with the first parameter that differs.
    """
    if group.size == 1:
        return
    mine = [text for number, options in enumerate(groups) for text in _descriptions(number, options)]
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    wanted = torch.tensor([number, -number], device=device)
    if torch.equal(comm.all_reduce_(wanted.clone(), group, op="max"), wanted):  # the largest is also the smallest
        return
    everyone = comm.all_gather_objects(mine, group)
    other = next(i for i, theirs in enumerate(everyone) if theirs != everyone[0])
    at, first, second = next(
        (at, *pair)
        for at, pair in enumerate(zip_longest(everyone[0], everyone[other], fillvalue="missing"))
        if pair[0] != pair[1]
    )
    raise ConfigError(
        f"all ranks must give the optimizer the same parameters in the same order; parameter {at} is {first} on rank "
        f"{group.ranks[0]}, but {second} on rank {group.ranks[other]}"
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
    """Names of parameters for a message: the longest path that a module of this process has for each, or the shape."""
    modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    paths: dict[nn.Parameter, str] = {}
    for module in modules:
        with contextlib.suppress(AttributeError):  # its class, or a child's, has not called super().__init__()
            for path, p in module.named_parameters():
                paths[p] = max(paths.get(p, ""), path, key=len)
    return [paths.get(p, f"one of shape {list(p.shape)}") for p in parameters]


def device_of(groups: Sequence[dict[str, Any]], mesh: Mesh | None) -> torch.device:
    """Where the parameters of some parameter groups lie, trained or frozen; the mesh's device where there are none."""
    otherwise = torch.device("cpu") if mesh is None else mesh.device
    first = next((p.device for options in groups for p in options["params"]), otherwise)
    return torch.device("cpu") if first.type == "meta" else first


def broadcast_value(parameter: nn.Parameter, group: Group) -> None:
    """Give a parameter the value of the group's first rank, whatever its dtype and memory format."""
    if group.size == 1 or not parameter.numel():
        return
    value = parameter.detach()
    whole = value.contiguous()
    comm.broadcast_(whole.view(-1).view(torch.uint8), group)
    if whole is not value:
        value.copy_(whole)


# ---- still used by the model


class Assignments:
    """Remembers where a module's parameter is replaced, by `load_state_dict(assign=True)` or `module.weight = …`.

    An optimizer that was made before would train the old one.

    Args:
        parameters: those to watch.
    """

    def __init__(self, parameters: Container[nn.Parameter]) -> None:
        self._parameters = parameters
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}  # in order, so that ranks report the same
        _watch_assignments()
        _watching.add(self)

    def note(self, module: nn.Module, name: str) -> None:
        """Remember `name` of a module, which is about to be replaced, if it is one of the parameters."""
        before = _own_parameter(module, name)
        if before is not None and before in self._parameters:
            self._places[weakref.ref(module), name] = None

    def check(self) -> None:
        """Raise RuntimeError if a trainable parameter that is not watched has replaced a watched one."""
        for reference, name in self._places:
            module = reference()
            now = None if module is None else _own_parameter(module, name)
            if now is not None and now.requires_grad and now not in self._parameters:
                raise RuntimeError(
                    f"{name} of a {type(module).__name__}, of shape {tuple(now.shape)}, replaced a parameter of the "
                    "optimizer and would not be trained: load weights without assign=True, or make the optimizer again"
                )


_watching: weakref.WeakSet[Assignments] = weakref.WeakSet()


@functools.cache
def _watch_assignments() -> None:
    register_module_parameter_registration_hook(_note_assignment)


def _note_assignment(module: nn.Module, name: str, _parameter: Tensor | None) -> None:
    for assignments in list(_watching):
        assignments.note(module, name)


def _own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    return next((p for own, p in module.named_parameters(recurse=False, remove_duplicate=False) if own == name), None)
