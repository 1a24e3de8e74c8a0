"""The stages of a pipeline that a rank holds, and the forward pass through them for evaluation and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.config import Config, Layout, ParallelConfig
from shardwise.config.layout import LayoutStage
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.embedding import ParallelEmbedding
from shardwise.layers.execution import Compiler
from shardwise.models.blocks import ModelPart
from shardwise.models.build import build_balance, build_model
from shardwise.pipeline.partition import pipeline_rank_of, stage_plan


class Stages(nn.ModuleList):
    """The pipeline stages of one rank, in the order of the model; each is built as a `ModelPart`."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.plan: list[LayoutStage] = []

    def add(self, stage: LayoutStage, model: nn.Module) -> None:
        """Append the next stage."""
        self.plan.append(stage)
        self.append(model)

    def pairs(self) -> Iterator[tuple[LayoutStage, nn.Module]]:
        """Each stage with its model."""
        return zip(self.plan, self, strict=True)


def build_stages(
    config: Config,
    layout: Layout,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    deferred: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    compiler: Compiler | None = None,
) -> nn.Module:
    """Return this rank's pipeline stages of the model, `Stages`; without a pipeline the model itself.

    A stage has the same weights as without a pipeline. Only this rank's stages are built.

    Args:
        config: the whole configuration.
        layout: layout on the ranks of `mesh`.
        mesh: mesh of the ranks.
        device: device of the parameters; default: the mesh's.
        dtype, deferred, loss, compiler: as in `build_model`.
    """
    build = partial(
        build_model,
        config,
        mesh.tp,
        sequence_parallel=layout.sequence_parallel,
        mesh=mesh,
        balance=build_balance(config, layout, mesh),
        device=mesh.device if device is None else device,
        dtype=dtype,
        deferred=deferred,
        loss=loss,
        compiler=compiler,
    )
    if layout.pipeline == 1:
        return build()
    plan = stage_plan(config, layout)
    # The ranks of the first and the last stage, if these share a weight; and the embeddings of this rank's stages.
    ends = Group()
    embeddings: dict[str, ParallelEmbedding] = {}
    outer_ranks = (plan[0].rank, plan[-1].rank)
    if not config.model.is_own and config.model.tie_word_embeddings and outer_ranks[0] != outer_ranks[1]:
        # torch names a new group by the number of groups that its members have made so far. So that names stay equal,
        # all ranks make one, also those between the ends, which do not use theirs.
        is_outer = mesh.pp.rank in outer_ranks
        inner_ranks = tuple(rank for rank in range(mesh.pp.size) if rank not in outer_ranks)
        group = mesh.pp.pick(outer_ranks if is_outer else inner_ranks, "ends")
        if is_outer:
            ends = group
    stages = Stages(config.model.hidden_size or 0)
    for stage in plan:
        if stage.rank == mesh.pp.rank:
            stages.add(stage, build(part=ModelPart(stage.layers, stage.is_first, stage.is_last, ends, embeddings)))
    return stages


Compute = Callable[[nn.Module, Tensor | None, int], Tensor]
"""The forward pass of one stage on one micro-batch.

The arguments are the stage's model, the output x of the stage before (None for the first stage), and the number of the
micro-batch. It returns the stage's x, or the losses if it is the last stage.
"""


@torch.no_grad()
def relay(
    model: nn.Module, parallel: ParallelConfig | None, mesh: Mesh, compute: Compute, shapes: Sequence[tuple[int, int]]
) -> None:
    """Run `compute` on every micro-batch in all stages, each with the output of the stage before. Collective.

    A round of as many micro-batches as there are pipeline ranks passes through a rank's first stage, then through its
    next: all ranks work at once, and little is held. Where the last rank sends to the first, a round is one shorter:
    with NCCL a send may block until it is received, and the first rank receives only after its own sends, so a full
    round would wait for itself.

    Args:
        model: the whole model, or this rank's stages.
        parallel: configuration that cut the model into stages; None for a whole one.
        mesh: mesh of the ranks.
        compute: forward pass of one stage on one micro-batch.
        shapes: shape `(S, B)` of each micro-batch, as a rank holds it between blocks.
    """
    if not isinstance(model, Stages):
        for number in range(len(shapes)):
            compute(model, None, number)
        return
    assert parallel is not None, "stages come with the configuration that cut them"
    round_size = parallel.pipeline
    if SCHEDULES[parallel.schedule].allows_more_stages:
        round_size = max(1, parallel.pipeline - 1)
    for first in range(0, len(shapes), round_size):
        last = min(first + round_size, len(shapes))
        _forward_round(model, parallel, mesh, compute, shapes, range(first, last))


def _forward_round(
    model: Stages,
    parallel: ParallelConfig,
    mesh: Mesh,
    compute: Compute,
    shapes: Sequence[tuple[int, int]],
    micro_batches: range,
) -> None:
    dtype = next(model.parameters()).dtype
    sends: list[collectives.Pending] = []
    # The outputs of a stage whose next stage is on this rank too, by micro-batch.
    local_outputs: dict[int, Tensor] = {}
    for stage, part in model.pairs():
        previous_rank = pipeline_rank_of(parallel, stage.index - 1)
        next_rank = pipeline_rank_of(parallel, stage.index + 1)
        for number in micro_batches:
            x = None
            if not stage.is_first and previous_rank == mesh.pp.rank:
                x = local_outputs.pop(number)
            elif not stage.is_first:
                empty = torch.empty(*shapes[number], model.hidden_size, dtype=dtype, device=mesh.device)
                x = collectives.receive(empty, mesh.pp, previous_rank)
            output = compute(part, x, number)
            if not stage.is_last and next_rank == mesh.pp.rank:
                local_outputs[number] = output
            elif not stage.is_last:
                sends.append(collectives.send(output, mesh.pp, next_rank))
    for send in sends:
        send.wait()
