"""Buckets of which a rank keeps less than whole between their uses: the stages 2 and 3 of ZeRO.

At stage 2 gradients of all elements have memory only until they are reduced, at stage 3 parameters only while a unit of
the model uses them: a parameter whose memory is released refuses to be read, since a kernel would read memory that is
not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, see
from shardwise.distributed import collectives, placement
from shardwise.distributed.collectives import Pending
from shardwise.distributed.torch_private import call_without_overrides
from shardwise.layers.embedding import head_leaf
from shardwise.layers.units import parameters_by_unit, unit_roots
from shardwise.optim.bucket_layout import FIRST_PLACE, UnitPlace, bucket_bytes, packed
from shardwise.optim.buckets import Bucket, has_matrices
from shardwise.optim.sharding import Cut, OptimizerDtypes, Sharding

# ---- memory of flat tensors, whose views stay, and are valid while it is there


def _has_memory(flat: Tensor) -> bool:
    return flat.untyped_storage().nbytes() > 0


def allocate(flat: Tensor) -> None:
    """Give a flat tensor memory, whose values are arbitrary."""
    flat.untyped_storage().resize_(flat.nbytes)


def release(flat: Tensor) -> None:
    """Release the memory of a flat tensor and of all its views."""
    flat.untyped_storage().resize_(0)


@torch.no_grad()
def draw_outside_buckets(parameter: nn.Parameter) -> None:
    """Draw a parameter that lies in no freed bucket, if it was made without memory (`make_parameter`)."""
    if not _has_memory(parameter):
        allocate(parameter)
        placement.draw_deferred(parameter, parameter.zero_())


_METADATA = frozenset((
    "__get__", "__set__", "__hash__", "size", "dim", "numel", "stride", "element_size", "is_floating_point",
    "register_hook", "register_post_accumulate_grad_hook", "view_as",
))  # fmt: skip
"""Functions of torch that read no element of a parameter. `__get__` is that of properties, such as `shape`; by
`view_as` torch finds the node that accumulates the gradient."""
_ALIASES = [getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH")]
"""Properties that are views of the elements."""


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while its memory is released: functions that read its elements are refused."""

    is_released = True
    gathered_class: type[nn.Parameter]
    path: str
    """Name in its model."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _METADATA and func not in _ALIASES:
            return call_without_overrides(func, args, kwargs or {})
        paths = [arg.path for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, ReleasedParameter)]
        raise ConfigError(
            f"with optimizer.zero (3) the parameter {paths[0] if paths else 'of an operation'} must be read in the "
            "forward pass of the module that has it, a block, embedding or head, and it was read elsewhere, where its "
            "memory is released: read it there, or inside `with optimizer.gathered():`, or set optimizer.zero=2"
            f"{see('training#released-parameter')}"
        )


def _mark_released(parameter: nn.Parameter) -> None:
    if not isinstance(parameter, ReleasedParameter):
        gathered_class = type(parameter)
        parameter.__class__ = ReleasedParameter
        assert isinstance(parameter, ReleasedParameter)
        parameter.gathered_class = gathered_class


# ---- buckets


class FreedGradients(Bucket):
    """A bucket whose gradients have memory only until they are reduced; the owned part has memory of its own."""

    def __init__(self, parameters: Sequence[nn.Parameter], *arguments: Any, **options: Any) -> None:
        has_gradients = any(p.grad is not None for p in parameters)
        self._is_summed = False
        super().__init__(parameters, *arguments, **options)
        # Kernels that read the padding between parameters find 0 there.
        ends = [offset + p.numel() for offset, p in zip(self.offsets, self.parameters, strict=True)]
        self._gaps = [slice(end, start) for end, start in zip(ends, [*self.offsets[1:], self.numel], strict=True)]
        if not has_gradients:
            self._release_gradients()
            self.attach_gradients()

    def _own(self) -> tuple[Tensor, Tensor]:
        gradient, values = super()._own()
        return gradient.clone(), values

    @property
    def gradient_bytes(self) -> int:
        return self.gradient.nbytes

    def attach_gradients(self) -> None:
        """Make every `.grad` the bucket's view again, or None while the gradients have no memory."""
        has_gradients = _has_memory(self.gradients)
        for leaf, view in self._leaves:
            leaf.grad = view if has_gradients else None

    def zero_gradients(self) -> None:
        self._release_gradients()
        self._is_summed = False
        self._group_sums.clear()
        self.attach_gradients()

    def provide_gradients(self) -> None:
        if self._allocate_gradients():
            for flat in self._gradient_buffers:
                flat.zero_()
        self.attach_gradients()

    def _allocate_gradients(self) -> bool:
        """Give the gradients memory if they have none, of arbitrary values but for 0 between the parameters."""
        if self.is_reducing:
            self.finish_reduction()
        if _has_memory(self.gradients):
            return False
        for flat in self._gradient_buffers:
            allocate(flat)
            for gap in self._gaps:
                flat[gap].zero_()
        return True

    def _release_gradients(self) -> None:
        for flat in self._gradient_buffers:
            release(flat)

    def adopt(self, index: int) -> None:
        leaf, view = self._leaves[index]
        if leaf.grad is not view:
            self._allocate_gradients()
            super().adopt(index)

    def keep_local(self, index: int) -> None:
        p = self.parameters[index]
        if p.grad is not None:
            p.grad = p.grad.to(self.gradients.dtype)

    def spoil(self, norm: Tensor) -> None:
        smallest = min(self.parameters, key=lambda p: p.numel())
        smallest.grad = torch.zeros(smallest.shape, dtype=self.gradients.dtype, device=norm.device)
        smallest.grad += norm * 0

    def start_reduction(self) -> None:
        super().start_reduction()
        # The next backward pass may add to gradients before this sum is complete: they begin elsewhere.
        for leaf, _ in self._leaves:
            leaf.grad = None

    def _take_sum(self, total: Tensor) -> None:
        if self._is_summed:
            self.gradient.add_(total)
        else:
            self.gradient.copy_(total)

    def finish_reduction(self) -> None:
        if self.is_reducing:
            super().finish_reduction()
            self._release_gradients()
            self._is_summed = True

    def check_gradients(self) -> None:
        """Do nothing: what the user finds in `.grad` is no memory of the bucket."""


