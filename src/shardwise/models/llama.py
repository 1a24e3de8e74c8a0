"""Llama (1, 2 and 3): blocks of grouped-query attention with rotary positions and a gated MLP, and RMSNorm before each.

Mistral, Qwen2, Qwen3, OLMo 2 and 3, SmolLM3 and Gemma 3 differ from it only by facts of their configurations: which
projections have biases, where norms stand, whether queries and keys are normalised, which blocks rotate them or have a
window, what scales embeddings and scores.

Shapes: see `models/blocks.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import DecoderConfig
from shardwise.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from shardwise.layers.norm import RMSNorm
from shardwise.layers.recompute import compose
from shardwise.models.attention import Attention, Block
from shardwise.models.blocks import Context, LayerFactory
from shardwise.models.causal import CausalLM
from shardwise.models.rotary import Rotary

if TYPE_CHECKING:
    from shardwise.config.routing import Routing

Gate: TypeAlias = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, act: Gate) -> Tensor:
    """Return `act(gate) · up` (arXiv:2002.05202) of `[…, 2F]`, the gate first → `[…, F]`, in few passes over memory.

    Only the input is kept for the backward pass. The bits are those of single operations.
    """
    return cast(Tensor, _Gated.apply(gate_up, act))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, act: Gate) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.act = act
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
        return activated.mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        dy = grads[0]
        gate, up = gate_up.chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return _differentiable_gradient(dy, gate, up, ctx.act), None
        gradient = torch.empty_like(gate_up)
        dgate, dup = gradient.chunk(2, dim=-1)
        if ctx.act == "silu":
            torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
            torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up, out=dgate), gate, grad_input=dgate)
        else:
            torch.ops.aten.gelu.out(gate, approximate="tanh", out=dup).mul_(dy)
            d_activated = torch.mul(dy, up, out=dgate)
            torch.ops.aten.gelu_backward.grad_input(d_activated, gate, approximate="tanh", grad_input=dgate)
        return gradient, None


def _differentiable_gradient(dy: Tensor, gate: Tensor, up: Tensor, act: Gate) -> Tensor:
    """Return the gradient by operations that torch differentiates again."""
    if act == "gelu_tanh":
        dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
        return torch.cat((dgate, dy * F.gelu(gate, approximate="tanh")), dim=-1)
    # torch's `silu_backward` has no gradient.
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((dy * up * slope, dy * gate * sigmoid), dim=-1)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) · up(x))` (SwiGLU and GeGLU, arXiv:2002.05202), gate and up in one matmul."""

    def __init__(self, config: DecoderConfig, name: str, factory: LayerFactory, width: int | None = None) -> None:
        super().__init__()
        width = width or config.intermediate_size
        self.drops_activated = factory.drops_cheap
        self.act = factory.activation(config)
        # Of several parts, the gate's width decides on bits.
        has_parts = factory.group.has_parts
        self.gated = None if has_parts else partial(gated, act=cast(Gate, config.activation))
        self.gate_up = MergedColumnParallelLinear(
            config.hidden_size,
            (width, width),
            bias=config.mlp_bias,
            gather_output=False,
            names=[f"{name}.{part}" for part in ("gate_proj", "up_proj")],
            sequence_parallel_enabled=factory.sequence_parallel,
            **factory.options,
        )
        self.down_proj = RowParallelLinear(
            width,
            config.hidden_size,
            bias=config.mlp_bias,
            input_is_parallel=True,
            sequence_parallel_enabled=factory.sequence_parallel,
            name=f"{name}.down_proj",
            **factory.options,
        )

    def forward(self, x: Tensor) -> Tensor:
        # The compiler makes one kernel of single operations.
        if self.gated is None or torch.compiler.is_compiling():
            sides = self.gate_up(x)
            out = compose(self.down_proj, lambda gate, up: self.act(gate) * up, *sides, drops=self.drops_activated)
        else:
            out = compose(self.down_proj, self.gated, self.gate_up.joined(x), drops=self.drops_activated)
        return cast(Tensor, out)


