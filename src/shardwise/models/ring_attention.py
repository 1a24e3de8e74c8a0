"""Attention over keys and values that come rank by rank (ring attention, arXiv:2310.01889).

A rank attends to its own keys first, then to those of the rank before it, and so on, and passes each on to the next
rank. The keys and values of two ranks are in memory at once: those that are used, and those that arrive. Outputs are
added with the weights that their log-sum-exps give them. In the backward pass keys and values come again. Their
gradients go back to their rank, which adds them in float32, in the order of the distance.

Shapes: Q queries and keys of a rank, B batch, n query heads, m key and value heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.base.errors import ConfigError
from shardwise.distributed import collectives, devices
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.models.attention_pieces import add_gradients_by_pieces, attend_by_pieces
from shardwise.models.masks import BlocksMask, KernelMask, Mask, PiecesMask, flex_attention

_HIDDEN = -1e30  # added to the scores of keys that are not seen: where no key is, sums stay finite, and so do gradients


@dataclass(frozen=True)
class RingMask(KernelMask):
    """The masks of this rank's queries and the keys of each rank of a group, which come rank by rank."""

    masks: Sequence[Mask]
    group: Group

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Return attention over the keys of all ranks, `[Q, B, n, d]`; k and v are this rank's, `[Q, B, m, d]`."""
        return cast(Tensor, _RingAttention.apply(q, k, v, self.masks, scale, self.group))  # type: ignore[no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Mask], scale: float | None, group: Group
    ) -> Tensor:
        total = None
        for rank, (keys, values) in passed_round(torch.stack((k, v)), group):
            results = _attend(q, keys, values, masks[rank], scale)
            del keys, values
            total = results if total is None else _merged(total, results)
        assert total is not None
        out = total[0].to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total[1])
        ctx.masks = masks
        ctx.scale = scale
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *results = ctx.saved_tensors
        group = ctx.group
        dq = torch.zeros_like(q, dtype=results[1].dtype)
        total = torch.zeros((2, *k.shape), dtype=dq.dtype, device=k.device)
        returning: Pending | None = None
        for rank, (keys, values) in passed_round(torch.stack((k, v)), group):
            terms = total if rank == group.rank else torch.zeros_like(total)
            inputs = (q, keys, values)
            _add_gradients(grads[0], inputs, tuple(results), ctx.masks[rank], ctx.scale, (dq, *terms))
            del keys, values, inputs
            if returning is not None:
                total += returning.wait()
            if rank != group.rank:
                returning = collectives.shift_async(terms.to(k.dtype), group, rank - group.rank)
            del terms
        if returning is not None:
            total += returning.wait()
        dk, dv = total.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def _merged(total: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exps over the keys of both; each query sees a key of the first."""
    log_sums = torch.logaddexp(total[1], results[1])
    weights = [torch.exp(sums - log_sums).unsqueeze(-1) for sums in (total[1], results[1])]
    return total[0] * weights[0] + results[0] * weights[1], log_sums


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the output `[Q, B, n, d]` and the log-sum-exps `[Q, B, n]` over some keys."""
    if isinstance(mask, PiecesMask):
        out, log_sums = attend_by_pieces(q, k, v, mask, scale)
        return out, log_sums.transpose(0, 1)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
    if isinstance(mask, BlocksMask):
        out, log_sums = _attend_by_blocks(q, k, v, mask, scale)
    else:
        assert isinstance(mask, Tensor), "a rank's queries have keys of other ranks"
        out, log_sums = _attend_densely(q, k, v, mask, scale)
    return out.permute(2, 0, 1, 3), log_sums.permute(2, 0, 1)


def _attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlocksMask, scale: float | None) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest  # slow to import, and seldom needed

    out, auxiliary = flex_attention()(
        q,
        k,
        v,
        block_mask=mask.blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, auxiliary.lse


def _attend_densely(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    # The queries of all heads that share a key follow one another: no key is copied.
    rows = q.unflatten(1, (k.shape[1], -1))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (rows * scale @ k.unsqueeze(2).transpose(-1, -2)).to(sum_dtype) + mask.unsqueeze(2).clamp_min(_HIDDEN)
    log_sums = scores.logsumexp(-1, keepdim=True)
    out = torch.exp(scores - log_sums).to(v.dtype) @ v.unsqueeze(2)
    return out.flatten(1, 2), log_sums.squeeze(-1).flatten(1, 2)


def _add_gradients(
    dy: Tensor,
    inputs: tuple[Tensor, ...],
    total: tuple[Tensor, ...],
    mask: Mask,
    scale: float | None,
    gradients: tuple[Tensor, ...],
) -> None:
    """Add the terms of some keys to the gradients of q, k and v, which are `inputs`.

    `total`: output and log-sum-exps over all keys.
    """
    if isinstance(mask, PiecesMask):
        out, log_sums_QBn = total
        add_gradients_by_pieces(dy, inputs, (out, log_sums_QBn.transpose(0, 1)), mask, scale, gradients)
        return
    q, k, v = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        results = _attend(q, k, v, mask, scale)
    # These keys add exp(log_sums - total) · out to the total output.
    out, log_sums = (tensor.detach() for tensor in results)
    d_out = torch.exp(log_sums - total[1]).unsqueeze(-1) * dy
    d_log_sums = (d_out * (out - total[0])).sum(-1)
    terms = torch.autograd.grad(results, leaves, (d_out.to(out.dtype), d_log_sums))
    for gradient, term in zip(gradients, terms, strict=True):
        gradient += term


def passed_round(x: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Pass x round the ring of context-parallel ranks: yield this rank and its x, then the rank before it and its x.

    Each tensor is passed on to the next rank, and the next one arrives, while it is used.

    Raises:
        ConfigError: the device's library sends no messages.
    """
    for distance in range(group.size):
        is_last = distance + 1 == group.size
        try:
            arriving = None if is_last else collectives.shift_async(x, group, 1)
        except (NotImplementedError, RuntimeError) as error:
            if not devices.lacks_messages(error):
                raise
            key = "parallel.context_keys (ring)"
            raise ConfigError(devices.without_messages(key, x.device, "parallel.context_keys=gather", error)) from error
        yield (group.rank - distance) % group.size, x
        if arriving is not None:
            x = arriving.wait()
