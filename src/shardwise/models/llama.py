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
from torch import Tensor, nn

from shardwise.config import DecoderConfig
from shardwise.distributed.torch_private import calls_only_forward, graph_is_kept, others_keep_tensors
from shardwise.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from shardwise.layers.norm import RMSNorm
from shardwise.layers.recompute import compose
from shardwise.models.attention import Attention, Block
from shardwise.models.blocks import ACTIVATIONS, BlockContext, LayerFactory
from shardwise.models.causal import CausalLM
from shardwise.models.rotary import Rotary

if TYPE_CHECKING:
    from shardwise.config.routing import Routing

Gate: TypeAlias = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, act: Gate) -> Tensor:
    """Compute what is between the matrices of a Llama's MLP: `[…, 2F]`, the gate first → `act(gate) · up`, `[…, F]`.

    It takes few passes (arXiv:2002.05202). Only the input is kept for the backward pass. The bits are those of single
    operations.
    """
    return cast(Tensor, _Gated.apply(gate_up, act))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, act: Gate) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.act = act
        ctx.others_keep = others_keep_tensors()
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[act](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        dy = grads[0]
        if torch.is_grad_enabled():
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.autograd.grad(ACTIVATIONS[ctx.act](gate) * up, gate_up, dy, create_graph=True)[0], None
        # Nothing else reads a product's output: its gradient takes its memory.
        gradient = gate_up.clone() if ctx.others_keep or graph_is_kept() else gate_up.detach()
        gate, up = gradient.chunk(2, dim=-1)
        d_activated = dy * up
        if ctx.act == "silu":
            torch.ops.aten.silu.out(gate, out=up).mul_(dy)
            torch.ops.aten.silu_backward.grad_input(d_activated, gate, grad_input=gate)
        else:
            torch.ops.aten.gelu.out(gate, approximate="tanh", out=up).mul_(dy)
            torch.ops.aten.gelu_backward.grad_input(d_activated, gate, approximate="tanh", grad_input=gate)
        return gradient, None


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
        self.down_proj = factory.row(config, width, f"{name}.down_proj", bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(*self.enter(x))

    def enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up, or one tensor of both."""
        # The compiler makes one kernel of single operations.
        if self.gated is None or not calls_only_forward(self.gate_up, MergedColumnParallelLinear):
            return cast(tuple[Tensor, ...], self.gate_up(x))
        return (self.gate_up.joined(x),)

    def leave(self, *sides: Tensor) -> Tensor:
        """Return the output, of what `enter` returned."""
        # A hook of the user's may keep the input, and a wrapper read it again.
        is_alone = calls_only_forward(self.down_proj, RowParallelLinear)
        for weight in (self.down_proj.weight,) if is_alone else self.down_proj.parameters():
            cast(Any, weight).owns_input = is_alone
        activated = self.gated if len(sides) == 1 and self.gated else lambda gate, up: self.act(gate) * up
        return cast(Tensor, compose(self.down_proj, activated, *sides, drops=self.drops_activated))


class SparseMLP(nn.Module):
    """The MLP of a sparse Llama block: a layer `Experts`, and the shared expert that all tokens use, if any."""

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
        # A router keeps its own input, which is not gathered.
        self.drops_normed = factory.drops_normed if config.routing(layer) is None else factory.drops_cheap
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

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.norm_place == "output":
            return self.self_attn.project(x)
        return compose(self.self_attn.project, self.input_layernorm, x, drops=self.drops_normed)

    def behind_attention(self, x: Tensor, attended: Tensor, context: BlockContext) -> Tensor:
        if self.norm_place == "output":
            x = x + self.post_attention_layernorm(self.self_attn.out(attended))
            added = self.post_feedforward_layernorm(self.mlp(x))
        elif self.norm_place == "both":
            x = x + self.post_attention_layernorm(self.self_attn.out(attended))
            added = self.post_feedforward_layernorm(self._feed(x, self.pre_feedforward_layernorm))
        else:
            x = x + self.self_attn.out(attended)
            added = self._feed(x, self.post_attention_layernorm)
        return cast(Tensor, x + added)

    def _feed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return `mlp(norm(x))`; what the norm returned is free before the last product."""
        if not calls_only_forward(self.mlp, GatedMLP):
            return cast(Tensor, compose(self.mlp, norm, x, drops=self.drops_normed))
        return cast(Tensor, self.mlp.leave(*compose(self.mlp.enter, norm, x, drops=self.drops_normed)))


class Llama(CausalLM[DecoderConfig]):
    """The causal language model."""

    def build(self, config: DecoderConfig, factory: LayerFactory) -> None:
        self.embedding_scale = config.embedding_scale
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

    def embed(self, ids_SB: Tensor, context: BlockContext, positions_SB: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed_tokens(ids_SB)
        if self.embedding_scale == 1.0:
            return x
        # Gemma was trained with the factor in the dtype of its weights.
        return x * torch.tensor(self.embedding_scale, dtype=x.dtype, device="cpu").item()
