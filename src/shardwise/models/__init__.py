"""The model families. Each is one short file that reads like the architecture, built from the sharded layers below."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.config import BertConfig, Config, GPTConfig, GPTNeoXConfig, LlamaConfig, OwnConfig
from shardwise.mesh import Group
from shardwise.models.bert import Bert
from shardwise.models.blocks import CausalLM
from shardwise.models.gpt import GPT
from shardwise.models.gpt_neox import GPTNeoX
from shardwise.models.llama import Llama
from shardwise.models.own import build_own, check_own

__all__ = ["GPT", "Bert", "CausalLM", "GPTNeoX", "Llama", "build_model", "check_own"]

_FAMILIES: dict[type, Callable[..., nn.Module]] = {
    LlamaConfig: Llama,
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
) -> nn.Module:
    """This rank's shard of the model that `config.model` describes, with weights drawn from (seed, canonical name).

    group: the tensor-parallel ranks.

    Raises:
        ConfigError: `model.family` names a class of the user's that cannot be imported or made.
    """
    model = config.model
    if isinstance(model, OwnConfig):
        return build_own(config, group, sequence_parallel=sequence_parallel, device=device, dtype=dtype)
    return _FAMILIES[type(model)](
        model,
        group,
        sequence_parallel=sequence_parallel,
        recompute=config.train.recompute,
        seed=config.train.seed,
        device=device,
        dtype=dtype,
    )
