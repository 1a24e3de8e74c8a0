"""The forward pass alone, through all stages: for evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.config import ParallelConfig
from shardwise.config.sections import V_SHAPED
from shardwise.mesh import Mesh
from shardwise.models import Stages
from shardwise.plan.stage import rank_of

Compute: TypeAlias = Callable[[nn.Module, Tensor | None, int], Tensor]
"""(a stage's model, x of the stage before or None, micro-batch) → the stage's x, or the last stage's losses."""


@torch.no_grad()
def relay(
    stages: Stages,
    parallel: ParallelConfig,
    mesh: Mesh,
    compute: Compute,
    micro_batches: int,
    empty: Callable[[int], Tensor],
) -> None:
    """Run `compute` on every stage and micro-batch, each stage with what the one before gave; collective.

    A round of as many micro-batches as there are pipeline ranks goes through a rank's first stage, then through its
    next: all ranks work at once, and little is held. Where the last rank sends to the first (interleaved stages), a
    round is one shorter. With NCCL a send may block until it is received, and the first rank receives only after its
    own sends: a full round would wait for itself.

    Args:
        compute: as in `Pipeline.step`.
        empty: a tensor like what a stage gives for a micro-batch.
    """
    wraps = parallel.stages_per_rank > 1 and parallel.schedule not in V_SHAPED
    at_once = max(1, parallel.pipeline - wraps)
    for first in range(0, micro_batches, at_once):
        round_ = range(first, min(first + at_once, micro_batches))
        sent: list[comm.Pending] = []
        here: dict[int, Tensor] = {}
        for stage, model in stages.pairs():
            before, after = (rank_of(parallel, stage.index + step) for step in (-1, 1))
            for number in round_:
                x = None
                if not stage.is_first:
                    is_here = before == mesh.pp.rank
                    x = here.pop(number) if is_here else comm.receive(empty(number), mesh.pp, before)
                out = compute(model, x, number)
                if stage.is_last:
                    continue
                if after == mesh.pp.rank:
                    here[number] = out
                else:
                    sent.append(comm.send(out, mesh.pp, after))
        for message in sent:
            message.wait()
