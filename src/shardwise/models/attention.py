"""Self-attention of every family, with or without attention across the documents of a sample.

Shapes of the layer: see `models/blocks.py`. Documents that lie one after another in a sample are kept apart in one of
three ways:

- on a CPU, by `document_attention`, which calls torch's kernel once for each document;
- on an accelerator, in a compiled model, by FlexAttention with `block_mask`;
- else, and always with dropout of the probabilities, by `dense_mask`, which has S² elements a sample.

Shapes of masks: S sequence, B batch; n = ceil(S / BLOCK) blocks of a sequence. A document starts at `starts_SB[s, b]`
for its token s, so that query s sees the keys from there to s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.config import FamilyConfig
from shardwise.distributed.placement import Init
from shardwise.distributed.torch_private import cpu_attention, cpu_attention_gradients, has_fused_attention
from shardwise.layers.dropout import AnyKey, DropoutKey, Place, scaled
from shardwise.layers.linear import LinearOptions, RowParallelLinear
from shardwise.layers.norm import QueryKeyNorm
from shardwise.layers.parts import head_products
from shardwise.layers.recompute import Recomputed, can_drop, dropping
from shardwise.models.blocks import ATTENTION, Context, LayerFactory
from shardwise.models.rotary import rotate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


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
        self.group = factory.group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q `[S, B, n, d]`, k and v `[L, B, m, d]`, where m divides n and L ≥ S with a cache → `[S, B, n·d]`."""
        if self.recompute and torch.is_grad_enabled() and not self._is_fused(q, k, v, context):
            # Masks of dropout depend on the context's key alone: no generator's state must be kept for them.
            out: Tensor = checkpoint(self._attend, q, k, v, context, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._attend(q, k, v, context)

    def _is_fused(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> bool:
        """Return whether one kernel computes it and keeps its inputs, its output and the logarithms of sums alone."""
        if self._goes_by_steps(q.device, context.dropout):
            return False
        if context.starts_SB is not None or context.block_mask is not None or torch.compiler.is_compiling():
            return True
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        return has_fused_attention(
            q,
            k,
            v,
            context.mask,
            self.p if context.dropout is not None else 0.0,
            causal=self.causal and context.mask is None,
            is_grouped=q.shape[1] != k.shape[1],
        )

    def _goes_by_steps(self, device: torch.device, key: AnyKey | None) -> bool:
        """Return whether softmax, dropout and products are operations of their own, as no kernel has this dropout."""
        is_in_kernel = isinstance(key, DropoutKey) and key.mode == "fast" and device.type != "cpu"
        return self.p > 0 and key is not None and not is_in_kernel

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
        elif isinstance(key, DropoutKey) and not self._goes_by_steps(q.device, key):
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
        scores = head_products(q * (1.0 / math.sqrt(q.shape[-1])), k.transpose(-1, -2), self.group)
        if mask is None and self.causal:
            length = q.shape[-2]
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
        if mask is not None and mask.is_floating_point():
            scores = scores + mask
        elif mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        # In float32, as the fused kernels do: a sum of many bfloat16 terms would lose digits.
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return head_products(self._drop(probabilities, key), v, self.group)

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
        # A norm of q and k is no cheap function where it communicates, and keeps its input.
        self.drops_rotated = factory.drops_cheap and norm is None
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
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_dim) for part in self.qkv(x))
        return q, k, v

    def inner(self, x: Tensor, context: Context) -> Tensor:
        """Return the input of the output projection: `[S, B, n·d]`."""
        q, k, v = self.heads(x)
        if self.norm is not None:
            q, k = self.norm(q, k)
        if self.rotates:
            assert context.rotary_tables is not None, "the model has no rotary tables"
            cos, sin = (table.to(q.dtype) for table in context.rotary_tables)

            def rotated(x: Tensor) -> Tensor:
                return rotate(x, cos, sin)

            if self.drops_rotated and context.cache is None and can_drop(q):
                query = Recomputed(rotated, q)
                key = Recomputed(rotated, k)
                with dropping(query, key):
                    return cast(Tensor, self.core(query.result, key.result, v, context))
            q = rotated(q)
            k = rotated(k)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        out: Tensor = self.core(q, k, v, context)
        return out

    def forward(self, x: Tensor, context: Context) -> Tensor:
        out: Tensor = self.out(self.inner(x, context))
        return out


BLOCK = 128
"""Queries and keys of one block, as torch's kernels have them by default."""


