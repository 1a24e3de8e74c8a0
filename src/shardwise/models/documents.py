"""Which keys a token may attend to where documents lie one after another in a sample.

Attention keeps documents apart in one of three ways:

- on a CPU, by `document_attention`, which calls torch's kernel once for each document;
- on an accelerator, where compiled, by FlexAttention with `block_mask`;
- elsewhere, and with dropout of the probabilities, by `dense_mask`, which has S² elements a sample.

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
    """The mask that is added to the scores, `[B, 1, S, S]`: 0 for keys that are seen, else -inf."""
    places = torch.arange(len(starts_SB), device=starts_SB.device)
    first_BS1 = starts_SB.T.unsqueeze(2)
    seen = (places >= first_BS1) & (places <= places.unsqueeze(1))
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf")).unsqueeze(1)


def block_mask(starts_SB: Tensor) -> BlockMask:
    """The same for FlexAttention (arXiv:2412.05496), which computes only the blocks in which a key is seen.

    Found from the starts alone: n² numbers a sample, and nothing of the size S². A block of keys is whole where it lies
    behind the start of each query of a block and before the first of these queries.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = len(starts_SB)
    starts_BS = starts_SB.T.contiguous()
    number = -(-length // BLOCK)
    padded = F.pad(starts_BS, (0, number * BLOCK - length), value=length)
    padded[:, length:] = starts_BS[:, -1:]
    of_block_BnK = padded.view(-1, number, BLOCK)
    first_Bn, last_Bn = of_block_BnK.amin(-1), of_block_BnK.amax(-1)
    keys = torch.arange(number, device=starts_SB.device)
    earlier_nn = keys < keys.unsqueeze(1)
    is_whole = (keys * BLOCK >= last_Bn.unsqueeze(-1)) & earlier_nn
    is_seen = (keys >= first_Bn.unsqueeze(-1) // BLOCK) & (keys <= keys.unsqueeze(1))

    def sees(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts_BS[b, query])

    partial, whole = (_listed(each.unsqueeze(1)) for each in (is_seen & ~is_whole, is_whole))
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last dim are chosen, and the numbers of these, which come first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def document_attention(q: Tensor, k: Tensor, v: Tensor, starts_SB: Tensor) -> Tensor:
    """Causal `softmax(q kᵀ / √d) v` within each document, on a CPU: documents of s tokens cost Σ s² in place of S².

    q `[S, B, n, d]`; k and v `[S, B, m, d]`, where m divides n → `[S, B, n, d]`. Nothing of the size S² is kept. It is
    one operator of a compiled graph, so that the number of documents and their places change no graph. Call
    `define_document_attention` before, outside of compiled code.
    """
    return cast(Tensor, torch.ops.shardwise.document_attention(q, k, v, starts_SB)[0])


@functools.cache
def define_document_attention() -> None:
    """Define the operator of `document_attention`, and that of its gradients."""

    @torch.library.custom_op("shardwise::document_attention", mutates_args=(), device_types="cpu")
    def attention(q: Tensor, k: Tensor, v: Tensor, starts_SB: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sums_SBn = shapes(q, k, v, starts_SB)
        for at in _documents(starts_SB):
            part, log_sums = cpu_attention(_part(q, at), _part(k, at), _part(v, at))
            _part(out, at).copy_(part)
            _rows(log_sums_SBn, at).copy_(log_sums)
        return out, log_sums_SBn

    @attention.register_fake
    def shapes(q: Tensor, k: Tensor, v: Tensor, starts_SB: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=_log_sum_dtype(q))

    @torch.library.custom_op("shardwise::document_attention_gradients", mutates_args=(), device_types="cpu")
    def gradients(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums_SBn: Tensor, starts_SB: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = gradient_shapes(dy, q, k, v, out, log_sums_SBn, starts_SB)
        for at in _documents(starts_SB):
            inputs = (_part(q, at), _part(k, at), _part(v, at))
            found = cpu_attention_gradients(_part(dy, at), *inputs, _part(out, at), _rows(log_sums_SBn, at))
            for whole, part in zip((dq, dk, dv), found, strict=True):
                _part(whole, at).copy_(part)
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
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _documents(starts_SB: Tensor) -> Iterator[tuple[int, slice]]:
    """The sample and the tokens of each document."""
    for b, starts_S in enumerate(starts_SB.unbind(1)):
        first = 0
        for length in torch.unique_consecutive(starts_S, return_counts=True)[1].tolist():
            yield b, slice(first, first + length)
            first += length


def _part(x: Tensor, at: tuple[int, slice]) -> Tensor:
    """A document's `[1, n, s, d]` of `[S, B, n, d]`."""
    b, tokens = at
    return x[tokens, b].transpose(0, 1).unsqueeze(0)


def _rows(log_sums_SBn: Tensor, at: tuple[int, slice]) -> Tensor:
    """A document's `[1, n, s]` of `[S, B, n]`."""
    b, tokens = at
    return log_sums_SBn[tokens, b].t().unsqueeze(0)
