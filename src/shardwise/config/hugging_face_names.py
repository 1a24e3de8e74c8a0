"""Tables of names in Hugging Face's files: the fields of a `config.json`, and the weights.

- `ConfigFile`, one for each family: names, defaults and spellings of the fields that are keys of its `model` section.
- `ONLY`, `is_inert` and `ABSENT_IF_EMPTY`: the fields of any family that are no keys, by what they mean.
- `WeightNames`, one for each family: other names under which files hold its weights.

`config/hugging_face.py` reads and writes `config.json` by these tables; `checkpoint/` reads and writes the weights.

The canonical names of weights are those that `transformers` writes today. Older files, files of a model without its
head, and files that hold buffers or a tied weight twice are read through a family's `WeightNames`; nothing else is
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConfigFile:
    """The way in which one family's `config.json` is written.

    A field has the name and the default of the family's key, where `names` and `defaults` do not say otherwise.

    Attributes:
        model_type: value of the field `model_type`, which names the family in a file.
        architecture: value of the field `architectures`.
        defaults: key → Hugging Face's default, where the family's class has none or another one.
        names: key → Hugging Face's field, where they differ.
        spellings: another spelling that Hugging Face reads → field.
        only: field → its one supported value, beside `ONLY`; these count before `inert` and `is_inert`.
        absent: field → the value that its absence means to transformers; written files say null there.
        inert: fields that change nothing that is trained in this family, whatever `ONLY` says.
        has_window_switch: true if `sliding_window` counts only beside `use_sliding_window` (true).
        layer_interval: field with the interval of blocks without a window, if the file has no `layer_types`.
        max_window_layers: default of this field: blocks before the first with a window, if the file has no
            `layer_types`.
        window_rotary_key: key with the base of the rotary frequencies of blocks with a window, if files have angles
            for each type of layer.
        writes_derived_heads: true if a file states `head_dim` where it follows from other fields.
        null_if_derived: keys that a file states as null where they follow from others.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    has_window_switch: bool = False
    layer_interval: str | None = None
    max_window_layers: int | None = None
    window_rotary_key: str | None = None
    writes_derived_heads: bool = True
    null_if_derived: tuple[str, ...] = ()


LACKING = {
    "gemma2": "shardwise lacks its soft caps on scores and logits (attn_logit_softcapping, final_logit_softcapping)",
    "gemma3": "shardwise lacks its images; give the text model alone (text_config, with model_type gemma3_text)",
}
"""Value of `model_type` → what shardwise lacks for it, for models that are near to a family."""

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
    """Return whether a field changes nothing that is trained, in a file of any family.

    The name of a program's own note begins with `_`, and ids of special tokens, which only a tokenizer and text
    generation read, end in `_token_id`.
    """
    return name in _INERT or name.startswith("_") or name.endswith(("_token_id", "_token_ids"))


# Fields that count as absent where they are 0, false or empty.
ABSENT_IF_EMPTY = frozenset({
    "compression_config", "mlp_only_layers", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
    "no_rope_layers", "num_experts", "num_experts_per_tok", "num_local_experts", "per_layer_config", "quantization",
    "quantization_config", "shared_expert_intermediate_size",
})  # fmt: skip


@dataclass(frozen=True)
class WeightNames:
    """The names that checkpoints of a family may hold beside the canonical ones.

    Attributes:
        base: prefix that a file lacks if it was written from the model without its head.
        heads: prefixes of names outside of `base`, which such a file may still have.
        renamed: pairs of a pattern of another spelling and its replacement.
        buffers: pattern of names that hold no weight, but a mask or a table that the model computes.
        tied: second name of a weight that the model has once → its canonical name.
    """

    base: str = ""
    heads: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    buffers: str = r"(?!)"  # matches no name
    tied: dict[str, str] = field(default_factory=dict)

    def canonical(self, stored: Collection[str], canonical_names: Collection[str]) -> dict[str, str]:
        """Map the names in a file to the model's canonical names; buffers are left out.

        A name that stands for none of `canonical_names` is mapped to itself.
        """
        lacks_base = bool(self.base) and not any(name.startswith(self.base) for name in stored)
        names = {}
        for name in stored:
            full_name = name
            if lacks_base and not name.startswith(self.heads):
                full_name = self.base + name
            for pattern, replacement in self.renamed:
                full_name = re.sub(pattern, replacement, full_name)
            if re.fullmatch(self.buffers, full_name):
                continue
            if full_name not in canonical_names and self.tied.get(full_name) in canonical_names:
                full_name = self.tied[full_name]
            names[name] = full_name if full_name in canonical_names else name
        return names