def dense_mask(starts_SB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to the scores, `[B, 1, S, S]`: 0 for keys that a query sees, else -inf."""
    keys_S = torch.arange(len(starts_SB), device=starts_SB.device)
    queries_S1 = keys_S.unsqueeze(1)
    first_BS1 = starts_SB.T.unsqueeze(2)
    seen_BSS = (keys_S >= first_BS1) & (keys_S <= queries_S1)
    mask_BSS = torch.zeros(seen_BSS.shape, dtype=dtype, device=seen_BSS.device).masked_fill_(~seen_BSS, float("-inf"))
    return mask_BSS.unsqueeze(1)


def block_mask(starts_SB: Tensor) -> BlockMask:
    """Return the mask for FlexAttention (arXiv:2412.05496), which computes only the blocks in which a key is seen.

    It is made of the starts alone: n² numbers a sample, and nothing of the size S².
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = len(starts_SB)
    starts_BS = starts_SB.T.contiguous()
    blocks = -(-length // BLOCK)
    padded = F.pad(starts_BS, (0, blocks * BLOCK - length), value=length)
    padded[:, length:] = starts_BS[:, -1:]
    starts_BnK = padded.view(-1, blocks, BLOCK)
    first_start_Bn1 = starts_BnK.amin(-1).unsqueeze(-1)
    last_start_Bn1 = starts_BnK.amax(-1).unsqueeze(-1)
    key_blocks_n = torch.arange(blocks, device=starts_SB.device)
    query_blocks_n1 = key_blocks_n.unsqueeze(1)
    # Every query of a block sees every key of an earlier block that begins at or after the start of each query's
    # document. On the diagonal a block is never full: there the causal mask cuts it.
    is_full = (key_blocks_n * BLOCK >= last_start_Bn1) & (key_blocks_n < query_blocks_n1)
    is_seen = (key_blocks_n >= first_start_Bn1 // BLOCK) & (key_blocks_n <= query_blocks_n1)

    def sees(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts_BS[b, query])

    partial = _counts_and_indices((is_seen & ~is_full).unsqueeze(1))
    full = _counts_and_indices(is_full.unsqueeze(1))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen entries of the last dim, and all indices of it with the chosen ones first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def document_attention(q: Tensor, k: Tensor, v: Tensor, starts_SB: Tensor) -> Tensor:
    """Causal `softmax(q kᵀ / √d) v` within each document, on a CPU: documents of s tokens cost Σ s² in place of S².

    q `[S, B, n, d]`; k and v `[S, B, m, d]`, where m divides n → `[S, B, n, d]`. Nothing of the size S² is kept. Call
    `define_document_attention` before, outside of compiled code.
    """
    # One operator of a compiled graph, so that the number of documents and their places change no graph.
    return cast(Tensor, torch.ops.shardwise.document_attention(q, k, v, starts_SB)[0])


@functools.cache
def define_document_attention() -> None:
    """Define the operator of `document_attention`, and that of its gradients."""

    @torch.library.custom_op("shardwise::document_attention", mutates_args=(), device_types="cpu")
    def attention(q: Tensor, k: Tensor, v: Tensor, starts_SB: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sums_SBn = shapes(q, k, v, starts_SB)
        for document in _documents(starts_SB):
            part, log_sums = cpu_attention(_part(q, document), _part(k, document), _part(v, document))
            _part(out, document).copy_(part)
            _log_sums_of(log_sums_SBn, document).copy_(log_sums)
        return out, log_sums_SBn

    @attention.register_fake
    def shapes(q: Tensor, k: Tensor, v: Tensor, starts_SB: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=_log_sum_dtype(q))

    @torch.library.custom_op("shardwise::document_attention_gradients", mutates_args=(), device_types="cpu")
    def gradients(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums_SBn: Tensor, starts_SB: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = gradient_shapes(dy, q, k, v, out, log_sums_SBn, starts_SB)
        for document in _documents(starts_SB):
            inputs = (_part(q, document), _part(k, document), _part(v, document))
            results = (_part(out, document), _log_sums_of(log_sums_SBn, document))
            parts = cpu_attention_gradients(_part(dy, document), *inputs, *results)
            for gradient, part in zip((dq, dk, dv), parts, strict=True):
                _part(gradient, document).copy_(part)
        return dq, dk, dv

    @gradients.register_fake
    def gradient_shapes(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums_SBn: Tensor, starts_SB: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, starts_SB = inputs
        ctx.save_for_backward(q, k, v, *output, starts_SB)
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(dy, *ctx.saved_tensors), None

    attention.register_autograd(backward, setup_context=keep)


def _log_sum_dtype(q: Tensor) -> torch.dtype:
    # torch's CPU kernel sums narrower dtypes in float32.
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _documents(starts_SB: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the sample and the tokens of each document."""
    for b, starts_S in enumerate(starts_SB.unbind(1)):
        first = 0
        # All tokens of a document have one start, and those of the next one another.
        for length in torch.unique_consecutive(starts_S, return_counts=True)[1].tolist():
            yield b, slice(first, first + length)
            first += length


def _part(x: Tensor, document: tuple[int, slice]) -> Tensor:
    """Return a document's `[1, n, s, d]` of `[S, B, n, d]`."""
    b, tokens = document
    return x[tokens, b].transpose(0, 1).unsqueeze(0)


def _log_sums_of(log_sums_SBn: Tensor, document: tuple[int, slice]) -> Tensor:
    """Return a document's `[1, n, s]` of `[S, B, n]`."""
    b, tokens = document
    return log_sums_SBn[tokens, b].t().unsqueeze(0)
