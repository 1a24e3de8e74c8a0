"""A model built from its configuration: one of the families, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.config import BertConfig, Config, DecoderConfig, FamilyConfig, GPTConfig, GPTNeoXConfig
from shardwise.distributed.mesh import Group
from shardwise.layers.linear import set_overlap, set_regathers
from shardwise.models.bert import Bert
from shardwise.models.blocks import Part
from shardwise.models.causal import CausalLM
from shardwise.models.fp8_blocks import multiply_in_fp8
from shardwise.models.gpt import GPT
from shardwise.models.gpt_neox import GPTNeoX
from shardwise.models.llama import Llama
from shardwise.models.user_model import build_user_model

_ARCHITECTURES: dict[type[FamilyConfig], Callable[..., nn.Module]] = {
    DecoderConfig: Llama,
    GPTConfig: GPT,
    GPTNeoXConfig: GPTNeoX,
    BertConfig: Bert,
}
"""The class of a family's configuration, or a base of it → the module. Here, as configurations do not import torch."""


def build_model(
    config: Config,
    group: Group,
    *,
    sequence_parallel: bool,
    context_group: Group | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    part: Part | None = None,
    deferred: bool = False,
) -> nn.Module:
    """Build this rank's shard of the model that `config.model` describes; weights depend on (seed, canonical name).

    Args:
        config: the whole configuration.
        group: the tensor-parallel ranks.
        sequence_parallel: true if activations are cut along the sequence between tensor-parallel layers.
        context_group: the ranks that share each sample; None: each rank has samples of its own.
        device: device of the parameters; None: torch's default.
        dtype: dtype of the parameters; None: torch's default.
        part: the pipeline stage to build; None: the whole model.
        deferred: true if the optimizer gives the parameters of a family memory and values (`LayerOptions`).

    Raises:
        ConfigError: `model.family` names a class of the user's that cannot be imported or built; or widths or a lack of
            layers that `precision.matmul` refuses.
    """
    model = config.shapes
    if model is None:
        built = build_user_model(config, group, sequence_parallel=sequence_parallel, device=device, dtype=dtype)
    else:
        make = next(module for record, module in _ARCHITECTURES.items() if isinstance(model, record))
        built = make(
            model,
            group,
            sequence_parallel=sequence_parallel,
            recompute=config.recompute,
            part=part,
            vocab_multiple=config.parallel.vocab_multiple,
            context_group=context_group,
            seed=config.train.seed,
            device=device,
            dtype=dtype,
            deferred=deferred,
        )
    if isinstance(built, CausalLM):
        built.passes_keys = config.passes_keys
    set_overlap(built, config.parallel.tensor_overlap)
    set_regathers(built, config.regathers)
    if config.precision.matmul is not None:
        multiply_in_fp8(built, config, context_group)
    return built
