"""The model families, each in one short file that reads like the architecture, and how a model is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from shardwise.config import BertConfig, Config, DecoderConfig, GPTConfig, GPTNeoXConfig, Layout, OwnConfig
from shardwise.mesh import Group, Mesh
from shardwise.models.bert import Bert
from shardwise.models.blocks import Part, Stages, gives_losses
from shardwise.models.causal import CausalLM
from shardwise.models.gpt import GPT
from shardwise.models.gpt_neox import GPTNeoX
from shardwise.models.llama import Llama
from shardwise.models.own import build_own, check_own
from shardwise.parallel import ParallelEmbedding
from shardwise.parallel.linear import set_overlap
from shardwise.plan.partition import stage_plan

__all__ = [
    "GPT",
    "Bert",
    "CausalLM",
    "GPTNeoX",
    "Llama",
    "Part",
    "Stages",
    "build_model",
    "build_stages",
    "check_own",
    "gives_losses",
]

_FAMILIES: dict[type, Callable[..., nn.Module]] = {
    DecoderConfig: Llama,
    GPTConfig: GPT,
    GPTNeoXConfig: GPTNeoX,
    BertConfig: Bert,
}


def build_model(
    config: Config,
    group: Group,
    *,
    sequence_parallel: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    part: Part | None = None,
) -> nn.Module:
    """This rank's shard of the model that `config.model` describes, with weights drawn from (seed, canonical name).

    Args:
        config: the whole configuration.
        group: the tensor-parallel ranks.
        sequence_parallel: whether activations are cut along the sequence between tensor-parallel regions.
        device, dtype: of the parameters; default: torch's.
        part: the pipeline stage to build; None: the whole model.

    Raises:
        ConfigError: `model.family` names a class of the user's that cannot be imported or built.
    """
    model = config.model
    if isinstance(model, OwnConfig):
        built = build_own(config, group, sequence_parallel=sequence_parallel, device=device, dtype=dtype)
    else:
        built = next(family for section, family in _FAMILIES.items() if isinstance(model, section))(
            model,
            group,
            sequence_parallel=sequence_parallel,
            recompute=config.train.recompute,
            part=part,
            vocab_multiple=config.parallel.vocab_multiple,
            seed=config.train.seed,
            device=device,
            dtype=dtype,
        )
    set_overlap(built, config.parallel.tensor_overlap)
    return built


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
    build = partial(build_model, config, mesh.tp, sequence_parallel=layout.sequence, device=where, dtype=dtype)
    if layout.pipeline == 1:
        return build()
    assert not isinstance(config.model, OwnConfig), "check_layout refuses it"
    plan = stage_plan(config, layout)
    ends, embeddings = Group(), dict[str, ParallelEmbedding]()
    outer = (plan[0].rank, plan[-1].rank)
    if config.model.tie_word_embeddings and outer[0] != outer[1]:
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
