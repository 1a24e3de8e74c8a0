"""The shapes of a model of the user's own, from a build without data: parameters, FLOPs, activations.

The class is built, and a micro-batch goes through it forward and backward, with tensors that have a shape and no data:
parameters, FLOPs and what the forward pass saves are counted. What no build tells, such as how fast blocks of it run
when they are cut, is taken from a Llama of the same width, depth and matrices, which formulas know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import flop_counter

from shardwise.base.errors import RAISED, ConfigError, error_text
from shardwise.config import Config, UserModelConfig
from shardwise.config.stand_in import StandIn
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import fake_tensors
from shardwise.models.parameter_counts import OwnShapes
from shardwise.models.user_model import build_user_model, takes


@lru_cache(maxsize=8)
def own_shapes(config: Config, accelerator: bool = False) -> OwnShapes:
    """Build the class that `model.family` names without data, and count; `accelerator`: in the dtype of one.

    Raises:
        ConfigError: it cannot be built, or its forward fails without data.
    """
    section = config.model
    assert isinstance(section, UserModelConfig), "the shapes of a family are known without a build"
    family = section.family
    train = config.train
    config = config.with_keys(train={"recompute": "none"})
    dtype: torch.dtype = getattr(torch, config.precision.resolved(accelerator).parameter)
    with fake_tensors():
        model = build_user_model(config, Group(), sequence_parallel=False, dtype=dtype, seeds=False)
        shape = (train.sequence_length, train.micro_batch)
        ids_SB = torch.zeros(shape, dtype=torch.int64)
        given = {"positions_SB": config.data.reset_position_ids, "starts_SB": config.data.reset_attention_mask}
        further = {name: torch.zeros_like(ids_SB) for name, is_given in given.items() if is_given}
        own = {_storage(parameter) for parameter in model.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in own:
                saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        try:
            with flop_counter.FlopCounterMode(display=False, custom_mapping=_uncounted()) as counter:
                with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                    loss = model(ids_SB, ids_SB, **further)
                loss.sum().backward()
        except RAISED as error:
            raise ConfigError(
                f"model.family ({family}): forward must work on tensors without data, from which FLOPs and memory are "
                f"counted: {error_text(error)}"
            ) from error
    return OwnShapes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        token_flops=counter.get_total_flops() / math.prod(shape),
        saved_bytes=sum(saved.values()),
        like=_like(model, section, shape[0]),
        is_cut=takes(family, "group"),
        recomputes=takes(family, "recompute"),
    )


def _storage(tensor: Tensor) -> int:
    """A number by which tensors that share their memory are known."""
    return int(tensor.untyped_storage()._cdata)


def _uncounted() -> dict[Any, Any]:
    """The FLOPs of operators that torch counts wrong or not: oneDNN's product, attention on CPUs, grouped ones."""

    def product(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * int(math.prod(x_shape)) * int(weight_shape[0])

    def grouped(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * int(math.prod(x_shape if len(weight_shape) > 2 else x_shape[-2:])) * int(weight_shape[-1])

    def convolution_backward(y: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any) -> int:
        # Each gradient costs as much as the output. torch does not divide that of the weight by `groups`.
        transposed, asked = rest[4], rest[7]
        return int(sum(asked[:2]) * flop_counter.conv_flop_count(list(x), list(weight), list(y), transposed))

    def attention(*shapes: Any, **_: Any) -> int:
        return int(flop_counter.sdpa_flop_count(*shapes[:3]))

    def attention_backward(_: Any, *shapes: Any, **__: Any) -> int:
        return 2 * attention(*shapes)  # the scores that it computes again are no work of the model

    counted = {
        (torch.ops.mkldnn, "_linear_pointwise"): product,
        (torch.ops.aten, "_grouped_mm"): grouped,
        (torch.ops.aten, "convolution_backward"): convolution_backward,
        (torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"): attention,
        (torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"): attention_backward,
    }
    return {getattr(ops, name): flops for (ops, name), flops in counted.items() if hasattr(ops, name)}


def _like(model: nn.Module, section: UserModelConfig, length: int) -> StandIn:
    """The Llama of the width of the widest table of the vocabulary, and of the longest list of blocks."""
    vocabulary = section.vocab_size
    tables = [p for p in model.parameters() if p.dim() == 2 and vocabulary in p.shape]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)]
    blocks = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=nn.ModuleList([model]))
    matrices = sum(p.numel() for p in blocks.parameters() if p.dim() > 1) / len(blocks)
    width = max((min(p.shape) if p.shape[0] != p.shape[1] else vocabulary for p in tables), default=0)
    if not width:
        raise ConfigError(
            f"model.family ({section.family}) must have a matrix with model.vocab_size ({vocabulary}) rows for a plan, "
            "by which its width is known"
        )
    counts = (getattr(module, "num_heads", None) for module in model.modules())
    heads = section.num_attention_heads or next((count for count in counts if isinstance(count, int)), 1)
    kv_heads = section.num_key_value_heads or heads
    head_dim = max(2, width // heads // 2 * 2)
    attention = 2 * width * head_dim * (heads + kv_heads)
    return StandIn.model_validate(
        {
            "own": section,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "family": "llama",
            "vocab_size": vocabulary,
            "hidden_size": width,
            # The gated MLP has three matrices.
            "intermediate_size": max(1, round((matrices - attention) / (3 * width))),
            "num_hidden_layers": len(blocks),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": length,
            "tie_word_embeddings": len(tables) == 1,
        }
    )


def own_token_flops(config: Config) -> float | None:
    """FLOPs of a training token of a model of the user's own; None if its forward needs data."""
    try:
        return own_shapes(config).token_flops
    except ConfigError:
        return None