class FreedWeights(FreedGradients):
    """A bucket whose parameters, too, have memory only while a unit of the model uses them.

    Attributes:
        keeps_values: True if the values are whole, and may be changed, until it is set to False.
    """

    frees_values: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.keeps_values = False
        self._gather: Pending | None = None
        self.release_values()

    def _own(self) -> tuple[Tensor, Tensor]:
        gradient, values = super()._own()
        return gradient, values.clone()

    @property
    def value_bytes(self) -> int:
        return self.shard.nbytes

    def adopt_changes(self) -> None:
        if self.keeps_values:
            self.take_values()

    def differs_from_masters(self) -> Tensor | None:
        return None

    def start_gather(self) -> Pending | None:
        if self.keeps_values:
            return super().start_gather()
        self._round_masters()
        self.release_values()
        return None

    def begin_gather(self) -> None:
        """Start bringing all elements to this rank, if they have no memory."""
        if not _has_memory(self.values):
            allocate(self.values)
            self._gather = collectives.all_gather_async(self.shard, self.group, out=self.values)

    def finish_gather(self) -> None:
        """Wait until the parameters are complete, and let them be read."""
        self.begin_gather()
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            self.has_values = True
            for p in self.parameters:
                if isinstance(p, ReleasedParameter):
                    p.__class__ = p.gathered_class  # type: ignore[assignment]

    def release_values(self) -> None:
        """Release the memory of the parameters but for the owned part; waits for a gather that is under way."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        if _has_memory(self.values):
            release(self.values)
            self.has_values = False
            for p in self.parameters:
                _mark_released(p)

    def take_values(self) -> None:
        """Take over changes of gathered parameters to the owned part and the masters."""
        self.shard.copy_(self.values[self.owned])
        self.adopt_values()


def places_in(model: nn.Module) -> dict[nn.Parameter, UnitPlace]:
    """Return the places by which `make_buckets` packs a model's parameters: stage and first unit of each."""
    places: dict[nn.Parameter, UnitPlace] = {}
    for number, stage in enumerate(unit_roots(model)):
        for unit, parameters in enumerate(parameters_by_unit(stage).values()):
            for p in parameters:
                places.setdefault(p, UnitPlace(number, unit))
    return places


def make_buckets(
    parameters: Sequence[nn.Parameter],
    sharding: Sharding,
    cut: Cut,
    dtypes: OptimizerDtypes,
    places: Mapping[nn.Parameter, UnitPlace],
) -> list[Bucket]:
    """Make buckets of at most `bucket_mib` of gradients (None: `bucket_bytes`), packed by `bucket_layout.packed`.

    A parameter that ranks of other pipeline stages hold too (a tied weight) has a bucket to itself: the same elements
    must be owned by corresponding ranks of both stages, and the other parameters of the stages differ. So has one with
    `head_gradients`, which are as long as the bucket.

    Args:
        places: pipeline stage and unit of each parameter; one that has none is in the first unit.
    """
    sizes = []
    for i, p in enumerate(parameters):
        place = places.get(p, FIRST_PLACE)
        is_alone = _is_held_elsewhere(p) or head_leaf(p) is not None
        kind = (p.dtype, p.device, place.stage, is_alone and i + 1)
        dtypes.of_master(p.dtype)  # it refuses some, while no parameter has moved
        sizes.append((kind, p.numel() * (dtypes.gradient or p.dtype).itemsize, place.unit))
    cap_bytes = 2**20 * (sharding.bucket_mib or 0)
    if not cap_bytes:
        accelerator = any(p.device.type not in ("cpu", "meta") for p in parameters)
        ranks = cut.ranks.size * cut.copies.size
        cap_bytes = bucket_bytes(sum(size for _, size, _ in sizes), ranks, accelerator=accelerator)
    buckets = []
    for indices in packed(sizes, cap_bytes):
        of_bucket = [parameters[index] for index in indices]
        place = min(places.get(p, FIRST_PLACE) for p in of_bucket)
        on_host = sharding.offload and of_bucket[0].device.type not in ("cpu", "meta")
        buckets.append(_class_of(cut, of_bucket)(of_bucket, cut, dtypes=dtypes, place=place, on_host=on_host))
    return buckets


def _class_of(cut: Cut, parameters: Sequence[nn.Parameter]) -> type[Bucket]:
    """Return the class of a bucket: what its stage of ZeRO frees. Vectors are too small to be worth a gather."""
    if cut.ranks.size == 1 or cut.stage < 2:
        return Bucket
    return FreedWeights if cut.stage == 3 and has_matrices(parameters) else FreedGradients


def _is_held_elsewhere(parameter: nn.Parameter) -> bool:
    record = placement.of_or_whole(parameter)
    copies = (piece.copies for piece in record.pieces if piece.copies.size > 1)
    return any(not set(group.ranks) <= set(record.group.ranks) for group in copies)
