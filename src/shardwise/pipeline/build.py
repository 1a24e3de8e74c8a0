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
    """This rank's part of the model: `Stages`, or without a pipeline the model itself.

    A stage has the same weights as without a pipeline. Only this rank's stages are built.

    Args:
        config: the whole configuration.
        layout: on the ranks of `mesh`.
        dtype: of the parameters; default: torch's.
        device: of the parameters; default: the mesh's.
    """
    where = mesh.device if device is None else device
    build = partial(build_model, config, mesh.tp, sequence_parallel=layout.sequence_parallel, device=where, dtype=dtype)
    if layout.pipeline == 1:
        return build()
    plan = stage_plan(config, layout)
    ends, embeddings = Group(), dict[str, ParallelEmbedding]()
    outer = (plan[0].rank, plan[-1].rank)
    if config.known_shapes.tie_word_embeddings and outer[0] != outer[1]:
        # torch names a new group by the number of groups that its members have made so far. So that names stay equal,
        # all ranks make one, also those between the ends, which do not use theirs.
        between = tuple(rank for rank in range(mesh.pp.size) if rank not in outer)
        group = mesh.pp.pick(outer if mesh.pp.rank in outer else between, "ends")
        ends = group if mesh.pp.rank in outer else Group()
    stages = Stages()
    for stage in plan:
        if stage.rank == mesh.pp.rank:
            stages.add(stage, build(part=Part(stage.layers, stage.is_first, stage.is_last, ends, embeddings)))
    return stages
