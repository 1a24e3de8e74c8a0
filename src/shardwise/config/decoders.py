"""Llama and the families that differ from it by facts: rotary positions, RMSNorm, a gated MLP, grouped-query attention.

Each family has its keys with Hugging Face's defaults, and states the facts in which it differs. A new one is a class
here that `DECODERS` names. As in `config/families.py`, `annotations` are not imported from `__future__`.
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from shardwise.base.errors import listing
from shardwise.config import families
from shardwise.config.base_section import divisors, nearest_numbers
from shardwise.config.hugging_face_names import ConfigFile, WeightNames

_MLPBias: TypeAlias = Annotated[bool, Field(description="biases in the feed-forward layer")]
_Epsilon: TypeAlias = Annotated[float, Field(gt=0, description="added to the mean square in RMSNorm")]

SIZES_OF_LLAMA = families.default_sizes(32000, width=4096, inner_width=11008, layers=32, heads=32)
_SIZES_OF_QWEN = families.default_sizes(
    151936, width=4096, inner_width=22016, layers=32, heads=32, num_key_value_heads=32, sliding_window=4096
)
_LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]
_FULL: _LayerType = "full_attention"
_SLIDING: _LayerType = "sliding_attention"


def every_nth_full(interval: int | None, layers: int) -> tuple[_LayerType, ...]:
    """Return `layer_types` for `layers` blocks: each block `interval`, 2 · `interval`, … is full; None: none is."""
    return tuple(_SLIDING if interval is None or number % interval else _FULL for number in range(1, layers + 1))


def _of_each_layer(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return every_nth_full(value, info.data.get("num_hidden_layers", 1))
    return value


_Window: TypeAlias = Annotated[
    int | None,
    Field(gt=0, description="keys that a query sees in blocks with a window, its own included; null = no window"),
]
_TYPE_OF_EACH_BLOCK = (
    f"for each block: {_SLIDING} = with the window, {_FULL} = without; or a number N: every Nth block is without; "
    "if there is a window, default: "
)
_LayerTypes: TypeAlias = Annotated[
    tuple[_LayerType, ...],
    Field(strict=False, examples=[[_SLIDING, _SLIDING, _FULL], 6]),
    BeforeValidator(_of_each_layer),
]


def _layer_types(interval: int | None, default: str) -> Any:
    """Return the field `layer_types`; without a window its default has none in any block."""

    def of_data(data: dict[str, Any]) -> tuple[_LayerType, ...]:
        return every_nth_full(interval if data.get("sliding_window") else 1, data.get("num_hidden_layers", 1))

    return Field(default_factory=of_data, description=f"{_TYPE_OF_EACH_BLOCK}{default}")


class DecoderConfig(families.FamilyConfig):
    """The keys and facts that these families share."""

    weight_names: ClassVar[WeightNames] = WeightNames(
        base="model.",
        heads=("lm_head.",),
        buffers=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
    )

    norm_kind: ClassVar[families.NormKind] = "rms_norm"
    gated: ClassVar[bool] = True

    derived: ClassVar[tuple[str, ...]] = ("num_key_value_heads", "head_dim")
    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act",
        "norm_eps": "rms_norm_eps",
        "attention_dropout": "attention_dropout",
    }

    num_key_value_heads: int = Field(
        # Before version 2.13, pydantic calls a factory even where the value that it needs was refused.
        default_factory=lambda data: data.get("num_attention_heads", 1),
        gt=0,
        description="key and value heads; default: as many as query heads",
    )
    head_dim: int = Field(
        default_factory=lambda data: max(1, data.get("hidden_size", 1) // data.get("num_attention_heads", 1)),
        gt=0,
        description="width of a head; default: hidden_size / num_attention_heads",
    )
    # The gated MLP of `models/llama.py` has a kernel for SiLU and for GELU by tanh.
    hidden_act: Literal["silu"] = Field(default="silu", description="activation of the feed-forward gate")
    max_position_embeddings: families.Longest = 2048
    rms_norm_eps: _Epsilon = 1e-6
    rope_theta: families.RotaryBase = 10000.0
    rope_scaling: families.RopeScaling = None
    attention_dropout: families.ProbabilityDropout = 0.0
    tie_word_embeddings: families.Tied = False

    def _problems(self) -> list[str]:
        problems = []
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        if heads % kv_heads:
            valid = nearest_numbers(kv_heads, divisors(heads))
            problems.append(
                f"model.num_key_value_heads ({kv_heads}) must divide model.num_attention_heads ({heads}): "
                f"nearest {listing(valid, 'or')}"
            )
        # A family with a number as its default, such as Qwen3, has heads whose widths need not fill the hidden size.
        head_dim_is_derived = (
            "head_dim" not in self.model_fields_set and type(self).model_fields["head_dim"].default_factory is not None
        )
        if head_dim_is_derived and self.hidden_size % heads:
            problems.append(
                f"model.hidden_size ({self.hidden_size}) must be a multiple of model.num_attention_heads ({heads}), "
                "or set model.head_dim"
            )
        elif self.head_dim % 2:
            problems.append(f"model.head_dim ({self.head_dim}) must be even: rotary embeddings turn pairs")
        return problems + super()._problems()

    @property
    def rotary_dim(self) -> int:
        return self.head_dim


class _WindowConfig(DecoderConfig):
    """Families of which each block has the window or none, as the key `layer_types` says."""

    derived: ClassVar[tuple[str, ...]] = (*DecoderConfig.derived, "layer_types")

    if TYPE_CHECKING:

        @property
        def layer_types(self) -> tuple[_LayerType, ...]: ...

    sliding_window: _Window = None

    def _problems(self) -> list[str]:
        problems = super()._problems()
        layers = self.num_hidden_layers
        if len(self.layer_types) != layers:
            problems.append(
                f"model.layer_types ({len(self.layer_types)} entries) must have one for each of the {layers} blocks"
            )
        if self.sliding_window is None and _SLIDING in self.layer_types:
            problems.append(
                f"model.sliding_window (null) must be a number of keys, as model.layer_types has {_SLIDING}"
            )
        return problems

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == _SLIDING else None


class LlamaConfig(DecoderConfig):
    """A Llama (1, 2 or 3): RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "llama",
        "LlamaForCausalLM",
        defaults=SIZES_OF_LLAMA | {"rms_norm_eps": 1e-6},
        only={"pretraining_tp": 1, "rope_interleaved": False},
    )

    family: Literal["llama"] = Field(description="the architecture")
    rms_norm_eps: _Epsilon = 1e-5
    attention_bias: families.AttentionBias = False
    mlp_bias: _MLPBias = False


