"""The requirements of `ZeroRedundancyOptimizer`: refusals before the damage of a wrong call.

Parameters must be plain, the same on all ranks, and still those of the model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwise.base.errors import ConfigError, listing, see
from shardwise.base.tensor_box import Box
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.layers.arguments import refuse_unknown
from shardwise.optim.buckets import Bucket
from shardwise.optim.sharding import Ranks

_SHOWN_NAMES = 3
_TOLERANCE = 1e-2
"""Largest difference relative to a gradient's norm. Copies of a whole gradient differ by rounding, far less than this;
different parts of a gradient differ by about its norm."""

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
    _refuse_wrapped(parameters)


def _refuse_wrapped(parameters: Iterable[nn.Parameter]) -> None:
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


def require_same_parameters(groups: Sequence[dict[str, Any]], group: Group) -> None:
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
    digests = torch.tensor([number, -number], device=group.message_device)
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
        # Ranks may have tensors of other names.
        pieces = [piece.name for piece in placement.of_or_whole(p).pieces if piece.replicas is None]
        name = name or "+".join(pieces)
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


# ---- parameters that no group cuts, such as those of torch's own modules: each tensor-parallel rank has a whole copy
#
# Equal values at the start and equal gradients keep the copies equal, bit for bit. All ranks take the values of the
# first one, and in each step its gradients, which a kernel may sum in another order elsewhere. Gradients that differ by
# more than that are refused.


def _uncut_of(groups: Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    return [p for options in groups for p in options["params"] if placement.of_or_whole(p).group.size == 1]


def take_first_values(groups: Sequence[dict[str, Any]], ranks: Ranks) -> None:
    """Give an optimizer's uncut parameters the first tensor-parallel rank's values; one rank warns of changes.

    Collective over tensor parallelism. Data parallelism spreads the values of its own first rank afterwards.

    Raises:
        ConfigError: the ranks hold different uncut parameters; raised on every tensor-parallel rank.
    """
    uncut = _uncut_of(groups)
    changed: list[int] = []
    tensor = ranks.tensor
    if tensor.size == 1 or not uncut:
        return
    require_same_parameters([{"params": uncut}], tensor)
    values = [p.detach() for p in uncut]
    for number, (value, first) in enumerate(zip(values, _of_first_rank(values, tensor), strict=True)):
        if not torch.equal(value, first):
            value.copy_(first)
            changed.append(number)
    if not collectives.any_rank(bool(changed), tensor):
        return
    changed_anywhere = set[int]().union(*collectives.all_gather_objects(changed, tensor))
    if tensor.rank == ranks.data.rank == 0:
        names = described([uncut[number] for number in sorted(changed_anywhere)])
        warnings.warn(
            "each tensor-parallel rank holds these parameters whole, and they began with other values on other ranks: "
            f"{listing(names, most=_SHOWN_NAMES)}. All ranks go on with the values of the first rank, which alone says "
            f"so. Give all ranks one seed before the model is made{see('training#uncut-parameters')}",
            stacklevel=4,  # the caller of the optimizer's constructor, or of add_param_group
        )


class UncutGradients:
    """The gradients of an optimizer's uncut parameters: in each step those of the first tensor-parallel rank.

    In steps 1, 2, 4, 8, … the ranks compare them.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], buckets: Sequence[Bucket], ranks: Ranks, device: torch.device
    ) -> None:
        self._tensor = ranks.tensor
        self._data = ranks.data
        self._device = device
        self._steps = 0
        self._parameters: list[nn.Parameter] = []
        self._views: list[tuple[int, Tensor]] = []
        """Parts of the gradients that this rank owns, each with the number of its parameter."""
        uncut = set(_uncut_of(groups))
        for bucket in buckets:
            for index, p in enumerate(bucket.parameters):
                if p in uncut:
                    for start, length in bucket.owned_runs(index, Box.whole(tuple(p.shape))):
                        self._views.append((len(self._parameters), bucket.gradient[start : start + length]))
                    self._parameters.append(p)

    @torch.no_grad()
    def take_first(self) -> None:
        """Give this rank the first one's gradients, unless they differ by more than rounding. Collective over a stage.

        Raises:
            ConfigError: the gradients differ; raised on every rank, with the parameters' names.
        """
        if not self._parameters:
            return
        self._steps += 1
        firsts = _of_first_rank([view for _, view in self._views], self._tensor)
        if not self._steps & (self._steps - 1):  # a power of 2: n steps cost log₂ n comparisons
            self._require_equal(firsts)
        for (_, view), first in zip(self._views, firsts, strict=True):
            view.copy_(first)

    def _require_equal(self, firsts: Sequence[Tensor]) -> None:
        squares = torch.zeros(len(self._parameters), 2, device=self._device)
        for (number, view), first in zip(self._views, firsts, strict=True):
            gradient = view.float()
            first_gradient = first.float()
            larger = torch.maximum(gradient.square().sum(), first_gradient.square().sum())
            squares[number] += torch.stack([(gradient - first_gradient).square().sum(), larger])
        differences, norms = collectives.all_reduce_(squares, self._data).unbind(dim=1)
        # The comparison is false for values that are not finite, and for two gradients which are 0.
        differs = (differences > _TOLERANCE**2 * norms).int()
        numbers = collectives.all_reduce_(differs, self._tensor, op="max").nonzero().flatten().tolist()
        if numbers:
            names = described([self._parameters[number] for number in numbers])
            raise ConfigError(
                "each tensor-parallel rank holds these parameters whole and must get the same gradient, but the ranks' "
                f"gradients differ: {listing(names, most=_SHOWN_NAMES)}. Where a rank sees a part of the sequence "
                "or of the heads, use a layer of shardwise with group= and sequence_parallel_enabled=True, or "
                "shardwise.make_parameter with partial=True; elsewhere give all ranks the same activations, frozen "
                f"parameters and dropout masks{see('training#uncut-parameters')}"
            )


def _of_first_rank(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    firsts: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = {number: tensor for number, tensor in enumerate(tensors) if tensor.dtype == dtype}
        flat = torch.cat([tensor.reshape(-1) for tensor in of_dtype.values()])
        if flat.numel():
            collectives.broadcast_(flat.view(torch.uint8), group)
        parts = flat.split([tensor.numel() for tensor in of_dtype.values()])
        firsts |= {number: part.view(tensors[number].shape) for number, part in zip(of_dtype, parts, strict=True)}
    return [firsts[number] for number in range(len(tensors))]


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
        _refuse_wrapped(self._parameters)
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


def require_scaled(scale: Tensor | None, buckets: Iterable[Bucket], *, clipped: bool) -> Tensor:
    """Return the factor that a scaler gives to `step`, by which it has multiplied the loss and so the gradients.

    Raises:
        RuntimeError: the gradients were unscaled, or clipped, before; or a part of the loss was not scaled.
    """
    for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
        if unscaled := getattr(parameter, "unscaled_loss_text", None):
            raise RuntimeError(f"the scaler scales the loss, but not {unscaled}")
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
