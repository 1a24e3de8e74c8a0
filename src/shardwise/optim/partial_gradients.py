"""Gradients that are still partial on each rank once data parallelism has reduced them, as placements say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.optim.buckets import Bucket


class PartialGradients:
    """The owned parts of gradients that must still be summed over some ranks, as placements say.

    Attributes:
        summed: True once they are summed in this step.

    Args:
        buckets: buckets of this rank.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.summed = False
        self._views: dict[Group, list[Tensor]] = {}
        for bucket in buckets:
            for index, p in enumerate(bucket.parameters):
                for piece in placement.of_or_whole(p).pieces:
                    if piece.partial and piece.copies.size > 1:
                        views = self._views.setdefault(piece.copies, [])
                        for start, length in bucket.owned_runs(index, piece.local):
                            views.append(bucket.gradient[start : start + length])

    def sum_(self) -> None:
        """Sum them, unless they are `summed` already; one all-reduce for each group."""
        if self.summed:
            return
        self.summed = True
        for group, views in self._views.items():
            if views:
                total = collectives.all_reduce_(torch.cat(views), group)
                for view, part in zip(views, total.split([v.numel() for v in views]), strict=True):
                    view.copy_(part)
