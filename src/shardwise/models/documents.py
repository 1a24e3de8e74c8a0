"""Attention that keeps apart the documents that lie one after another in a sample.

Documents are kept apart in one of three ways:

- on a CPU, by `document_attention`, which calls torch's kernel once for each document;
- on an accelerator, in a compiled model, by FlexAttention with `block_mask`;
- else, and always with dropout of the probabilities, by `dense_mask`, which has S² elements a sample.

Shapes: S sequence, B batch; n = ceil(S / BLOCK) blocks of a sequence. A document starts at `starts_SB[s, b]` for its
token s, so that query s sees the keys from there to s.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.distributed.torch_private import cpu_attention, cpu_attention_gradients

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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