class SparseMLP(nn.Module):
    """The sum of the experts that a router chooses for each token, and of the expert that all tokens use, if any."""

    def __init__(self, config: DecoderConfig, name: str, routing: Routing, factory: LayerFactory) -> None:
        super().__init__()
        from shardwise.layers.experts import Experts

        self.experts = Experts(
            config.hidden_size,
            config.expert_width,
            routing,
            sequence_parallel_enabled=factory.sequence_parallel,
            name=name,
            names=config.expert_names,
            **factory.options,
        )
        self.shared_experts: GatedMLP | None = None
        if config.shared_expert_width:
            self.shared_experts = GatedMLP(config, f"{name}.shared_experts", factory, config.shared_expert_width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


def _mlp(config: DecoderConfig, layer: int, block: str, factory: LayerFactory) -> GatedMLP | SparseMLP:
    routing = config.routing(layer)
    if routing is None:
        return GatedMLP(config, f"{block}.mlp", factory)
    return SparseMLP(config, f"{block}.{config.expert_names.layer}", routing, factory)


class LlamaBlock(Block):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; with norms after attention and MLP too, or there alone."""

    attention_name = "self_attn"

    def __init__(self, config: DecoderConfig, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        q, k, v, o = (f"{name}.self_attn.{part}_proj" for part in "qkvo")
        bias = config.attention_bias
        self.norm_place = config.norm_place
        self.drops_normed = factory.drops_cheap
        if config.norms_input:
            self.input_layernorm = factory.norm(config, f"{name}.input_layernorm", RMSNorm)
        self.self_attn = Attention(
            config,
            layer,
            factory,
            factory.query_key_value(config, (q, k, v), bias=bias),
            o,
            bias=bias and config.attention_output_bias,  # Qwen2 has biases on Q, K and V alone
            rotates=config.rotates(layer),
            norm=factory.query_key_norm(config, (f"{name}.self_attn.q_norm", f"{name}.self_attn.k_norm")),
        )
        self.post_attention_layernorm = factory.norm(config, f"{name}.post_attention_layernorm", RMSNorm)
        if self.norm_place == "both":
            self.pre_feedforward_layernorm = factory.norm(config, f"{name}.pre_feedforward_layernorm", RMSNorm)
        self.mlp = _mlp(config, layer, name, factory)
        if config.norms_output:
            self.post_feedforward_layernorm = factory.norm(config, f"{name}.post_feedforward_layernorm", RMSNorm)

    def before_attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.norm_place == "output":
            return self.self_attn.project(x)
        return compose(self.self_attn.project, self.input_layernorm, x, drops=self.drops_normed)

    def behind_attention(self, x: Tensor, attended: Tensor, context: Context) -> Tensor:
        attended = self.self_attn.out(attended)
        if self.norm_place == "output":
            x = x + self.post_attention_layernorm(attended)
            added = self.post_feedforward_layernorm(self.mlp(x))
        elif self.norm_place == "both":
            x = x + self.post_attention_layernorm(attended)
            added = compose(self.mlp, self.pre_feedforward_layernorm, x, drops=self.drops_normed)
            added = self.post_feedforward_layernorm(added)
        else:
            x = x + attended
            added = compose(self.mlp, self.post_attention_layernorm, x, drops=self.drops_normed)
        return cast(Tensor, x + added)


class Llama(CausalLM[DecoderConfig]):
    """The causal language model."""

    def build(self, config: DecoderConfig, factory: LayerFactory) -> None:
        self.rotary = Rotary(config)
        base = config.window_rope_theta
        if base is not None:
            self.window_rotary = Rotary(config.model_copy(update={"rope_theta": base, "rope_scaling": None}))
        if factory.has_embedding(config):
            self.embed_tokens = factory.word_embedding(config, "model.embed_tokens")
        self.layers = factory.blocks(config, LlamaBlock)
        if factory.part.is_last:
            self.norm = factory.norm(config, "model.norm", RMSNorm)
            self.lm_head = factory.head(config, "lm_head", "model.embed_tokens")

    def embed(self, ids_SB: Tensor, context: Context, positions_SB: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed_tokens(ids_SB)
        if self.config.embedding_scale == 1.0:
            return x
        # Gemma was trained with the factor in the dtype of its weights.
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device="cpu").item()
