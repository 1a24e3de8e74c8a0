"""Kernels of attention on accelerators beside those of `scaled_dot_product_attention`.

Shapes: Q queries, L keys, B batch, n query heads, m key and value heads, where m divides n, d head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from shardwise.models.masks import DocumentsMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_HIDDEN = -1e30
"""Added to the scores of keys that are not seen: where no key is, sums stay finite, and so do gradients."""


def attention_by_document(q: Tensor, k: Tensor, v: Tensor, mask: DocumentsMask, scale: float | None) -> Tensor:
    """`softmax(scale · q kᵀ) v` over the keys of each query's document up to it: q `[Q, B, n, d]` → `[Q, B, n, d]`.

    k and v `[Q, B, m, d]`; scale None is 1 / √d. The samples follow one another in the kernel's tensors: several are
    copied, one is not.
    """
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and seldom needed

    q_T, k_T, v_T = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    longest = len(mask.rows)
    # The kernel counts the keys before a query's own; -1: all.
    window = (-1 if mask.window is None else mask.window - 1, 0)
    is_grouped = q.shape[2] != k.shape[2]
    options: dict[str, Any] = {"scale": scale, "window_size": window, "enable_gqa": is_grouped}
    out_T = cast(Tensor, varlen_attn(q_T, k_T, v_T, mask.bounds, mask.bounds, longest, longest, **options))
    out: Tensor = out_T.unflatten(0, (q.shape[1], -1))
    return out.transpose(0, 1)


def flex_attention() -> Callable[..., Any]:
    """Return FlexAttention, which outside of a compiled graph is a graph of its own."""
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, and seldom needed

    return cast(Callable[..., Any], flex_attention) if torch.compiler.is_compiling() else _compiled_flex_attention()


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attention_and_log_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention `[B, n, Q, d]` and the logarithms of its sums `[B, n, Q]`; both have gradients.

    q `[B, n, Q, d]`, k and v `[B, m, L, d]`. A dense mask takes the scores to memory.
    """
    if isinstance(mask, Tensor):
        return _dense_attention_and_log_sums(q, k, v, mask, scale)
    from torch.nn.attention.flex_attention import AuxRequest

    is_grouped = q.shape[1] != k.shape[1]
    out, auxiliary = flex_attention()(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped, return_aux=AuxRequest(lse=True)
    )
    return out, auxiliary.lse


def _dense_attention_and_log_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    # The queries of all heads that share a key follow one another: no key is copied.
    rows = q.unflatten(1, (k.shape[1], -1))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (rows * scale @ k.unsqueeze(2).transpose(-1, -2)).to(sum_dtype) + mask.unsqueeze(2).clamp_min(_HIDDEN)
    log_sums = scores.logsumexp(-1, keepdim=True)
    out = torch.exp(scores - log_sums).to(v.dtype) @ v.unsqueeze(2)
    return out.flatten(1, 2), log_sums.squeeze(-1).flatten(1, 2)
