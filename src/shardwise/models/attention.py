"""Self-attention of every family. Shapes: see `models/blocks.py`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.config import FamilyConfig
from shardwise.distributed.placement import Init
from shardwise.layers.dropout import AnyKey, DropoutKey, Place, scaled
from shardwise.layers.linear import LinearOptions, RowParallelLinear
from shardwise.layers.norm import QueryKeyNorm
from shardwise.models.blocks import ATTENTION, Context, LayerFactory
from shardwise.models.documents import document_attention
from shardwise.models.rotary import rotate


class AttentionCore(nn.Module):
    """`softmax(q kᵀ / √d) v`, with dropout of the probabilities.

    torch's fused kernels compute it, except with `invariant` dropout, whose mask no kernel takes, and with any dropout
    on a CPU, which lacks a fused kernel for it. Then the probabilities `[B, n, S, S]` are in memory.
    """

    def __init__(self, config: FamilyConfig, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        self.causal = config.causal
        self.p = config.attention_dropout_p
        self.place = Place(layer, ATTENTION, factory.group.rank)
        self.recompute = factory.recompute == "selective"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q `[S, B, n, d]`, k and v `[L, B, m, d]`, where m divides n and L ≥ S with a cache → `[S, B, n·d]`."""
        if self.recompute and torch.is_grad_enabled():
            # Masks of dropout depend on the context's key alone: no generator's state must be kept for them.
            out: Tensor = checkpoint(self._attend, q, k, v, context, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._attend(q, k, v, context)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.starts_SB is not None:
            return document_attention(q, k, v, context.starts_SB).flatten(2)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        key = context.dropout if self.p else None
        is_grouped = q.shape[1] != k.shape[1]
        # torch aligns its causal mask with the first key; queries after cached keys have a mask of their own.
        causal = self.causal and context.mask is None and q.shape[2] == k.shape[2]
        if context.block_mask is not None:
            from torch.nn.attention.flex_attention import flex_attention  # slow to import, and seldom needed

            out = flex_attention(q, k, v, block_mask=context.block_mask, enable_gqa=is_grouped)
        elif key is None:
            out = F.scaled_dot_product_attention(q, k, v, context.mask, is_causal=causal, enable_gqa=is_grouped)
        elif isinstance(key, DropoutKey) and key.mode == "fast" and q.device.type != "cpu":
            with key.seeded(q.device, self.place.layer, ATTENTION, self.place.shard):
                out = F.scaled_dot_product_attention(
                    q, k, v, context.mask, self.p, is_causal=causal, enable_gqa=is_grouped
                )
        else:
            out = self._step_by_step(q, k, v, context.mask, key)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _step_by_step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: AnyKey) -> Tensor:
        copies = q.shape[1] // k.shape[1]
        if copies > 1:
            k = k.repeat_interleave(copies, dim=1)
            v = v.repeat_interleave(copies, dim=1)
        # q is scaled in place of the scores, as it has fewer elements.
        scores = q * (1.0 / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        if mask is None and self.causal:
            length = q.shape[-2]
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
        if mask is not None and mask.is_floating_point():
            scores = scores + mask
        elif mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        # In float32, as the fused kernels do: a sum of many bfloat16 terms would lose digits.
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return self._drop(probabilities, key) @ v

    def _drop(self, probabilities_BnSS: Tensor, key: AnyKey) -> Tensor:
        if key.mode == "fast":
            return key.dropped(probabilities_BnSS, self.p, self.place)
        # Rows are numbered over the heads of all ranks, so that the mask of a head does not depend on the layout.
        heads, length = probabilities_BnSS.shape[1:3]
        rows = torch.arange(heads * length, device=probabilities_BnSS.device) + key.shard(self.place) * heads * length
        keep_RBS = key.keep(rows, length, self.p, self.place)
        keep_BnSS = keep_RBS.unflatten(0, (heads, length)).permute(2, 0, 1, 3)
        return scaled(probabilities_BnSS, keep_BnSS, self.p)


class Attention(nn.Module):
    """Self-attention: each rank computes its own heads, between a column-parallel layer and a row-parallel one.

    Args:
        layer: number of the block.
        qkv: the layer x → Q, K and V, in one matmul.
        out: canonical name of the output projection.
        bias: true if the output projection has a bias.
        transposed: true if its canonical weight is `[in, out]`.
        rotates: true if q and k are rotated by their positions.
        norm: the norm of q and k; None: none.
        out_init: initial values of the output projection; None: those of all layers.
    """

    def __init__(
        self,
        config: FamilyConfig,
        layer: int,
        factory: LayerFactory,
        qkv: nn.Module,
        out: str,
        *,
        bias: bool = True,
        transposed: bool = False,
        rotates: bool = False,
        norm: QueryKeyNorm | None = None,
        out_init: Init | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotates = rotates
        self.layer = layer
        self.qkv = qkv
        self.norm = norm
        self.core = AttentionCore(config, layer, factory)
        out_options = LinearOptions(**factory.options, transposed=transposed)
        if out_init is not None:
            out_options["init"] = out_init
        self.out = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=bias,
            input_is_parallel=True,
            sequence_parallel_enabled=factory.sequence_parallel,
            name=out,
            **out_options,
        )

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each `[S, B, heads, d]`."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x))
        return q, k, v

    def inner(self, x: Tensor, context: Context) -> Tensor:
        """Return the input of the output projection: `[S, B, n·d]`."""
        q, k, v = self.heads(x)
        if self.norm is not None:
            q, k = self.norm(q, k)
        if self.rotates:
            assert context.rotary_tables is not None, "the model has no rotary tables"
            cos, sin = (table.to(q.dtype) for table in context.rotary_tables)
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        out: Tensor = self.core(q, k, v, context)
        return out

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out: Tensor = self.out(self.inner(x, context))
        return out
