"""The model that Megatron-LM's arguments describe: they are saved in every file of a checkpoint, under "args".

Names and defaults are those of megatron/training/arguments.py, older spellings included. An argument that would make
another model is an error, and all such errors are reported at once; arguments that only concern training are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint_format.model_file import validated
from shardwise.config import GPTConfig, LlamaConfig
from shardwise.errors import ConfigError, listing

_UNSET: tuple[Any, ...] = (None, False, 0, 0.0, (), [])
# Each of these, where it is set, makes a model that no family here covers; the value beside it changes nothing.
_MUST_BE_UNSET: dict[str, Any] = {
    "num_experts": None, "expert_model_parallel_size": 1, "multi_latent_attention": None, "mtp_num_layers": None,
    "qk_layernorm": None, "qk_l2_norm": None, "attention_output_gate": None, "window_size": None,
    "softmax_type": "vanilla", "softmax_scale": None, "experimental_attention_variant": None,
    "linear_attention_freq": None, "no_rope_freq": None, "rotary_interleaved": None,
    "rotary_seq_len_interpolation_factor": 1, "apply_layernorm_1p": None, "layernorm_zero_centered_gamma": None,
    "apply_residual_connection_post_layernorm": None, "squared_relu": None, "quick_geglu": None, "geglu": None,
    "activation_func_clamp_value": None, "glu_linear_offset": None, "add_qkv_bias": None, "use_mup": None,
    "hybrid_layer_pattern": None, "hybrid_override_pattern": None, "is_hybrid_model": None, "spec": None,
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
    "retro_add_retriever": None, "enable_mhc_connections": None,
}  # fmt: skip
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_DERIVED_SIZES = ("ffn_hidden_size", "kv_channels", "num_query_groups")
_KIND = ("position_embedding_type", "normalization", "swiglu")
_GPT, _LLAMA = ("learned_absolute", "LayerNorm", False), ("rope", "RMSNorm", True)
"""Values of these arguments, by which Megatron-LM's models are told apart."""
_LARGEST = 10**9
# Megatron's own llama3 scaling has these numbers in its code (rotary_pos_embedding.py); only the factor is an argument.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_args(
    args: Mapping[str, Any], vocab_size: int, where: str, *, legacy: bool
) -> tuple[GPTConfig | LlamaConfig, list[str]]:
    """The model, and notes on arguments that have no counterpart.

    Args:
        vocab_size: without padding.
        legacy: the model is one of `megatron.legacy`, which chooses its activation by other arguments.

    Raises:
        ConfigError: with every argument that makes another model, and every one that is missing.
    """
    problems = [
        f"{where}: its argument {name} ({args[name]!r}) must be {'unset' if neutral is None else repr(neutral)}: it "
        "makes a model that no family here has"
        for name, neutral in _MUST_BE_UNSET.items()
        if name in args and args[name] not in _UNSET and args[name] != neutral
    ]
    problems += [f"{where}: its arguments must have {name}: it is missing" for name in SIZES if args.get(name) is None]
    problems += [
        f"{where}: its argument {name} ({args[name]!r}) must be a whole number from 1 on"
        for name in (*SIZES, *_DERIVED_SIZES)
        if args.get(name) is not None and not is_count(args[name])
    ]
    if problems:
        raise ConfigError(problems)
    section, notes = _section(args, vocab_size, where, legacy)
    config = validated(section, where)
    assert isinstance(config, GPTConfig | LlamaConfig)
    return config, notes


def _section(args: Mapping[str, Any], vocab_size: int, where: str, legacy: bool) -> tuple[dict[str, Any], list[str]]:
    """The configuration's `model` section, and notes on arguments that have no counterpart."""
    positions = "rope" if args.get("use_rotary_position_embeddings") else args.get("position_embedding_type")
    kind = (positions or "learned_absolute", args.get("normalization") or "LayerNorm", bool(args.get("swiglu")))
    hidden, heads = args["hidden_size"], args["num_attention_heads"]
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
    key_value_heads = args.get("num_query_groups") or heads if args.get("group_query_attention") else heads
    head_dim = args.get("kv_channels") or hidden // heads
    is_biased = bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))
    epsilon = args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5
    if kind == _LLAMA:
        rotary = args.get("rotary_percent")
        _require(where, "Llama", ("rotary_percent", 1.0 if rotary is None else rotary, 1.0))
        section |= {
            "family": "llama",
            "num_key_value_heads": key_value_heads,
            "head_dim": head_dim,
            "rms_norm_eps": epsilon,
            "rope_theta": float(args.get("rotary_base") or 10000),
            "attention_bias": is_biased,
            "mlp_bias": is_biased,
            "attention_dropout": args.get("attention_dropout", 0.0),
        }
        if args.get("use_rope_scaling"):
            factor = float(args.get("rope_scaling_factor") or 8.0)
            section["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        dropout = args.get("hidden_dropout")
        return section, [f"hidden_dropout ({dropout}) is left out: a Llama has none"] if dropout else []
    if kind == _GPT:
        groups = ("num_query_groups", key_value_heads, heads)
        channels = ("kv_channels", head_dim * heads, hidden)
        _require(where, "GPT-2", ("add_bias_linear", is_biased, True), groups, channels)
        has_tanh = args.get("bias_gelu_fusion") or (legacy and args.get("openai_gelu"))
        hidden_dropout = args.get("hidden_dropout", 0.1)
        section |= {
            "family": "gpt",
            "layer_norm_epsilon": epsilon,
            "activation_function": "gelu_new" if has_tanh else "gelu",
            "embd_pdrop": hidden_dropout,
            "resid_pdrop": hidden_dropout,
            "attn_pdrop": args.get("attention_dropout", 0.1),
            "ffn_dropout": args.get("ffn_dropout", 0.0),
        }
        return section, []
    given = listing(f"{name} ({value})" for name, value in zip(_KIND, kind, strict=True))
    raise ConfigError(
        f"{where}: its arguments {given} must be {listing(_GPT)}, a GPT-2, or {listing(_LLAMA)}, a Llama: no other "
        "models are imported from Megatron-LM"
    )


def _require(where: str, model: str, *facts: tuple[str, object, object]) -> None:
    """ConfigError where an argument (its name, value, wanted value) does not suit the model."""
    problems = [
        f"{where}: its argument {name} ({value!r}) must be {wanted!r} for a {model}"
        for name, value, wanted in facts
        if value != wanted
    ]
    if problems:
        raise ConfigError(problems)


def is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def choose_vocabulary(args: Mapping[str, Any], padded: int, given: int | None, where: str) -> int:
    """The number of tokens: the embedding has more rows, so that all ranks have equally many.

    Raises:
        ConfigError: the size of the vocabulary is not known.
    """
    known = given
    # NullTokenizer adds a token to the size that it is given.
    if known is None and args.get("tokenizer_type") != "NullTokenizer":
        known = args.get("vocab_size")
    if known is None or not is_count(known):
        raise ConfigError(
            f"{where} must say how many of the {padded:,} rows of its embedding are tokens and how many are padding: "
            f"its arguments do not, so give --vocab-size N or --tokenizer (--vocab-size {padded} keeps all rows)"
        )
    if known > padded:
        raise ConfigError(
            f"{where}: the vocabulary ({known:,}) must be at most the rows of its embedding ({padded:,}): give "
            "--vocab-size N"
        )
    return known