class MistralConfig(DecoderConfig):
    """Mistral: a Llama without biases, with a window in all blocks or in none."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "mistral",
        "MistralForCausalLM",
        defaults=SIZES_OF_LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    )

    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    family: Literal["mistral"] = Field(description="the architecture")
    max_position_embeddings: families.Longest = 131072
    sliding_window: _Window = None

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Qwen2Config(_WindowConfig):
    """Qwen2 and Qwen2.5: a Llama with biases on the Q, K and V projections and no others."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "qwen2",
        "Qwen2ForCausalLM",
        defaults=_SIZES_OF_QWEN,
        only={"use_mrope": False},
        has_window_switch=True,
        max_window_layers=28,
        writes_derived_heads=False,
    )

    attention_bias: ClassVar[bool] = True
    attention_output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    family: Literal["qwen2"] = Field(description="the architecture")
    max_position_embeddings: families.Longest = 32768
    layer_types: _LayerTypes = _layer_types(None, "all blocks have it")


class Qwen3Config(_WindowConfig):
    """Qwen3: a Llama with RMSNorm on each query and key head."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "qwen3", "Qwen3ForCausalLM", defaults=_SIZES_OF_QWEN, has_window_switch=True, max_window_layers=28
    )

    query_key_norm: ClassVar[families.NormedWidth] = "head"
    mlp_bias: ClassVar[bool] = False

    family: Literal["qwen3"] = Field(description="the architecture")
    head_dim: int = Field(default=128, gt=0, description="width of a head")
    max_position_embeddings: families.Longest = 32768
    attention_bias: families.AttentionBias = False
    layer_types: _LayerTypes = _layer_types(None, "all blocks have it")


class Olmo2Config(DecoderConfig):
    """OLMo 2: a Llama with RMSNorm on the outputs of attention and MLP, and on queries and keys over all heads."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "olmo2",
        "Olmo2ForCausalLM",
        defaults=SIZES_OF_LLAMA | {"vocab_size": 50304},
        absent={"pad_token_id": 1},
        writes_derived_heads=False,
    )

    norm_place: ClassVar[families.NormPlace] = "output"
    query_key_norm: ClassVar[families.NormedWidth] = "all_heads"
    mlp_bias: ClassVar[bool] = False

    family: Literal["olmo2"] = Field(description="the architecture")
    rms_norm_eps: _Epsilon = 1e-5
    attention_bias: families.AttentionBias = False


