"""Fields that a family does not read: what they mean in its `config.json`, and which of them can be left out."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config.hugging_face import families_by_model_type, from_hugging_face, status

FAMILIES = families_by_model_type()

NEUTRAL: dict[str, dict[str, Any]] = {
    "mistral": {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False, "scale_attn_weights": True},
    "qwen2": {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
    "qwen3": {"mlp_bias": False, "use_mrope": False, "use_sliding_window": False, "sliding_window": 4096},
    "olmo2": {"use_mrope": False, "pretraining_tp": 1, "mlp_bias": False, "rotary_pct": 1.0},
    "llama": {
        "resid_pdrop": 0.0, "hidden_dropout_prob": 0, "use_parallel_residual": False, "num_experts": 0,
        "position_embedding_type": "rope", "num_experts_per_tok": 0, "n_routed_experts": False, "mlp_only_layers": [],
        "quantization_config": {}, "use_sliding_window": False, "sliding_window": 4096, "layer_types": [],
    },
    "gpt2": {"hidden_dropout": 0.0, "use_parallel_residual": False, "partial_rotary_factor": 1.0, "pruned_heads": {}},
    "bert": {"resid_pdrop": 0.0, "rope_theta": None, "scale_attn_weights": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", NEUTRAL)
def test_fault_08_a_field_of_another_family_that_is_unused_means_nothing(kind: str) -> None:
    plain = {"model_type": kind} | dict.fromkeys(FAMILIES[kind].config_file.absent)
    assert from_hugging_face(plain | NEUTRAL[kind], "config.json") == from_hugging_face(plain, "config.json")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"layer_norm_eps": 1e-5, "type_vocab_size": 2, "n_embd": 64, "resid_pdrop": 0.1}),
        ("qwen2", {"attention_bias": True, "pretraining_tp": 2}),
        ("gpt2", {"rope_theta": 5e5, "num_key_value_heads": 4}),
    ],
)
def test_fault_08_a_field_that_only_another_family_reads_can_be_left_out(kind: str, fields: dict[str, Any]) -> None:
    plain = {"model_type": kind}
    with pytest.raises(ConfigError, match=r"set model\.ignore=\[") as caught:
        from_hugging_face(plain | fields, "config.json")
    (problem,) = caught.value.problems
    assert problem.endswith(f"set model.ignore=[{','.join(fields)}]")
    section = from_hugging_face(plain | fields, "config.json", list(fields))
    assert section == from_hugging_face(plain, "config.json") | {"ignore": list(fields)}


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        ("llama", "pretraining_tp", 2, "unsupported"),
        ("smollm3", "pretraining_tp", 2, "inert"),
        ("qwen3", "pretraining_tp", 2, "unknown"),
        ("qwen3", "pretraining_tp", 1, "neutral"),
        ("llama", "is_decoder", True, "inert"),
        ("bert", "is_decoder", True, "unsupported"),
        ("llama", "num_experts", 8, "unsupported"),
        ("llama", "hidden_size", 8, "unsupported"),
        ("mistral", "sliding_window", 0, "unsupported"),
        ("llama", "notes", None, "neutral"),
    ],
)
def test_fault_08_the_status_of_a_field_is_its_familys(kind: str, name: str, value: Any, expected: str) -> None:
    assert status(name, value, FAMILIES[kind]) == expected
