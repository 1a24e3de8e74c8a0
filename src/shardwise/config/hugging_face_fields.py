"""How each family's Hugging Face `config.json` is written, and which values of its fields this package supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardwise.config.decoders import LlamaConfig, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config, SmolLM3Config
from shardwise.config.families import BertConfig, GPTConfig, GPTNeoXConfig
from shardwise.config.model import FamilyConfig

_ROTARY = ("rope_theta", "rope_scaling", "rotary_pct")
_ROTARY_FIELDS = (*_ROTARY, "partial_rotary_factor", "rope_parameters", "rotary_emb_base")
_OURS = ("family", "ignore")
"""Keys of a `model` section that no `config.json` has."""


@dataclass(frozen=True)
class Format:
    """How one family's `config.json` is written.

    A field has the name and the default of the family's key, where `names` and `defaults` do not say otherwise.

    Attributes:
        model: the family's class.
        architecture: the value of `architectures`.
        defaults: our key → Hugging Face's default, where the family's class has none or another one.
        names: our key → Hugging Face's field, where they differ.
        spellings: another spelling that Hugging Face reads → field.
        only: field → its one supported value, beside `ONLY`; these count before `inert` and `is_inert`.
        absent: field → what its absence means to transformers; our files say null there.
        inert: fields that change nothing that is trained in this family, whatever `ONLY` says.
        writes_derived_heads: whether a file states `head_dim` where it follows from other fields.
    """

    model: type[FamilyConfig]
    architecture: str
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    writes_derived_heads: bool = True

    @property
    def family(self) -> str:
        """The value of `model.family`."""
        return str(get_args(self.model.model_fields["family"].annotation)[0])

    @property
    def fields(self) -> dict[str, tuple[str, Any]]:
        """Our key → Hugging Face's field and its default; `None` where the family derives the default.

        `rope_theta`, `rope_scaling` and `rotary_pct` are not among them: Hugging Face writes them in several ways.
        """
        keys = {key: info for key, info in self.model.model_fields.items() if key not in (*_OURS, *_ROTARY)}
        return {
            key: (self.names.get(key, key), self.defaults.get(key, None if info.default_factory else info.default))
            for key, info in keys.items()
        }

    @property
    def read(self) -> frozenset[str]:
        """The fields that are translated, in all spellings."""
        rotary = _ROTARY_FIELDS if "rope_theta" in self.model.model_fields else ()
        return frozenset(self.spellings).union((name for name, _ in self.fields.values()), rotary)

    @property
    def activations(self) -> tuple[str, ...]:
        """The supported values of the activation."""
        return get_args(self.model.model_fields[self.model.keys["activation"]].annotation)


# Fields that change what a model of any family computes, each with the one value at which it changes nothing. No
# `model.ignore` excuses another value.
ONLY: dict[str, Any] = {
    # attention
    "alibi": False,
    "attention_chunk_size": None,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "kv_lora_rank": None,
    "layer_types": None,
    "multi_query": False,
    "no_rope_layer_interval": None,
    "no_rope_layers": None,
    "q_lora_rank": None,
    "qk_layernorm": False,
    "query_pre_attn_scalar": None,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "use_logn_attn": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
    # blocks and scales of their values
    "dim_model_base": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "new_decoder_architecture": False,
    "parallel_attn": False,
    "pruned_heads": {},
    "residual_multiplier": 1.0,
    "scale_depth": None,
    "scale_emb": 1,
    # experts
    "mlp_only_layers": None,
    "moe_intermediate_size": None,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts": None,
    "num_experts_per_tok": None,
    "num_local_experts": None,
    "shared_expert_intermediate_size": None,
    # encoders and other inputs
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "vision_config": None,
    # weights that are stored in another form
    "compression_config": None,
    "quantization": None,
    "quantization_config": None,
    "per_layer_config": None,
}
# Fields that change nothing that is trained, with one exception: in transformers a Llama's embedding of pad_token_id
# gets no gradient from the look-up. Packed text has no padding, so here that row is trained like any other. The dtype
# is the recipe's.
_INERT = frozenset({
    # where the file comes from, and how it is stored and run
    "name_or_path", "transformers_version", "model_type", "architectures", "torch_dtype", "dtype", "torchscript",
    "use_bfloat16", "bf16", "fp16", "fp32", "tf_legacy_loss", "low_cpu_mem_usage", "is_decoder", "use_cache",
    "output_past", "chunk_size_feed_forward", "attn_implementation", "author", "base_model", "base_model_name_or_path",
    "custom_pipelines", "is_llama_config", "language", "library_name", "license", "model_name", "model_version",
    "neuron", "pipeline_tag", "tags", "transformers.js_config", "unsloth_fixed", "unsloth_version", "version",
    "xla_device",
    # kernels, which compute the same in another way
    "attention_softmax_in_fp32", "flash_attention", "fused_bias_fc", "fused_dropout_add_ln", "softmax_in_fp32",
    "use_cache_kernel", "use_cache_quantization", "use_dynamic_cache", "use_flash_attention", "use_flash_attention_2",
    "use_flash_attn", "use_flash_rmsnorm", "use_flash_rotary", "use_fused_rms_norm", "use_fused_rope",
    "use_liger_kernel", "use_sdpa", "use_xformers",
    # longest sequences, of which transformers reads max_position_embeddings alone
    "context_length", "max_seq_len", "max_seq_length", "max_sequence_length", "max_window_layers", "model_max_length",
    "n_ctx", "n_positions", "seq_len", "seq_length", "tokenizer_model_max_length", "training_sequence_length",
    # training, by what saves memory or time; neuronx-distributed's are parallel.sequence and train.recompute here
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "use_gradient_checkpointing",
    "sequence_parallel_enabled", "selective_checkpoint_enabled", "move_model_to_device", "loss_type",
    # what a forward pass returns
    "return_dict", "use_return_dict", "output_hidden_states", "output_attentions", "output_router_logits",
    # heads that pretraining lacks
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "classifier_dropout",
    "classifier_activation", "classifier_bias", "n_special", "predict_special_tokens", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    # tokens
    "tokenizer_class", "tokenizer_name", "chat_format", "chat_template", "padding_side", "add_bos_token",
    "add_eos_token",
    # text generation
    "task_specific_params", "prefix", "generation_config", "max_length", "min_length", "max_new_tokens",
    "min_new_tokens", "max_time", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "force_words_ids", "num_return_sequences", "output_scores", "output_logits",
    "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "renormalize_logits", "sequence_bias", "guidance_scale", "low_memory", "penalty_alpha",
    "stop_strings", "token_healing", "watermarking_config", "cache_implementation", "cache_config",
    "assistant_confidence_threshold", "assistant_lookbehind", "assistant_early_exit", "target_lookbehind",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
})  # fmt: skip


def is_inert(name: str) -> bool:
    """Whether a field changes nothing that is trained, in a file of any family.

    The name of a program's own note begins with `_`, and ids of special tokens, which only a tokenizer and text
    generation read, end in `_token_id`.
    """
    return name in _INERT or name.startswith("_") or name.endswith(("_token_id", "_token_ids"))


_SIZES_OF_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_SIZES_OF_QWEN = _SIZES_OF_LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_SIZES_OF_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
# What a file says of windows means nothing while use_sliding_window is false, which is all that is supported.
_UNUSED_WINDOW = frozenset({"sliding_window"})
_SPELLINGS_OF_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

FORMATS = {
    "llama": Format(
        LlamaConfig,
        "LlamaForCausalLM",
        defaults=_SIZES_OF_LLAMA | {"rms_norm_eps": 1e-6},
        only={"pretraining_tp": 1, "rope_interleaved": False},
    ),
    "mistral": Format(
        MistralConfig,
        "MistralForCausalLM",
        defaults=_SIZES_OF_LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
        absent={"sliding_window": 4096},
    ),
    "qwen2": Format(
        Qwen2Config,
        "Qwen2ForCausalLM",
        defaults=_SIZES_OF_QWEN,
        only={"use_mrope": False},
        inert=_UNUSED_WINDOW,
        writes_derived_heads=False,
    ),
    "qwen3": Format(
        Qwen3Config,
        "Qwen3ForCausalLM",
        defaults=_SIZES_OF_QWEN,
        inert=_UNUSED_WINDOW,
    ),
    "olmo2": Format(
        Olmo2Config,
        "Olmo2ForCausalLM",
        defaults=_SIZES_OF_LLAMA | {"vocab_size": 50304},
        absent={"pad_token_id": 1},
        writes_derived_heads=False,
    ),
    "smollm3": Format(
        SmolLM3Config,
        "SmolLM3ForCausalLM",
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        absent={"pad_token_id": 128004},
        inert=_UNUSED_WINDOW | {"pretraining_tp"},
        writes_derived_heads=False,
    ),
    "gpt2": Format(
        GPTConfig,
        "GPT2LMHeadModel",
        defaults=_SIZES_OF_BERT | {"vocab_size": 50257},
        names=_SPELLINGS_OF_GPT2 | {"intermediate_size": "n_inner"},
        spellings=_SPELLINGS_OF_GPT2 | {"n_ctx": "n_positions"},
        only={"reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
    ),
    "gpt_neox": Format(
        GPTNeoXConfig,
        "GPTNeoXForCausalLM",
        defaults={
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
        },
        # GPT-NeoX 20B's file has BERT's names of the dropouts too, which Hugging Face does not read.
        only={"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    ),
    "bert": Format(
        BertConfig,
        "BertForPreTraining",
        defaults=_SIZES_OF_BERT | {"vocab_size": 30522, "intermediate_size": 3072},
        only={"is_decoder": False, "position_embedding_type": "absolute", "tie_word_embeddings": True},
        # Of Google's multilingual and Chinese files; Hugging Face's pooler has none of them.
        inert=frozenset(
            {
                "directionality",
                "pooler_fc_size",
                "pooler_num_attention_heads",
                "pooler_num_fc_layers",
                "pooler_size_per_head",
                "pooler_type",
            }
        ),
    ),
}
"""By `model_type`."""

# Fields that count as absent where they are 0, false or empty.
_NONE_IF_EMPTY = frozenset({
    "compression_config", "mlp_only_layers", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
    "no_rope_layers", "num_experts", "num_experts_per_tok", "num_local_experts", "per_layer_config", "quantization",
    "quantization_config", "shared_expert_intermediate_size",
})  # fmt: skip
# Fields of single families, with the values that mean the same as their absence in a family that lacks them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{
        name: (value,)
        for form in FORMATS.values()
        for name, value in form.only.items()
        if name not in ("position_embedding_type", "tie_word_embeddings")
    },
    **{
        form.fields[key][0]: (0,)
        for form in FORMATS.values()
        for role, key in form.model.keys.items()
        if role.endswith("_dropout")
    },
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("rope", "rotary"),
    "rotary_pct": (1,),
    "use_parallel_residual": (False,),
}


def status(name: str, value: Any, form: Format) -> Literal["inert", "neutral", "unsupported", "unknown"]:
    """What a field says in a family's file, beside the fields that are translated.

    The family's own words count before those for all families, and these before other families' fields.

    Returns:
        `inert`: it changes nothing, whatever its value. `neutral`: its value changes nothing. `unsupported`: it changes
        what the model computes. `unknown`: the family does not read it as far as is known here, but it may mean a model
        that computes something else, so the user decides (`model.ignore`).
    """
    only = {**ONLY, **form.only}
    if name in form.inert or (is_inert(name) and name not in form.only):
        return "inert"
    if name in only:
        is_neutral = value == only[name] or (name in _NONE_IF_EMPTY and not value)
        return "neutral" if value is None or is_neutral else "unsupported"
    if name in form.read:
        return "unsupported"
    return "neutral" if value is None or value in _NEUTRAL.get(name, ()) else "unknown"
