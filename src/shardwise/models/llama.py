"""Llama (1, 2 and 3): pre-norm blocks of grouped-query attention with rotary positions and a gated MLP.

Legend, per rank: S sequence, B batch, H hidden, V vocabulary, g tensor-parallel ranks, n heads held here, d head
width. Between blocks the residual stream is x `[S, B, H]`, or `[S/g, B, H]` with sequence parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.config import LlamaConfig
from shardwise.mesh import Group
from shardwise.models.rotary import Rotary, rotate
from shardwise.parallel import (
    GQAQKVColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelEmbedding,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
)
from shardwise.parallel.linear import LayerOptions
from shardwise.placement import Init


class Attention(nn.Module):
    """Causal self-attention; each rank computes its own heads."""

    def __init__(self, config: LlamaConfig, name: str, rotary: Rotary, sequence: bool, options: LayerOptions) -> None:
        super().__init__()
        self.head_dim, self.rotary = config.head_dim, rotary
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.qkv = GQAQKVColumnParallelLinear(
            config.hidden_size,
            (q_size, kv_size),
            bias=config.attention_bias,
            gather_output=False,
            head_dim=config.head_dim,
            names=[f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")],
            sequence_parallel_enabled=sequence,
            **options,
        )
        self.o_proj = RowParallelLinear(
            q_size,
            config.hidden_size,
            bias=config.attention_bias,
            input_is_parallel=True,
            sequence_parallel_enabled=sequence,
            name=f"{name}.o_proj",
            **options,
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x))
        cos, sin = self.rotary.tables(q.shape[0], q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out_BnSd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out: Tensor = self.o_proj(out_BnSd.permute(2, 0, 1, 3).flatten(2))
        return out


class MLP(nn.Module):
    """`down(silu(gate(x)) · up(x))` (SwiGLU, arXiv:2002.05202), gate and up in one matmul."""

    def __init__(self, config: LlamaConfig, name: str, sequence: bool, options: LayerOptions) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(
            config.hidden_size,
            (config.intermediate_size, config.intermediate_size),
            bias=config.mlp_bias,
            gather_output=False,
            names=[f"{name}.{part}" for part in ("gate_proj", "up_proj")],
            sequence_parallel_enabled=sequence,
            **options,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            input_is_parallel=True,
            sequence_parallel_enabled=sequence,
            name=f"{name}.down_proj",
            **options,
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: LlamaConfig, name: str, rotary: Rotary, sequence: bool, options: LayerOptions) -> None:
        super().__init__()
        self.input_layernorm = _norm(config, f"{name}.input_layernorm", sequence, options)
        self.self_attn = Attention(config, f"{name}.self_attn", rotary, sequence, options)
        self.post_attention_layernorm = _norm(config, f"{name}.post_attention_layernorm", sequence, options)
        self.mlp = MLP(config, f"{name}.mlp", sequence, options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The causal language model.

    Args:
        config: sizes by their Hugging Face names.
        group: the tensor-parallel ranks. sequence_parallel: cut the residual stream along the sequence between blocks.
        seed: the weights are a function of (seed, canonical name), the same at any layout.
    """

    def __init__(
        self,
        config: LlamaConfig,
        group: Group | None = None,
        *,
        sequence_parallel: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        options: LayerOptions = {
            "group": Group.of(group),
            "seed": seed,
            "init": Init.normal(config.initializer_range),
            "device": device,
            "dtype": dtype,
        }
        rotary = Rotary(config)
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            sequence_parallel_enabled=sequence_parallel,
            name="model.embed_tokens",
            **options,
        )
        self.layers = nn.ModuleList(
            Block(config, f"model.layers.{i}", rotary, sequence_parallel, options)
            for i in range(config.num_hidden_layers)
        )
        self.norm = _norm(config, "model.norm", sequence_parallel, options)
        self.lm_head = ParallelLMHead(
            config.hidden_size,
            config.vocab_size,
            tied_weight=self.embed_tokens.weight if config.tie_word_embeddings else None,
            sequence_parallel_enabled=sequence_parallel,
            name="lm_head",
            **options,
        )

    def hidden(self, ids_SB: Tensor) -> Tensor:
        """Token ids `[S, B]` → final hidden states `[S, B, H]` (`[S/g, B, H]` with sequence parallelism)."""
        x: Tensor = self.embed_tokens(ids_SB)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        """Sum of the cross-entropies of the counted targets (those that are not -100): a float32 scalar."""
        return self.lm_head.loss(self.hidden(ids_SB), targets_SB)

    def logits(self, ids_SB: Tensor) -> Tensor:
        """Logits `[S, B, V]` over the whole vocabulary, on every rank of the group."""
        whole: Tensor = self.lm_head(self.hidden(ids_SB))
        return whole


def _norm(config: LlamaConfig, name: str, sequence: bool, options: LayerOptions) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, sequence_parallel_enabled=sequence, name=name, **options)
