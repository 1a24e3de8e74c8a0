"""Parameters that no group cuts, such as those of torch's own modules: each tensor-parallel rank has a whole copy.

Equal values at the start and equal gradients keep the copies equal, bit for bit. All ranks take the values of the first
one, and in each step its gradients, which a kernel may sum in another order elsewhere. Gradients that differ by more
than that are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, listing, see
from shardwise.base.tensor_box import Box
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.optim.buckets import Bucket
from shardwise.optim.checks import described, require_same_parameters
from shardwise.optim.sharding import Ranks

_SHOWN_NAMES = 3
_TOLERANCE = 1e-2
"""Largest difference relative to a gradient's norm. Copies of a whole gradient differ by rounding, far less than this;
different parts of a gradient differ by about its norm."""


def uncut_of(groups: Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the uncut parameters of some parameter groups, in order."""
    return [p for options in groups for p in options["params"] if placement.of_or_whole(p).group.size == 1]


def take_first_values(groups: Sequence[dict[str, Any]], ranks: Ranks, device: torch.device) -> None:
    """Give uncut parameters the values of the first tensor-parallel rank; one rank warns where this changed some.

    Collective over tensor parallelism. Data parallelism spreads the values of its own first rank afterwards.

    Raises:
        ConfigError: the ranks hold different uncut parameters; raised on every tensor-parallel rank.
    """
    uncut = uncut_of(groups)
    changed: list[int] = []
    tensor = ranks.tensor
    if tensor.size == 1 or not uncut:
        return
    require_same_parameters([{"params": uncut}], tensor, device)
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
    """The gradients of uncut parameters: in each step those of the first tensor-parallel rank.

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
        uncut = set(uncut_of(groups))
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
        """Refuse gradients that differ from those of the first rank."""
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
    """Return the first rank's values of some tensors, by one broadcast for each dtype."""
    firsts: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = {number: tensor for number, tensor in enumerate(tensors) if tensor.dtype == dtype}
        flat = torch.cat([tensor.reshape(-1) for tensor in of_dtype.values()])
        if flat.numel():
            collectives.broadcast_(flat.view(torch.uint8), group)
        parts = flat.split([tensor.numel() for tensor in of_dtype.values()])
        firsts |= {number: part.view(tensors[number].shape) for number, part in zip(of_dtype, parts, strict=True)}
    return [firsts[number] for number in range(len(tensors))]