class Olmo3Config(_WindowConfig):
    """OLMo 3: an OLMo 2 with a window in three of four blocks, where rotary positions are not scaled."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "olmo3",
        "Olmo3ForCausalLM",
        defaults=SIZES_OF_LLAMA | {"vocab_size": 50304},
        absent={"pad_token_id": 1},
        window_rotary_key="rope_theta",
        writes_derived_heads=False,
    )

    norm_place: ClassVar[families.NormPlace] = "output"
    query_key_norm: ClassVar[families.NormedWidth] = "all_heads"
    mlp_bias: ClassVar[bool] = False

    family: Literal["olmo3"] = Field(description="the architecture")
    rms_norm_eps: _Epsilon = 1e-5
    rope_theta: families.RotaryBase = 500000.0
    attention_bias: families.AttentionBias = False
    sliding_window: _Window = 4096
    layer_types: _LayerTypes = _layer_types(4, "all blocks but every fourth have it")

    @property
    def window_rope_theta(self) -> float:
        return self.rope_theta


class Gemma3Config(_WindowConfig):
    """Gemma 3 for text: four norms in a block, GeGLU, scaled embeddings, a window in five of six blocks."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "gemma3_text",
        "Gemma3ForCausalLM",
        families.default_sizes(262208, width=2304, inner_width=9216, layers=26, heads=8, num_key_value_heads=4),
        names={"hidden_act": "hidden_activation"},
        layer_interval="sliding_window_pattern",
        window_rotary_key="rope_local_base_freq",
        only={"use_bidirectional_attention": False},
        absent={"pad_token_id": 0},
    )

    norm_place: ClassVar[families.NormPlace] = "both"
    norm_has_unit_offset: ClassVar[bool] = True
    query_key_norm: ClassVar[families.NormedWidth] = "head"
    mlp_bias: ClassVar[bool] = False

    family: Literal["gemma3"] = Field(description="the architecture")
    head_dim: int = Field(default=256, gt=0, description="width of a head")
    hidden_act: Literal["gelu_pytorch_tanh"] = Field(  # type: ignore[assignment]
        default="gelu_pytorch_tanh", description="activation of the feed-forward gate"
    )
    max_position_embeddings: families.Longest = 131072
    rope_theta: families.RotaryBase = 1000000.0
    rope_local_base_freq: families.RotaryBase = 10000.0
    query_pre_attn_scalar: int = Field(
        default=256, gt=0, description="scores of attention are divided by its square root"
    )
    tie_word_embeddings: families.Tied = True
    attention_bias: families.AttentionBias = False
    sliding_window: _Window = 4096
    layer_types: _LayerTypes = _layer_types(6, "all blocks but every sixth have it")

    @property
    def window_rope_theta(self) -> float:
        return self.rope_local_base_freq

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)


class SmolLM3Config(_WindowConfig):
    """SmolLM3: a Llama in which some blocks, every fourth by default, have no rotary positions."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "smollm3",
        "SmolLM3ForCausalLM",
        families.default_sizes(128256, width=2048, inner_width=11008, layers=36, heads=16, num_key_value_heads=4),
        absent={"pad_token_id": 128004},
        inert=frozenset({"pretraining_tp"}),
        has_window_switch=True,
        writes_derived_heads=False,
    )

    derived: ClassVar[tuple[str, ...]] = (*_WindowConfig.derived, "no_rope_layers")

    family: Literal["smollm3"] = Field(description="the architecture")
    max_position_embeddings: families.Longest = 32768
    rope_theta: families.RotaryBase = 2000000.0
    tie_word_embeddings: families.Tied = True
    attention_bias: families.AttentionBias = False
    mlp_bias: _MLPBias = False
    no_rope_layers: tuple[int, ...] = Field(
        default_factory=lambda data: every_nth_without_rope(4, data.get("num_hidden_layers", 1)),
        strict=False,
        examples=[[1, 1, 1, 0]],
        description="for each block: 1 = with rotary positions, 0 = without; default: every fourth block has none",
    )
    layer_types: _LayerTypes = Field(
        default_factory=lambda data: (
            tuple(_FULL if rotates else _SLIDING for rotates in data.get("no_rope_layers", ()))
            if data.get("sliding_window")
            else every_nth_full(1, data.get("num_hidden_layers", 1))
        ),
        description=f"{_TYPE_OF_EACH_BLOCK}blocks without rotary positions have it",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_surplus(cls, data: Any) -> Any:
        """Drop numbers beyond the last block, which mean nothing to Hugging Face either."""
        if not isinstance(data, dict):
            return data
        layers = data.get("num_hidden_layers")
        numbers = data.get("no_rope_layers")
        if not isinstance(layers, int) or not isinstance(numbers, list | tuple):
            return data
        return {**data, "no_rope_layers": numbers[:layers]}

    def _problems(self) -> list[str]:
        problems = super()._problems()
        layers = self.num_hidden_layers
        numbers = list(self.no_rope_layers)
        if len(numbers) != layers or not set(numbers) <= {0, 1}:
            problems.append(f"model.no_rope_layers ({numbers}) must have 0 or 1 for each of the {layers} blocks")
        return problems

    def rotates(self, layer: int) -> bool:
        return bool(self.no_rope_layers[layer])


def every_nth_without_rope(interval: int, layers: int) -> tuple[int, ...]:
    """Return SmolLM3's `no_rope_layers` for `layers` blocks: each block `interval`, 2 · `interval`, … has a 0."""
    return tuple(int(number % interval != 0) for number in range(1, layers + 1))


DECODERS: tuple[type[DecoderConfig], ...] = (
    LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Olmo2Config, Olmo3Config, SmolLM3Config, Gemma3Config,
)  # fmt: skip
"""The families of this file, in the order of the documentation."""
