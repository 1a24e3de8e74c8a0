"""Llama and the families that differ from it by facts: rotary positions, RMSNorm, a gated MLP, grouped-query attention.

Each family has its keys with Hugging Face's defaults, and states the facts in which it differs. As in
`config/families.py`, `annotations` are not imported from `__future__`.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from shardwise.base.errors import divisors, listing, nearest_numbers
from shardwise.config.families import (
    AttentionBias,
    Longest,
    NormedWidth,
    NormKind,
    NormPlace,
    ProbabilityDropout,
    RopeScaling,
    RotaryBase,
    Tied,
    TransformerConfig,
)

_MLPBias: TypeAlias = Annotated[bool, Field(description="biases in the feed-forward layer")]
_Epsilon: TypeAlias = Annotated[float, Field(gt=0, description="added to the mean square in RMSNorm")]


class DecoderConfig(TransformerConfig):
    """The keys and facts that these families share."""

    norm_kind: ClassVar[NormKind] = "rms_norm"
    gated: ClassVar[bool] = True
    parallel_residual: ClassVar[bool] = False

    derived: ClassVar[tuple[str, ...]] = ("num_key_value_heads", "head_dim")
    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    }

    num_key_value_heads: int = Field(
        default_factory=lambda data: data.get("num_attention_heads", 1),  # pydantic < 2.13 asks where it was refused
        gt=0,
        description="key and value heads; default: as many as query heads",
    )
    head_dim: int = Field(
        default_factory=lambda data: max(1, data.get("hidden_size", 1) // data.get("num_attention_heads", 1)),
        gt=0,
        description="width of a head; default: hidden_size / num_attention_heads",
    )
    hidden_act: Literal["silu"] = Field(default="silu", description="activation of the feed-forward gate")
    max_position_embeddings: Longest = 2048
    rms_norm_eps: _Epsilon = 1e-6
    rope_theta: RotaryBase = 10000.0
    rope_scaling: RopeScaling = None
    attention_dropout: ProbabilityDropout = 0.0
    tie_word_embeddings: Tied = False

    def _problems(self) -> list[str]:
        problems = []
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            valid = nearest_numbers(kv_heads, divisors(heads))
            problems.append(
                f"model.num_key_value_heads ({kv_heads}) must divide model.num_attention_heads ({heads}): "
                f"nearest {listing(valid, 'or')}"
            )
        derived = "head_dim" not in self.model_fields_set and type(self).model_fields["head_dim"].default_factory
        if derived and self.hidden_size % heads:
            problems.append(
                f"model.hidden_size ({self.hidden_size}) must be a multiple of model.num_attention_heads ({heads}), "
                "or set model.head_dim"
            )
        elif self.head_dim % 2:
            problems.append(f"model.head_dim ({self.head_dim}) must be even: rotary embeddings turn pairs")
        return problems + super()._problems()

    @property
    def rotary_dim(self) -> int:
        """Rotary embeddings turn whole heads."""
        return self.head_dim


class LlamaConfig(DecoderConfig):
    """A Llama (1, 2 or 3): RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    family: Literal["llama"] = Field(description="the architecture")
    rms_norm_eps: _Epsilon = 1e-5
    attention_bias: AttentionBias = False
    mlp_bias: _MLPBias = False


class MistralConfig(DecoderConfig):
    """Mistral without a sliding window: a Llama without biases."""

    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    family: Literal["mistral"] = Field(description="the architecture")
    max_position_embeddings: Longest = 131072


class Qwen2Config(DecoderConfig):
    """Qwen2 and Qwen2.5: a Llama with biases on the Q, K and V projections and no others."""

    attention_bias: ClassVar[bool] = True
    attention_output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    family: Literal["qwen2"] = Field(description="the architecture")
    max_position_embeddings: Longest = 32768


class Qwen3Config(DecoderConfig):
    """Qwen3: a Llama with RMSNorm on each query and key head."""

    query_key_norm: ClassVar[NormedWidth] = "head"
    mlp_bias: ClassVar[bool] = False

    family: Literal["qwen3"] = Field(description="the architecture")
    head_dim: int = Field(default=128, gt=0, description="width of a head")
    max_position_embeddings: Longest = 32768
    attention_bias: AttentionBias = False


class Olmo2Config(DecoderConfig):
    """OLMo 2: a Llama with RMSNorm on the outputs of attention and MLP, and on queries and keys over all heads."""

    norm_place: ClassVar[NormPlace] = "output"
    query_key_norm: ClassVar[NormedWidth] = "all_heads"
    mlp_bias: ClassVar[bool] = False

    family: Literal["olmo2"] = Field(description="the architecture")
    rms_norm_eps: _Epsilon = 1e-5
    attention_bias: AttentionBias = False


class SmolLM3Config(DecoderConfig):
    """SmolLM3: a Llama in which some blocks, every fourth by default, have no rotary positions."""

    derived: ClassVar[tuple[str, ...]] = (*DecoderConfig.derived, "no_rope_layers")

    family: Literal["smollm3"] = Field(description="the architecture")
    max_position_embeddings: Longest = 32768
    rope_theta: RotaryBase = 2000000.0
    tie_word_embeddings: Tied = True
    attention_bias: AttentionBias = False
    mlp_bias: _MLPBias = False
    no_rope_layers: tuple[int, ...] = Field(
        default_factory=lambda data: every_nth_without_rope(4, data.get("num_hidden_layers", 1)),
        strict=False,
        examples=[[1, 1, 1, 0]],
        description="for each block: 1 = with rotary positions, 0 = without; default: every fourth block has none",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_surplus(cls, data: Any) -> Any:
        """Drop numbers beyond the last block, which mean nothing to Hugging Face either."""
        if not isinstance(data, dict):
            return data
        layers, given = data.get("num_hidden_layers"), data.get("no_rope_layers")
        if not isinstance(layers, int) or not isinstance(given, list | tuple):
            return data
        return {**data, "no_rope_layers": given[:layers]}

    def _problems(self) -> list[str]:
        problems, given, layers = super()._problems(), list(self.no_rope_layers), self.num_hidden_layers
        if len(given) != layers or not set(given) <= {0, 1}:
            problems.append(f"model.no_rope_layers ({given}) must have 0 or 1 for each of the {layers} blocks")
        return problems

    def rotates(self, layer: int) -> bool:
        """Whether rotary embeddings turn the heads of that block."""
        return bool(self.no_rope_layers[layer])


def every_nth_without_rope(interval: int, layers: int) -> tuple[int, ...]:
    """SmolLM3's `no_rope_layers` where each block whose number is a multiple of `interval` has no rotary positions."""
    return tuple(int(number % interval != 0) for number in range(1, layers + 1))


Decoder: TypeAlias = LlamaConfig | MistralConfig | Qwen2Config | Qwen3Config | Olmo2Config | SmolLM3Config
