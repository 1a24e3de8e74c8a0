"""Models of every family as transformers makes and saves them, with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from shardwise.config import FamilyConfig
from shardwise.config.hugging_face import read_hugging_face
from shardwise.config.model import FAMILIES

VOCABULARY = 61  # odd: padded at every degree
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 24,
}  # fmt: skip
_SPECIAL = {"bos_token_id": None, "eos_token_id": None}

CASES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES, num_key_value_heads=2, **_SPECIAL)),
    "llama-tied": (
        LlamaForCausalLM,
        LlamaConfig(**_SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **_SPECIAL),
    ),
    "gpt": (GPT2LMHeadModel, GPT2Config(**_GPT2, **_SPECIAL)),
    "gpt-untied": (GPT2LMHeadModel, GPT2Config(**_GPT2, tie_word_embeddings=False, **_SPECIAL)),
    "neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**_SIZES, **_SPECIAL)),
    "neox-tied": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(
            **_SIZES, tie_word_embeddings=True, attention_bias=False, use_parallel_residual=False, **_SPECIAL
        ),
    ),
    "bert": (BertForPreTraining, BertConfig(**_SIZES)),
}


def make(case: str) -> PreTrainedModel:
    """A model whose biases and norms are random too."""
    kind, config = CASES[case]
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(float(norm), 0.2, generator=generator)
    return model


def save(case: str, folder: Path) -> PreTrainedModel:
    """Make and save a model, as its authors would."""
    model = make(case)
    model.save_pretrained(folder)
    return model


def open_folder(folder: Path) -> PreTrainedModel:
    """What transformers makes of a folder; nothing may be missing, unexpected or misshapen."""
    bert = FAMILIES["bert"] is type(described(folder))
    auto = AutoModelForPreTraining if bert else AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    problems = {kind: found for kind, found in report.items() if found}
    assert not problems, f"transformers misses or ignores weights: {problems}"
    return model


def described(folder: Path) -> FamilyConfig:
    """Our configuration of the model in a folder."""
    section = read_hugging_face(folder)
    return FAMILIES[section["family"]].model_validate(section)
