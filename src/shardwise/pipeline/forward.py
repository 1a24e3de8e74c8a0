"""The forward pass alone, through a whole model or all stages of a pipeline: for evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardwise.config import ParallelConfig
from shardwise.config.schedules import SCHEDULES
from shardwise.config.stages import rank_of
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.models.blocks import Family, Stages

Compute: TypeAlias = Callable[[nn.Module, Tensor | None, int], Tensor]
"""(a stage's model, x of the stage before or None, micro-batch) → the stage's x, or the last stage's losses."""


@torch.no_grad()
def relay(
    model: nn.Module, parallel: ParallelConfig | None, mesh: Mesh, compute: Compute, shapes: Sequence[tuple[int, int]]
) -> None:
    """Run `compute` on every micro-batch and part of a model, each stage with the output of the one before; collective.

    A round of as many micro-batches as there are pipeline ranks passes through a rank's first stage, then through its
    next: all ranks work at once, and little is held. Where the last rank sends to the first (interleaved stages), a
    round is one shorter. With NCCL a send may block until it is received, and the first rank receives only after its
    own sends: a full round would wait for itself.

    Args:
        model: whole, or this rank's stages.
        parallel: how the model is cut into stages; None for a whole one.
        compute: as in `Pipeline.step`.
        shapes: of each micro-batch `(S, B)`, as a rank holds it between blocks.
    """
    if not isinstance(model, Stages):
        for number in range(len(shapes)):
            compute(model, None, number)
        return
    assert parallel is not None, "stages come with the configuration that cut them"
    part = model[0]
    assert isinstance(part, Family), "only a family's model is cut into stages"
    hidden, dtype = int(part.config.hidden_size), next(model.parameters()).dtype
    wraps = SCHEDULES[parallel.schedule].is_interleaved
    at_once = max(1, parallel.pipeline - wraps)
    for first in range(0, len(shapes), at_once):
        round_ = range(first, min(first + at_once, len(shapes)))
        sent: list[collectives.Pending] = []
        here: dict[int, Tensor] = {}
        for stage, part in model.pairs():
            before, after = (rank_of(parallel, stage.index + step) for step in (-1, 1))
            for number in round_:
                x = None
                if before == mesh.pp.rank and not stage.is_first:
                    x = here.pop(number)
                elif not stage.is_first:
                    empty = torch.empty(*shapes[number], hidden, dtype=dtype, device=mesh.device)
                    x = collectives.receive(empty, mesh.pp, before)
                out = compute(part, x, number)
                if after == mesh.pp.rank and not stage.is_last:
                    here[number] = out
                elif not stage.is_last:
                    sent.append(collectives.send(out, mesh.pp, after))
        for message in sent:
            message.wait()
