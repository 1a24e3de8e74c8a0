"""Models of every family as transformers makes and saves them, with random weights.

transformers is imported where it is used: ranks that only read a folder start without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from shardwise import Mesh, canonical_tensors
from shardwise.checkpoint.companions import model_files
from shardwise.config import FamilyConfig, ModelConfig
from shardwise.config.hugging_face import read_hugging_face
from shardwise.config.model import FAMILIES
from shardwise.distributed import collectives

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 61  # odd: padded at every degree
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 24,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 24,
}  # fmt: skip
_KEYS = _SIZES | {"num_key_value_heads": 2}
_WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _KEYS),
    "llama-tied": ("Llama", _SIZES | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", _KEYS | {"sliding_window": 5}),
    "qwen2": ("Qwen2", _KEYS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _KEYS | _WINDOWS | {"head_dim": 6, "use_sliding_window": True}),
    "olmo2": ("Olmo2", _KEYS),
    "olmo3": ("Olmo3", _KEYS | _WINDOWS),
    "gemma3": ("Gemma3", _KEYS | _WINDOWS | {"head_dim": 6, "query_pre_attn_scalar": 10, "pad_token_id": None}),
    "smollm3": ("SmolLM3", _KEYS | {"no_rope_layers": [1, 0], "pad_token_id": None}),
    "gpt": ("GPT2", _GPT2),
    "gpt-untied": ("GPT2", _GPT2 | {"tie_word_embeddings": False}),
    "neox": ("GPTNeoX", _SIZES),
    "neox-tied": (
        "GPTNeoX", _SIZES | {"tie_word_embeddings": True, "attention_bias": False, "use_parallel_residual": False}
    ),
    "bert": ("Bert", _SIZES),
    "olmoe": ("Olmoe", _SIZES | _EXPERTS | {"num_experts": 4, "pad_token_id": None}),
    "qwen3_moe": ("Qwen3Moe", _SIZES | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}),
    "mixtral": ("Mixtral", _SIZES | _EXPERTS | {"num_local_experts": 4}),
    "glm4_moe": (
        "Glm4Moe",
        _SIZES | _EXPERTS | {"n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "use_qk_norm": True},
    ),
}  # fmt: skip
"""By name: the family as transformers' classes spell it, and the fields of its configuration."""
_CONFIGS = {"Gemma3": "Gemma3Text"}
"""How their configurations' names begin, where it is not the model's."""
_MODELS = {"GPT2": "LMHeadModel", "Bert": "ForPreTraining"}
"""How their names end, where it is not `ForCausalLM`."""


def make(case: str, **fields: Any) -> PreTrainedModel:
    """A model whose biases and norms are random too; `fields` of its configuration beside the case's."""
    import transformers

    family, own = CASES[case]
    tokens = {} if family == "Bert" else {"bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, f"{_CONFIGS.get(family, family)}Config")(**own | tokens | fields)
    model: PreTrainedModel = getattr(transformers, family + _MODELS.get(family, "ForCausalLM"))(config).eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(float(norm), 0.2, generator=generator)
    return model


def save(case: str, folder: Path, **fields: Any) -> PreTrainedModel:
    """Make and save a model, as its authors would."""
    model = make(case, **fields)
    model.save_pretrained(folder)
    return model


def open_folder(folder: Path) -> PreTrainedModel:
    """What transformers makes of a folder; nothing may be missing, unexpected or misshapen."""
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining

    auto = AutoModelForCausalLM if described(folder).causal else AutoModelForPreTraining
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    problems = {kind: found for kind, found in report.items() if found}
    assert not problems, f"transformers misses or ignores weights: {problems}"
    return model


def described(folder: Path) -> FamilyConfig:
    """Our configuration of the model in a folder."""
    section = read_hugging_face(folder)
    return FAMILIES[section["family"]].model_validate(section)


def export_hugging_face(
    model: nn.Module, config: ModelConfig, mesh: Mesh, folder: Path, *, tokenizer: Path | None = None
) -> None:
    """Write the whole model as a Hugging Face folder, by the first rank; collective over the world."""
    weights = {name: tensor.clone().contiguous() for name, tensor in canonical_tensors(model, pipeline=mesh.pp)}
    if mesh.world.rank == 0:
        folder.mkdir(parents=True)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        for name, content in model_files(config, next(model.parameters()).dtype, tokenizer).items():
            (folder / name).write_bytes(content)
    collectives.barrier(mesh.world)
