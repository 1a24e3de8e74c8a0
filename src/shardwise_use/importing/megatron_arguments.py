"""The model that the arguments of Megatron-LM describe: they are saved in every file of a checkpoint, under "args".

Their names and defaults are those of megatron/training/arguments.py. Older spellings are read too. All arguments that
would make another model are reported at once; those that only concern training are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from shardwise.base.errors import ConfigError, listing
from shardwise.config import GPTConfig, LlamaConfig, checked_model_section
from shardwise.config.decoders import Qwen2Config, Qwen3Config
from shardwise.config.sparse import MixtralConfig, Qwen3MoeConfig
from shardwise_use import sparse_models

MegatronConfig: TypeAlias = GPTConfig | LlamaConfig | Qwen2Config | Qwen3Config | Qwen3MoeConfig | MixtralConfig
_UNSET: tuple[Any, ...] = (None, False, 0, 0.0, (), [])
# Each of these, where it is set, makes a model that no family here covers; the value beside it changes nothing.
_MUST_BE_UNSET: dict[str, Any] = {
    **sparse_models.MEGATRON_NUMBERS, "multi_latent_attention": None, "mtp_num_layers": None,
    "qk_layernorm": None, "qk_l2_norm": None, "attention_output_gate": None, "window_size": None,
    "softmax_type": "vanilla", "softmax_scale": None, "experimental_attention_variant": None,
    "linear_attention_freq": None, "no_rope_freq": None, "rotary_interleaved": None,
    "rotary_seq_len_interpolation_factor": 1, "apply_layernorm_1p": None, "layernorm_zero_centered_gamma": None,
    "apply_residual_connection_post_layernorm": None, "squared_relu": None, "quick_geglu": None, "geglu": None,
    "activation_func_clamp_value": None, "glu_linear_offset": None, "add_qkv_bias": None, "use_mup": None,
    "hybrid_layer_pattern": None, "hybrid_override_pattern": None, "is_hybrid_model": None, "spec": None,
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
    "retro_add_retriever": None, "enable_mhc_connections": None, **sparse_models.MEGATRON_ARGUMENTS,
}  # fmt: skip
_OF_GATED = ("add_qkv_bias", "qk_layernorm", *sparse_models.MEGATRON_NUMBERS)
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_DERIVED_SIZES = ("ffn_hidden_size", "kv_channels", "num_query_groups")
# The arguments by which Megatron-LM's models are told apart.
_KIND = ("position_embedding_type", "normalization", "swiglu")
_GPT = ("learned_absolute", "LayerNorm", False)  # values of `_KIND` in a GPT-2
_LLAMA = ("rope", "RMSNorm", True)  # values of `_KIND` in a Llama
_LARGEST = 10**9
# Megatron's own llama3 scaling has these numbers in its code (rotary_pos_embedding.py); only the factor is an argument.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_megatron_arguments(
    args: Mapping[str, Any], vocab_size: int, where: str, *, legacy: bool
) -> tuple[MegatronConfig, list[str]]:
    """The model that Megatron-LM's arguments describe, and notes on arguments that have no counterpart.

    Args:
        vocab_size: number of tokens without padding.
        legacy: the model is one of `megatron.legacy`, which chooses its activation by other arguments.

    Raises:
        ConfigError: every argument that makes another model, and every one that is missing.
    """
    require_known_arguments(args, where)
    section, notes = _section(args, vocab_size, where, legacy)
    config = checked_model_section(section, where)
    assert isinstance(config, MegatronConfig)
    return config, notes


def require_known_arguments(args: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError, as `read_megatron_arguments` does, for arguments that make another model, or are missing."""
    problems = [
        f"{where}: its argument {name} ({args[name]!r}) must be {'unset' if neutral is None else repr(neutral)}: it "
        "makes a model that no family here has"
        for name, neutral in _MUST_BE_UNSET.items()
        if name in args
        and args[name] not in _UNSET
        and args[name] != neutral
        and not (name in _OF_GATED and args.get("swiglu"))
    ]
    problems += [f"{where}: its arguments must have {name}: it is missing" for name in SIZES if args.get(name) is None]
    problems += [
        f"{where}: its argument {name} ({args[name]!r}) must be a whole number from 1 on"
        for name in (*SIZES, *_DERIVED_SIZES)
        if args.get(name) is not None and not is_count(args[name])
    ]
    if problems:
        raise ConfigError(problems)


