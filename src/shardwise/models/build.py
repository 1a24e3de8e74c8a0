"""A model built from its configuration: one of the families, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.config import BertConfig, Config, DecoderConfig, GPTConfig, GPTNeoXConfig
from shardwise.distributed.mesh import Group
from shardwise.layers.linear import set_overlap
from shardwise.models.bert import Bert
from shardwise.models.blocks import Part
from shardwise.models.gpt import GPT
from shardwise.models.gpt_neox import GPTNeoX
from shardwise.models.llama import Llama
from shardwise.models.user_model import build_own

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
    model = config.shapes
    if model is None:
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
