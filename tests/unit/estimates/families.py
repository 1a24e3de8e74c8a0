"""Tiny models of every family, for the tests of `cost`."""

from typing import Any

import torch
from torch import nn

from shardwise.config import Config, FamilyConfig, config_from_sections
from shardwise.distributed.mesh import Group
from shardwise.models.build import build_model

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, shared heads, tied, biased": {"family": "llama", "num_key_value_heads": 2, **TIED, **BIASED},
    "qwen2": {"family": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "olmo2": {"family": "olmo2", "num_key_value_heads": 2},
    "olmo3": {"family": "olmo3", "num_key_value_heads": 2, "sliding_window": 5, "layer_types": 2},
    "gemma3": {"family": "gemma3", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5, "layer_types": 2},
    "smollm3": {"family": "smollm3", "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1, 1]},
    "gpt": {"family": "gpt"},
    "gpt, untied, relu": {"family": "gpt", "tie_word_embeddings": False, "activation_function": "relu"},
    "gpt_neox": {"family": "gpt_neox"},
    "gpt_neox, serial, tied": {"family": "gpt_neox", "use_parallel_residual": False, "attention_bias": False, **TIED},
    "bert": {"family": "bert"},
}
DROPOUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "olmo2", "olmo3", "smollm3", "gemma3"), ("attention_dropout",)),
    "gpt": ("embd_pdrop", "resid_pdrop", "attn_pdrop", "ffn_dropout"),
    "gpt_neox": ("hidden_dropout", "attention_dropout", "ffn_dropout"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def section(name: str, p: float = 0.0, **sizes: object) -> dict[str, Any]:
    """The `model` section of one of `MODELS`, with dropout p everywhere."""
    return SIZES | MODELS[name] | dict.fromkeys(DROPOUT[MODELS[name]["family"]], p) | sizes


def make_config(model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A configuration with sequences of 16 tokens, two a micro-batch and eight a step."""
    base: dict[str, dict[str, Any]] = {
        "train": {"steps": 1, "global_batch": 8, "micro_batch": 2, "sequence_length": 16},
        "optimizer": {"lr": 1e-3},
        "precision": {"mode": "float32"},
    }
    for key, values in sections.items():
        base[key] = base.get(key, {}) | values
    return config_from_sections({"model": model} | base)


OWN = make_config({"family": "package.module:Own", "vocab_size": 50})
"""A user's own model, of which no formula knows a shape."""


def family(config: Config) -> FamilyConfig:
    """Its model, which is of one of the families."""
    assert isinstance(config.model, FamilyConfig)
    return config.model


def meta_model(config: Config) -> nn.Module:
    """The model without memory."""
    return build_model(config, Group(), sequence_parallel=False, device="meta", dtype=torch.float32)