def _section(args: Mapping[str, Any], vocab_size: int, where: str, legacy: bool) -> tuple[dict[str, Any], list[str]]:
    positions = args.get("position_embedding_type") or "learned_absolute"
    if args.get("use_rotary_position_embeddings"):
        positions = "rope"
    kind = (positions, args.get("normalization") or "LayerNorm", bool(args.get("swiglu")))
    if kind not in (_GPT, _LLAMA):
        settings = listing(f"{name} ({value})" for name, value in zip(_KIND, kind, strict=True))
        raise ConfigError(
            f"{where}: its arguments {settings} must be {listing(_GPT)}, a GPT-2, or {listing(_LLAMA)}, a Llama: no "
            "other models are imported from Megatron-LM"
        )
    hidden = args["hidden_size"]
    heads = args["num_attention_heads"]
    section = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": args.get("ffn_hidden_size") or 4 * hidden,
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "max_position_embeddings": args["max_position_embeddings"],
        "initializer_range": args.get("init_method_std") or 0.02,
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
    }
    shared = {
        "groups": (args.get("num_query_groups") if args.get("group_query_attention") else None) or heads,
        "head_dim": args.get("kv_channels") or hidden // heads,
        "epsilon": args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        "is_biased": bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False))),
    }
    if kind == _GPT:
        return section | _gpt_section(args, where, legacy, **shared), []
    dropout = args.get("hidden_dropout")
    notes = [f"hidden_dropout ({dropout}) is left out: a Llama has none"] if dropout else []
    return section | _llama_section(args, where, **shared), notes


def _llama_section(
    args: Mapping[str, Any], where: str, *, groups: int, head_dim: int, epsilon: float, is_biased: bool
) -> dict[str, Any]:
    rotary = args.get("rotary_percent")
    _require(where, "Llama", ("rotary_percent", 1.0 if rotary is None else rotary, 1.0))
    # A Qwen2 is a Llama with biases of Q, K and V alone, a Qwen3 one with norms of query and key heads.
    family = "qwen3" if args.get("qk_layernorm") else "qwen2" if args.get("add_qkv_bias") else "llama"
    biases = {"attention_bias": is_biased, "mlp_bias": is_biased}
    if family != "llama":
        _require(where, family, ("add_bias_linear", is_biased, False))
        _require(where, family, ("add_qkv_bias", bool(args.get("add_qkv_bias")), family == "qwen2"))
        biases = {}
    section: dict[str, Any] = {
        "family": family,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "rms_norm_eps": epsilon,
        "rope_theta": float(args.get("rotary_base") or 10000),
        **biases,
        "attention_dropout": args.get("attention_dropout", 0.0),
    }
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor") or 8.0)
        section["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return sparse_models.megatron_section(section, args, biases, partial(_require, where))


def _gpt_section(
    args: Mapping[str, Any], where: str, legacy: bool, *, groups: int, head_dim: int, epsilon: float, is_biased: bool
) -> dict[str, Any]:
    heads = args["num_attention_heads"]
    _require(
        where,
        "GPT-2",
        ("add_bias_linear", is_biased, True),
        ("num_query_groups", groups, heads),
        ("kv_channels", head_dim * heads, args["hidden_size"]),
    )
    has_tanh = args.get("bias_gelu_fusion") or (legacy and args.get("openai_gelu"))
    hidden_dropout = args.get("hidden_dropout", 0.1)
    return {
        "family": "gpt",
        "layer_norm_epsilon": epsilon,
        "activation_function": "gelu_new" if has_tanh else "gelu",
        "embd_pdrop": hidden_dropout,
        "resid_pdrop": hidden_dropout,
        "attn_pdrop": args.get("attention_dropout", 0.1),
        "ffn_dropout": args.get("ffn_dropout", 0.0),
    }


def _require(where: str, model: str, *requirements: tuple[str, object, object]) -> None:
    """Raise ConfigError where an argument (its name, its value, the value that the model needs) does not fit."""
    problems = [
        f"{where}: its argument {name} ({value!r}) must be {needed!r} for a {model}"
        for name, value, needed in requirements
        if value != needed
    ]
    if problems:
        raise ConfigError(problems)


def is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def choose_vocabulary(args: Mapping[str, Any], padded: int, vocab_size: int | None, where: str) -> int:
    """The vocabulary of a Megatron-LM model, of `padded` rows of its embedding; ConfigError: it is not known."""
    # NullTokenizer adds a token to the size that it is given.
    if vocab_size is None and args.get("tokenizer_type") != "NullTokenizer":
        vocab_size = args.get("vocab_size")
    if vocab_size is None or not is_count(vocab_size):
        raise ConfigError(
            f"{where} must say how many of the {padded:,} rows of its embedding are tokens and how many are padding: "
            f"its arguments do not, so give --vocab-size N or --tokenizer (--vocab-size {padded} keeps all rows)"
        )
    if vocab_size > padded:
        raise ConfigError(
            f"{where}: the vocabulary ({vocab_size:,}) must be at most the rows of its embedding ({padded:,}): give "
            "--vocab-size N"
        )
    return vocab_size
