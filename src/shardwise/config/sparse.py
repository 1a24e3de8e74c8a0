"""Decoders with experts: OLMoE, Qwen3-MoE, Mixtral and GLM-4.5.

As in `config/families.py`, `annotations` are not imported from `__future__`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from shardwise.base.errors import listing
from shardwise.config.base_section import divisors, nearest_numbers
from shardwise.config.decoders import SIZES_OF_LLAMA, DecoderConfig
from shardwise.config.families import AttentionBias, Longest, NormedWidth, RotaryBase, default_sizes
from shardwise.config.hugging_face_names import ConfigFile, ExpertNames, WeightNames
from shardwise.config.routing import Routing

_Experts: TypeAlias = Annotated[int, Field(gt=0, description="experts of a block")]
_PerToken: TypeAlias = Annotated[int, Field(gt=0, description="experts that the router chooses for a token")]
_Width: TypeAlias = Annotated[int, Field(gt=0, description="width of an expert")]
_Normalized: TypeAlias = Annotated[bool, Field(description="the weights of a token's experts are divided by their sum")]
_Epsilon: TypeAlias = Annotated[float, Field(gt=0, description="added to the mean square in RMSNorm")]

SPARSE_SIZES = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
"""Keys of the sizes of a sparse model: the first three are families' names of the number of experts."""
_FEW = 8  # experts of a block in miniature, if a token does not have more
_TRAINING_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Fields of the balance of loads in transformers' training, which a recipe's own keys describe."""


class _SparseConfig(DecoderConfig):
    """The facts that these families share. A family has the keys of experts by Hugging Face's names."""

    mlp_bias: ClassVar[bool] = False

    def _problems(self) -> list[str]:
        problems = super()._problems()
        routing = self.router_rule
        if routing.per_token > routing.experts:
            problems.append(
                f"model.num_experts_per_tok ({routing.per_token}) must not exceed model.{self._experts_key} "
                f"({routing.experts})"
            )
        return problems

    @property
    def router_rule(self) -> Routing:
        raise NotImplementedError

    @property
    def expert_width(self) -> int:
        return int(getattr(self, "moe_intermediate_size", self.intermediate_size))

    @property
    def _experts_key(self) -> str:
        return next(key for key in SPARSE_SIZES[:3] if key in type(self).model_fields)

    def in_miniature(self, width: int, alike: Callable[[int, int], int]) -> dict[str, int]:
        rule = self.router_rule
        few = min(rule.experts, max(_FEW, rule.per_token))
        experts = rule.experts if rule.groups > 1 else alike(rule.experts, few)
        return {"moe_intermediate_size": width, self._experts_key: experts}

    def routing(self, layer: int) -> Routing | None:
        return self.router_rule


class OlmoeConfig(_SparseConfig):
    """OLMoE: experts in all blocks, RMSNorm of queries and keys over all heads."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "olmoe",
        "OlmoeForCausalLM",
        default_sizes(50304, width=2048, inner_width=2048, layers=16, heads=16),
        spellings={"num_local_experts": "num_experts"},
        absent={"pad_token_id": 1},
        inert=_TRAINING_FIELDS,
        writes_derived_heads=False,
    )

    query_key_norm: ClassVar[NormedWidth] = "all_heads"

    family: Literal["olmoe"] = Field(description="the architecture")
    max_position_embeddings: Longest = 4096
    rms_norm_eps: _Epsilon = 1e-5
    attention_bias: AttentionBias = False
    num_experts: _Experts = 64
    num_experts_per_tok: _PerToken = 8
    norm_topk_prob: _Normalized = False

    @property
    def router_rule(self) -> Routing:
        return Routing(self.num_experts, self.num_experts_per_tok, normalized=self.norm_topk_prob)


class Qwen3MoeConfig(_SparseConfig):
    """Qwen3-MoE: a Qwen3 with experts in all blocks, or in every nth, or not in some."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        default_sizes(151936, width=2048, inner_width=6144, layers=24, heads=32, num_key_value_heads=4)
        | {"head_dim": None, "sliding_window": None},
        spellings={"num_local_experts": "num_experts"},
        twice={"num_experts": "num_local_experts"},
        has_window_switch=False,
        inert=_TRAINING_FIELDS | {"max_window_layers"},
    )

    query_key_norm: ClassVar[NormedWidth] = "head"

    family: Literal["qwen3_moe"] = Field(description="the architecture")
    max_position_embeddings: Longest = 32768
    attention_bias: AttentionBias = False
    num_experts: _Experts = 128
    num_experts_per_tok: _PerToken = 8
    moe_intermediate_size: _Width = 768
    norm_topk_prob: _Normalized = False
    decoder_sparse_step: int = Field(default=1, gt=0, description="every nth block has experts, the others an MLP")
    mlp_only_layers: tuple[int, ...] = Field(
        default=(), strict=False, description="numbers of blocks, from 0, that have an MLP in place of experts"
    )

    @property
    def router_rule(self) -> Routing:
        return Routing(self.num_experts, self.num_experts_per_tok, normalized=self.norm_topk_prob)

    def routing(self, layer: int) -> Routing | None:
        is_sparse = layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        return self.router_rule if is_sparse else None


