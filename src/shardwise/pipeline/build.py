"""The stages of a pipeline that a rank holds."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from shardwise.config import Config, Layout
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.embedding import ParallelEmbedding
from shardwise.models.blocks import Part, Stages
from shardwise.models.build import build_model
from shardwise.pipeline.partition import stage_plan


def build_stages(
    config: Config,
    layout: Layout,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Return this rank's part of the model: `Stages`, or without a pipeline the model itself.

    A stage has the same weights as without a pipeline. Only this rank's stages are built.

    Args:
        config: the whole configuration.
        layout: layout on the ranks of `mesh`.
        mesh: mesh of the ranks.
        dtype: dtype of the parameters; default: torch's.
        device: device of the parameters; default: the mesh's.
    """
    build = partial(
        build_model,
        config,
        mesh.tp,
        sequence_parallel=layout.sequence_parallel,
        device=mesh.device if device is None else device,
        dtype=dtype,
    )
    if layout.pipeline == 1:
        return build()
    plan = stage_plan(config, layout)
    # The ranks of the first and the last stage, if these share a weight; and the embeddings of this rank's stages.
    ends = Group()
    embeddings: dict[str, ParallelEmbedding] = {}
    outer_ranks = (plan[0].rank, plan[-1].rank)
    if config.known_shapes.tie_word_embeddings and outer_ranks[0] != outer_ranks[1]:
        # torch names a new group by the number of groups that its members have made so far. So that names stay equal,
        # all ranks make one, also those between the ends, which do not use theirs.
        is_outer = mesh.pp.rank in outer_ranks
        inner_ranks = tuple(rank for rank in range(mesh.pp.size) if rank not in outer_ranks)
        group = mesh.pp.pick(outer_ranks if is_outer else inner_ranks, "ends")
        if is_outer:
            ends = group
    stages = Stages()
    for stage in plan:
        if stage.rank == mesh.pp.rank:
            stages.add(stage, build(part=Part(stage.layers, stage.is_first, stage.is_last, ends, embeddings)))
    return stages
