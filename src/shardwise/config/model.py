"""`model.*`: what is trained, by the names that Hugging Face's `config.json` uses."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from shardwise.config.base import Section, reject
from shardwise.config.rope import rope_scaling_problems
from shardwise.errors import listing, nearest_numbers


class LlamaConfig(Section):
    """A Llama (1, 2 or 3): RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    family: Literal["llama"] = Field(description="the architecture")
    vocab_size: int = Field(gt=0, description="rows of the embedding and of the output head")
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    intermediate_size: int = Field(gt=0, description="width of the feed-forward layer")
    num_hidden_layers: int = Field(gt=0, description="number of transformer blocks")
    num_attention_heads: int = Field(gt=0, description="query heads")
    num_key_value_heads: int = Field(
        default_factory=lambda data: data["num_attention_heads"],
        gt=0,
        description="key and value heads; default: as many as query heads",
    )
    head_dim: int = Field(
        default_factory=lambda data: max(1, data["hidden_size"] // data["num_attention_heads"]),
        gt=0,
        description="width of a head; default: hidden_size / num_attention_heads",
    )
    hidden_act: Literal["silu"] = Field(default="silu", description="activation of the feed-forward gate")
    max_position_embeddings: int = Field(default=2048, gt=0, description="longest sequence the model is made for")
    rms_norm_eps: float = Field(default=1e-5, gt=0, description="added to the mean square in RMSNorm")
    initializer_range: float = Field(default=0.02, gt=0, description="standard deviation of initial weights")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: dict[str, Any] | None = Field(
        default=None, description="Hugging Face's rope_scaling: rope_type and its fields; null = none"
    )
    attention_bias: bool = Field(default=False, description="biases on the Q, K, V and output projections")
    mlp_bias: bool = Field(default=False, description="biases in the feed-forward layer")
    tie_word_embeddings: bool = Field(default=False, description="one weight for the embedding and the output head")

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        """As Hugging Face does: null means derived, and `type` is the old spelling of `rope_type`."""
        if not isinstance(data, dict):
            return data
        derived = ("num_key_value_heads", "head_dim")
        data = {key: value for key, value in data.items() if key not in derived or value is not None}
        scaling = data.get("rope_scaling")
        if isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling:
            data["rope_scaling"] = {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
        return data

    @model_validator(mode="after")
    def _check(self) -> LlamaConfig:
        problems = []
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            valid = nearest_numbers(kv_heads, [n for n in range(1, heads + 1) if heads % n == 0])
            problems.append(
                f"model.num_key_value_heads ({kv_heads}) must divide model.num_attention_heads ({heads}): "
                f"nearest {listing(valid, 'or')}"
            )
        if "head_dim" not in self.model_fields_set and self.hidden_size % heads:
            problems.append(
                f"model.hidden_size ({self.hidden_size}) must be a multiple of model.num_attention_heads ({heads}), "
                "or set model.head_dim"
            )
        elif self.head_dim % 2:
            problems.append(f"model.head_dim ({self.head_dim}) must be even: rotary embeddings turn pairs")
        if self.rope_scaling is not None:
            problems += rope_scaling_problems(self.rope_scaling, self.head_dim)
        reject(problems)
        return self

    @property
    def extends_positions(self) -> bool:
        """Whether `rope_scaling` stretches the rotary embedding beyond `max_position_embeddings`."""
        return self.rope_scaling is not None and self.rope_scaling["rope_type"] != "default"


ModelConfig: TypeAlias = LlamaConfig