class MixtralConfig(_SparseConfig):
    """Mixtral: a Mistral with experts in all blocks, whose weights add up to 1."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "mixtral",
        "MixtralForCausalLM",
        defaults=SIZES_OF_LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "rope_theta": 1000000.0},
        spellings={"num_experts": "num_local_experts"},
        only={"router_jitter_noise": 0.0},
        inert=_TRAINING_FIELDS,
        writes_derived_heads="scaled",
    )

    # Files with fused experts have the names of the other families.
    weight_names: ClassVar[WeightNames] = replace(
        DecoderConfig.weight_names,
        renamed=(
            (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
            (r"\.mlp\.(experts\.\d+)\.gate_proj\.", r".block_sparse_moe.\1.w1."),
            (r"\.mlp\.(experts\.\d+)\.up_proj\.", r".block_sparse_moe.\1.w3."),
            (r"\.mlp\.(experts\.\d+)\.down_proj\.", r".block_sparse_moe.\1.w2."),
        ),
    )
    attention_bias: ClassVar[bool] = False
    expert_names: ClassVar[ExpertNames] = ExpertNames("block_sparse_moe", "gate", ("w1", "w3", "w2"))

    family: Literal["mixtral"] = Field(description="the architecture")
    max_position_embeddings: Longest = 131072
    rms_norm_eps: _Epsilon = 1e-5
    rope_theta: RotaryBase = 1000000.0
    sliding_window: int | None = Field(
        default=None, gt=0, description="keys that a query sees, its own included; null = no window"
    )
    num_local_experts: _Experts = 8
    num_experts_per_tok: _PerToken = 2

    @property
    def router_rule(self) -> Routing:
        return Routing(self.num_local_experts, self.num_experts_per_tok, normalized=True)

    def window(self, layer: int) -> int | None:
        return self.sliding_window


class Glm4MoeConfig(_SparseConfig):
    """GLM-4.5: sigmoid scores with a correction bias, groups of experts, a shared expert, first blocks without."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        default_sizes(151552, width=4096, inner_width=10944, layers=46, heads=96, num_key_value_heads=8)
        | {"head_dim": 128, "use_qk_norm": False},
        # DeepSeek's names for what this family always does, and gpt-oss's for what it never does.
        only={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "swiglu_limit": None},
        written={"num_nextn_predict_layers": 0},
        inert=_TRAINING_FIELDS | {"num_nextn_predict_layers", "num_mtp_layers"},
    )

    # Published files have a block that predicts the second next token, which transformers leaves out too.
    weight_names: ClassVar[WeightNames] = replace(
        DecoderConfig.weight_names, further_block=r"(model\.layers\.\d+\.)eh_proj\.weight"
    )
    attention_output_bias: ClassVar[bool] = False

    family: Literal["glm4_moe"] = Field(description="the architecture")
    max_position_embeddings: Longest = 131072
    rms_norm_eps: _Epsilon = 1e-5
    attention_bias: AttentionBias = False
    rotary_pct: float = Field(default=0.5, gt=0, le=1, description="fraction of each head's dimensions that are rotary")
    use_qk_norm: bool = Field(default=False, description="RMSNorm of each head of queries and keys")
    n_routed_experts: _Experts = 128
    n_shared_experts: int = Field(default=1, ge=0, description="experts' widths of the expert that all tokens use")
    num_experts_per_tok: _PerToken = 8
    moe_intermediate_size: _Width = 1408
    first_k_dense_replace: int = Field(default=1, ge=0, description="first blocks, which have an MLP")
    norm_topk_prob: _Normalized = True
    routed_scaling_factor: float = Field(default=1.0, gt=0, description="factor on the weights of experts")
    n_group: int = Field(default=1, gt=0, description="groups of experts")
    topk_group: int = Field(default=1, gt=0, description="groups of which a token's experts are chosen")

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.rotary_dim % 2 or not self.rotary_dim:
            problems.append(
                f"model.rotary_pct ({self.rotary_pct}) × model.head_dim ({self.head_dim}) = {self.rotary_dim} must be "
                "even and at least 2: rotary embeddings turn pairs"
            )
        experts = self.n_routed_experts
        if experts % self.n_group:
            valid = nearest_numbers(self.n_group, divisors(experts))
            problems.append(
                f"model.n_group ({self.n_group}) must divide model.n_routed_experts ({experts}): "
                f"nearest {listing(valid, 'or')}"
            )
        elif self.topk_group > self.n_group:
            problems.append(f"model.topk_group ({self.topk_group}) must not exceed model.n_group ({self.n_group})")
        elif self.num_experts_per_tok > (open_experts := experts // self.n_group * self.topk_group):
            problems.append(
                f"model.num_experts_per_tok ({self.num_experts_per_tok}) must not exceed the experts of "
                f"model.topk_group groups ({open_experts})"
            )
        return problems

    @property
    def query_key_norm(self) -> NormedWidth | None:  # type: ignore[override]
        return "head" if self.use_qk_norm else None

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_pct)

    @property
    def router_rule(self) -> Routing:
        return Routing(
            self.n_routed_experts,
            self.num_experts_per_tok,
            scores="sigmoid",
            normalized=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            has_bias=True,
        )

    def routing(self, layer: int) -> Routing | None:
        return self.router_rule if layer >= self.first_k_dense_replace else None

    @property
    def shared_expert_width(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size


SPARSE_DECODERS: tuple[type[DecoderConfig], ...] = (OlmoeConfig, Qwen3MoeConfig, MixtralConfig, Glm4MoeConfig)
"""The families of this file, in the order of the documentation."""
