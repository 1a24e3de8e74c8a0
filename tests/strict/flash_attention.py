"""Stand-ins for the kernels behind torch's `varlen_attn` on the strict device.

They compute on the host, so that the device allocates what it does for a fused kernel: results alone. They take any
dtype, so that trainings in float32 have an exact answer.

Shapes: T tokens of all documents, N documents, n query heads, m key and value heads, d head width.
"""

from collections import Counter

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""How often each kernel ran in this process."""
_library: torch.library.Library | None = None


def install() -> None:
    """Give the strict device the kernels."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_flash_attention_forward", _forward, "PrivateUse1")
    _library.impl("_flash_attention_backward", _backward, "PrivateUse1")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int,
    window_size_right: int,
    **others: object,
) -> tuple[Tensor, ...]:
    calls["forward"] += 1
    assert dropout_p == 0
    assert not return_debug_mask
    assert not any(value is not None for value in others.values()), others
    seen_TT = _checked(q, k, v, bounds, key_bounds, (max_q, max_k), is_causal, (window_size_left, window_size_right))
    query, key, value = _by_head(q, k, v)
    scores = _scores(query, key, seen_TT, _scale(q, scale))
    out = torch.empty_like(q).copy_((scores.softmax(-1) @ value).transpose(0, 1))
    nothing = torch.empty(0, device=q.device)
    return out, scores.logsumexp(-1).float().to(q.device), nothing, nothing, nothing


def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_state: Tensor,
    scale: float | None = None,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    calls["backward"] += 1
    assert dropout_p == 0
    seen_TT = _checked(dy, k, v, bounds, key_bounds, (max_q, max_k), is_causal, (window_size_left, window_size_right))
    query, key, value = _by_head(q, k, v)
    dy_nTd, out_nTd = (x.cpu().to(query.dtype).transpose(0, 1) for x in (dy, out))
    probabilities = torch.exp(_scores(query, key, seen_TT, _scale(q, scale)) - log_sums.cpu().unsqueeze(-1))
    dscores = probabilities * (dy_nTd @ value.mT - (dy_nTd * out_nTd).sum(-1, keepdim=True)) * _scale(q, scale)
    gradients = []
    for x, by_query in ((q, dscores @ key), (k, dscores.mT @ query), (v, probabilities.mT @ dy_nTd)):
        # Queries that share a key add to its gradient.
        by_head = by_query.unflatten(0, (x.shape[1], -1)).sum(1)
        gradients.append(torch.empty_like(x).copy_(by_head.transpose(0, 1)))
    return tuple(gradients)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    longest: tuple[int, int],
    is_causal: bool,
    window: tuple[int, int],
) -> Tensor:
    """Return whether each query sees each key, `[T, T]`; the arguments must be as the kernel for CUDA demands."""
    for x in (q, k, v):
        assert x.dim() == 3
        assert x.stride(-1) == 1
    assert len(q) == len(k) == len(v)
    assert q.shape[1] % k.shape[1] == 0
    for ends in (bounds, key_bounds):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert ends.device == q.device
    bounds = bounds.cpu()
    assert torch.equal(bounds, key_bounds.cpu()), "queries and keys are of the same documents"
    assert (bounds[0], bounds[-1]) == (0, len(q))
    assert (bounds.diff() >= 0).all()
    assert bounds.diff().max() <= min(longest)
    left, right = window
    assert right == 0
    assert is_causal == (left == -1)
    document_T = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
    distance_TT = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
    is_near_TT = (distance_TT >= 0) & (distance_TT <= (len(q) if left == -1 else left))
    return is_near_TT & (document_T.unsqueeze(1) == document_T)


def _by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v on the host as `[n, T, d]`, in at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    copies = q.shape[1] // k.shape[1]
    key, value = (x.cpu().to(dtype).transpose(0, 1).repeat_interleave(copies, dim=0) for x in (k, v))
    return q.cpu().to(dtype).transpose(0, 1), key, value


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _scores(query: Tensor, key: Tensor, seen_TT: Tensor, scale: float) -> Tensor:
    return (query @ key.mT * scale).masked_fill(~seen_TT, float("-inf"))
