"""What each family's Hugging Face `config.json` says, in which words, and which of it this package supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Format:
    """How one family's `config.json` is written.

    Attributes:
        fields: our key → Hugging Face's field and its default. `None` is a default that the family derives.
        spellings: another spelling that Hugging Face reads → field.
        only: field → its one supported value. acts: supported activations.
        absent: field → what an absent one means to transformers, where a file of ours says null.
        inert: fields of this family, beside those of every one, that change nothing that is trained.
        rope_theta: the default base of the rotary frequencies; None: the family has no rotary positions.
        partly_rotary: whether a part of each head may be rotary.
        writes_derived_heads: whether a file states `head_dim` where it follows from other fields.
    """

    family: str
    architecture: str
    fields: Mapping[str, tuple[str, Any]]
    acts: tuple[str, ...]
    spellings: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    rope_theta: float | None = None
    partly_rotary: bool = False
    writes_derived_heads: bool = True


_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
SAME_ACTIVATION = {"swish": "silu", "gelu_python": "gelu"}
ACTIVATION_FIELDS = ("hidden_act", "activation_function")

# What makes another model of any family.
ONLY: dict[str, Any] = {
    "add_cross_attention": False,
    "auto_map": None,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "layer_types": None,
    "per_layer_config": None,
    "pruned_heads": {},
    "quantization_config": None,
    "sliding_window": None,
    "tie_encoder_decoder": False,
    "use_sliding_window": False,
}
# What changes nothing that is trained, with one exception: transformers gives the look-up of a Llama's pad_token_id no
# gradient. Packed text has no padding, so that row is trained like any other; the dtype is the recipe's.
INERT = frozenset({
    # where the file comes from, and how it is stored and run
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "model_type", "architectures",
    "torch_dtype", "dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "low_cpu_mem_usage",
    "use_cache", "output_past", "chunk_size_feed_forward", "gradient_checkpointing",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    # neuronx-distributed's; here parallel.sequence and train.recompute say it
    "sequence_parallel_enabled", "selective_checkpoint_enabled", "move_model_to_device",
    # what a forward pass returns
    "return_dict", "use_return_dict", "output_hidden_states", "output_attentions",
    # classification heads
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "classifier_dropout",
    # special tokens
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class",
    # text generation
    "task_specific_params", "prefix", "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "num_assistant_tokens", "num_assistant_tokens_schedule",
})  # fmt: skip

_LLAMA = Format(
    family="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": ("vocab_size", 32000),
        "hidden_size": ("hidden_size", 4096),
        "intermediate_size": ("intermediate_size", 11008),
        "num_hidden_layers": ("num_hidden_layers", 32),
        "num_attention_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "hidden_act": ("hidden_act", "silu"),
        "max_position_embeddings": ("max_position_embeddings", 2048),
        "initializer_range": ("initializer_range", 0.02),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("mlp_bias", False),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    acts=("silu",),
    only={"pretraining_tp": 1, "rope_interleaved": False},
    inert=frozenset({"is_decoder"}),
    rope_theta=10000.0,
)


def _like_llama(family: str, architecture: str, without: tuple[str, ...] = (), **defaults: Any) -> Format:
    """A family whose fields are Llama's but for those in `without`, with some other defaults."""
    fields = {key: how for key, how in _LLAMA.fields.items() if key not in without}
    fields |= {key: (key, default) for key, default in defaults.items()}
    return replace(_LLAMA, family=family, architecture=architecture, fields=fields, only={})


_MISTRAL = replace(
    _like_llama(
        "mistral",
        "MistralForCausalLM",
        without=("attention_bias", "mlp_bias"),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    absent={"sliding_window": 4096},
)
# What a file says of windows means nothing while use_sliding_window is false, which is all that is supported.
_UNUSED_WINDOW = frozenset({"sliding_window", "max_window_layers"})
_QWEN2 = replace(
    _like_llama(
        "qwen2",
        "Qwen2ForCausalLM",
        without=("attention_bias", "mlp_bias"),
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        max_position_embeddings=32768,
    ),
    only={"use_mrope": False},
    inert=_LLAMA.inert | _UNUSED_WINDOW,
    writes_derived_heads=False,
)
_QWEN3 = replace(
    _like_llama(
        "qwen3",
        "Qwen3ForCausalLM",
        without=("mlp_bias",),
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
    ),
    inert=_LLAMA.inert | _UNUSED_WINDOW,
)
_OLMO2 = replace(
    _like_llama("olmo2", "Olmo2ForCausalLM", without=("mlp_bias",), vocab_size=50304, rms_norm_eps=1e-5),
    absent={"pad_token_id": 1},
    writes_derived_heads=False,
)
_SMOLLM3 = replace(
    _like_llama(
        "smollm3",
        "SmolLM3ForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        no_rope_layers=None,
    ),
    absent={"pad_token_id": 128004},
    inert=_LLAMA.inert | _UNUSED_WINDOW | {"pretraining_tp"},
    rope_theta=2000000.0,
    writes_derived_heads=False,
)
_GPT2 = Format(
    family="gpt",
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": ("vocab_size", 50257),
        "hidden_size": ("n_embd", 768),
        "intermediate_size": ("n_inner", None),
        "num_hidden_layers": ("n_layer", 12),
        "num_attention_heads": ("n_head", 12),
        "max_position_embeddings": ("n_positions", 1024),
        "initializer_range": ("initializer_range", 0.02),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "activation_function": ("activation_function", "gelu_new"),
        "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "embd_pdrop": ("embd_pdrop", 0.1),
        "resid_pdrop": ("resid_pdrop", 0.1),
        "attn_pdrop": ("attn_pdrop", 0.1),
    },
    acts=_GELUS,
    spellings={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "n_ctx": "n_positions",
    },
    only={"reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
    inert=frozenset(
        {
            "is_decoder",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        }
    ),
)
_GPT_NEOX = Format(
    family="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields={
        "vocab_size": ("vocab_size", 50432),
        "hidden_size": ("hidden_size", 6144),
        "intermediate_size": ("intermediate_size", 24576),
        "num_hidden_layers": ("num_hidden_layers", 44),
        "num_attention_heads": ("num_attention_heads", 64),
        "max_position_embeddings": ("max_position_embeddings", 2048),
        "initializer_range": ("initializer_range", 0.02),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "hidden_act": ("hidden_act", "gelu"),
        "layer_norm_eps": ("layer_norm_eps", 1e-5),
        "use_parallel_residual": ("use_parallel_residual", True),
        "attention_bias": ("attention_bias", True),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    acts=_GELUS,
    # GPT-NeoX 20B's file has BERT's names of the dropouts too, which Hugging Face does not read.
    only={"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    inert=frozenset({"is_decoder"}),
    rope_theta=10000.0,
    partly_rotary=True,
)
_BERT = Format(
    family="bert",
    architecture="BertForPreTraining",
    fields={
        "vocab_size": ("vocab_size", 30522),
        "hidden_size": ("hidden_size", 768),
        "intermediate_size": ("intermediate_size", 3072),
        "num_hidden_layers": ("num_hidden_layers", 12),
        "num_attention_heads": ("num_attention_heads", 12),
        "max_position_embeddings": ("max_position_embeddings", 512),
        "initializer_range": ("initializer_range", 0.02),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "type_vocab_size": ("type_vocab_size", 2),
        "pad_token_id": ("pad_token_id", 0),
        "hidden_act": ("hidden_act", "gelu"),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.1),
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.1),
    },
    acts=_GELUS,
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
)
FORMATS = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "olmo2": _OLMO2,
    "smollm3": _SMOLLM3,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "bert": _BERT,
}
"""By `model_type`."""
