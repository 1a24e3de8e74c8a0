"""Parameters that no group cuts, such as those of torch's own modules: each tensor-parallel rank has a copy of them.

Equal values at the start and equal gradients keep the copies equal. All ranks take the values of the first one, and
gradients that differ from rank to rank are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import comm, placement
from shardwise.errors import ConfigError, listing, see
from shardwise.mesh import Group
from shardwise.optim.buckets import Bucket
from shardwise.optim.checks import broadcast_value, described, require_same_parameters

_SHOWN = 3
_TOLERANCE = 1e-2
"""Relative to a gradient's norm. Copies of a whole gradient differ by rounding at most, its parts by as much as they
are."""


def uncut_of(groups: Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    """The uncut parameters of some parameter groups, in order."""
    return [p for options in groups for p in options["params"] if placement.of_or_whole(p).group.size == 1]


def take_first_values(groups: Sequence[dict[str, Any]], tensor: Group, data: Group, device: torch.device) -> None:
    """Give uncut parameters the values of the first tensor-parallel rank; one rank warns where this changed some.

    Collective over `tensor`. Data parallelism spreads the values of its own first rank afterwards.

    Args:
        groups: parameter groups.
        tensor: the tensor-parallel ranks.
        data: the data-parallel ranks.
        device: where the ranks compute.

    Raises:
        ConfigError: on every rank of `tensor`, the ranks hold other uncut parameters.
    """
    uncut, changed = uncut_of(groups), list[int]()
    if tensor.size == 1 or not uncut:
        return
    require_same_parameters([{"params": uncut}], tensor, device)
    for number, p in enumerate(uncut):
        before = p.detach().clone()
        broadcast_value(p, tensor)
        if not torch.equal(before, p.detach()):
            changed.append(number)
    if not comm.any_rank(bool(changed), tensor):
        return
    everyones = {number for of_rank in comm.all_gather_objects(changed, tensor) for number in of_rank}
    if tensor.rank == data.rank == 0:
        names = described([uncut[number] for number in sorted(everyones)])
        warnings.warn(
            "each tensor-parallel rank holds these parameters whole, and they began with other values on other ranks: "
            f"{listing(names, most=_SHOWN)}. All ranks go on with the values of the first rank, which alone says "
            f"so. Give all ranks one seed before the model is made{see('training#uncut-parameters')}",
            stacklevel=4,  # the caller of the optimizer's constructor, or of add_param_group
        )


class UncutGradients:
    """The gradients of uncut parameters, which the tensor-parallel ranks compare in steps 1, 2, 4, 8, …

    Args:
        groups: parameter groups of the optimizer.
        buckets: of this rank.
        tensor: the tensor-parallel ranks.
        data: the data-parallel ranks.
        device: where the ranks compute.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[Bucket],
        tensor: Group,
        data: Group,
        device: torch.device,
    ) -> None:
        self._tensor, self._data, self._device, self._steps = tensor, data, device, 0
        self._views: list[tuple[nn.Parameter, list[Tensor]]] = []
        """A parameter, and what this rank owns of its gradient."""
        uncut = set(uncut_of(groups) if tensor.size > 1 else ())
        for bucket in buckets:
            for index, p in enumerate(bucket.parameters):
                if p in uncut:
                    runs = bucket.owned_runs(index, placement.Box.whole(tuple(p.shape)))
                    views = [bucket.gradient[start : start + length] for start, length in runs]
                    self._views.append((p, views))

    @torch.no_grad()
    def require_equal(self) -> None:
        """Refuse gradients that differ from those of the first tensor-parallel rank. Collective over the stage.

        Raises:
            ConfigError: on every rank, with the parameters' names.
        """
        self._steps += 1
        if not self._views or self._steps & (self._steps - 1):
            return
        squares = torch.stack([self._squares(views) for _, views in self._views])
        differences, norms = comm.all_reduce_(squares, self._data).unbind(dim=1)
        # Where a value is not finite the comparison is false, as is that of two gradients which are 0.
        differs = (differences > _TOLERANCE**2 * norms).int()
        found = [self._views[row][0] for row in comm.all_reduce_(differs, self._tensor, op="max").nonzero().flatten()]
        if found:
            raise ConfigError(
                "each tensor-parallel rank holds these parameters whole and must get the same gradient, but the ranks' "
                f"gradients differ: {listing(described(found), most=_SHOWN)}. Where a rank sees a part of the sequence "
                "or of the heads, use a layer of shardwise with group= and sequence_parallel_enabled=True, or "
                "shardwise.make_parameter with partial=True; elsewhere give all ranks the same activations, frozen "
                f"parameters and dropout masks{see('training#uncut-parameters')}"
            )

    def _squares(self, views: Sequence[Tensor]) -> Tensor:
        """The squared norm of the difference from the first rank's gradient, and that of the larger of the two."""
        if not views:
            return torch.zeros(2, device=self._device)
        mine = torch.cat(list(views)).float()
        first = comm.broadcast_(mine.clone(), self._tensor)
        return torch.stack([(mine - first).square().sum(), torch.maximum(mine.square().sum(), first.square().sum())])
