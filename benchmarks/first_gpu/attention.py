"""Which kernel of attention is fastest at the strides of our layers, and what do documents and determinism cost?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from first_gpu.session import Figures, Session
from first_gpu.timing import copies, tflops, timed
from shardwise.models.masks import AttentionMask, DocumentSizes

TITLE = "Attention"
NOTE = (
    "Q, K, V `[B, n, S, d]` as views of `[S, B, n, d]`, V inside of the QKV product, causal, 32 heads of 128. TFLOP/s "
    "count the causal half, 2 products forward and 4 (not 5) backward; with documents too, so that the same time gives "
    "the same rate. Backward: forward and backward, less forward. Repeatable: two backward passes give the same bits."
)
COLUMNS = "kernel batch forward_ms backward_ms forward_tflops backward_tflops is_repeatable peak_allocated"
_DOCUMENTS = 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(session: Session) -> None:
    for batch in (1, 2):
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            _measure(session, name, batch, backend=name)
        _measure(session, "torch's choice", batch)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        _measure(session, f"{name}, deterministic", 1, backend=name, is_deterministic=True)
    mask = _documents(session, 1).dense(session.sizes.sequence, torch.bfloat16, session.device)
    _measure(session, f"{_DOCUMENTS} documents, dense mask", 1, lambda q, k, v: _sdpa(q, k, v, mask))
    if session.device.type != "cpu":
        session.measure({"kernel": f"{_DOCUMENTS} documents, FlexAttention", "batch": 1}, lambda: _flex(session, 1))
        for batch in (1, 2):
            labels = {"kernel": f"{_DOCUMENTS} documents, varlen_attn", "batch": batch}
            session.measure(labels, lambda batch=batch: _varlen(session, batch))


def _measure(
    session: Session,
    kernel: str,
    batch: int,
    attend: Attend | None = None,
    *,
    backend: str | None = None,
    is_deterministic: bool = False,
) -> None:
    def figures() -> Figures:
        with ExitStack() as stack:
            if backend is not None:
                stack.enter_context(sdpa_kernel([getattr(SDPBackend, backend)]))
            if is_deterministic:
                stack.enter_context(_deterministic())
            return _both_passes(session, batch, attend or _sdpa)

    session.measure({"kernel": kernel, "batch": batch}, figures)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


def _flex(session: Session, batch: int) -> Figures:
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = _documents(session, batch).blocks(session.sizes.sequence, session.device)
    return _both_passes(session, batch, lambda q, k, v: compiled(q, k, v, block_mask=mask))


def _varlen(session: Session, batch: int) -> Figures:
    mask = _documents(session, batch).by_document(session.sizes.sequence, is_compiled=False)

    def attend(*inputs: Tensor) -> Tensor:
        q, k, v = (x.permute(2, 0, 1, 3) for x in inputs)
        return mask.attend(q, k, v, None).permute(1, 2, 0, 3)

    return _both_passes(session, batch, attend)


@contextmanager
def _deterministic() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would be a part of the time
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _documents(session: Session, batch: int) -> AttentionMask:
    """The mask of documents of equal length."""
    length = session.sizes.sequence // _DOCUMENTS
    places_S = torch.arange(session.sizes.sequence, device=session.device)
    starts_SB = (places_S // length * length).unsqueeze(1).expand(-1, batch)
    sizes = DocumentSizes(_DOCUMENTS * batch, length)
    return AttentionMask((range(session.sizes.sequence),), starts_SB, documents=sizes)


def _inputs(session: Session, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q and K as the rotary positions leave them, and V as a part of the product."""
    sizes = session.sizes
    shape = (sizes.sequence, batch, sizes.heads, sizes.head_dim)
    qkv = session.random(sizes.sequence, batch, 3 * sizes.hidden)
    v = qkv[..., 2 * sizes.hidden :].unflatten(-1, (sizes.heads, sizes.head_dim))
    q, k, v = (t.permute(1, 2, 0, 3) for t in (session.random(*shape), session.random(*shape), v))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _both_passes(session: Session, batch: int, attend: Attend) -> Figures:
    sizes = session.sizes
    nbytes = 8 * batch * sizes.sequence * sizes.hidden
    all_inputs = [_inputs(session, batch) for _ in range(copies(nbytes))]
    dy = session.random(sizes.sequence, batch, sizes.heads, sizes.head_dim).permute(1, 2, 0, 3)

    def gradients(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*qkv), qkv, dy)

    forward_ms = timed(session, [lambda qkv=qkv: attend(*qkv) for qkv in all_inputs])["ms"]
    both = timed(session, [lambda qkv=qkv: gradients(qkv) for qkv in all_inputs])
    backward_ms = both.pop("ms") - forward_ms
    first, second = (gradients(all_inputs[0]) for _ in range(2))
    flops = 2 * batch * sizes.sequence**2 * sizes.hidden
    return {
        **both,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_tflops": tflops(flops, forward_ms),
        "backward_tflops": tflops(2 * flops, backward_ms),
        "is_repeatable": all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
    }
