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

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_HIDDEN = -1e30
"""Added to the scores of keys that are not seen: where no key is, sums stay finite, and so do gradients."""


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
