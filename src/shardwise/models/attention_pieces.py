"""Masked causal attention on a CPU, by pieces: torch's kernel runs for queries and keys that need no or a small mask.

The queries of one document that follow one another are a segment. Its pieces are the keys before it, of which each
query sees all, and its own keys, of which each query sees those up to it. A segment from which the window hides some
keys is cut into short ones, each of which is one piece with a dense mask. The outputs of pieces are added with the
weights that their log-sum-exps give them.

Documents of s tokens cost Σ s² in place of S², a window of w tokens S·w. Nothing of the size S² is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.distributed.torch_private import cpu_attention, cpu_attention_gradients
from shardwise.models.masks import AttentionMask, PiecesMask

MANY = 4096
"""Keys of a piece without a mask whose gradients are computed at once."""
FEW = 1024
"""Queries of a segment that has several pieces: their results are held at once."""
SHORT = 256
"""Queries of a segment whose pieces have a dense mask: fewer are slower, more compute scores that the mask hides."""


def attention_by_pieces(q: Tensor, k: Tensor, v: Tensor, mask: PiecesMask, scale: float | None = None) -> Tensor:
    """`softmax(scale · q kᵀ) v` over the keys that each query sees: q `[Q, B, n, d]` → `[Q, B, n, d]`.

    k and v are `[L, B, m, d]`, where m divides n; scale None is 1 / √d. Call `define_attention_by_pieces` before,
    outside of compiled code.
    """
    # One operator of a compiled graph, so that the number of documents and their places change no graph.
    arguments = (mask.starts_SB, mask.ends, mask.window, scale)
    return cast(Tensor, torch.ops.shardwise.attention_by_pieces(q, k, v, *arguments)[0])


def attend_by_pieces(q: Tensor, k: Tensor, v: Tensor, mask: PiecesMask, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return what `attention_by_pieces` does and the log-sum-exps `[Q, B, n]`; 0 and -inf where no key is seen."""
    results = (q.new_zeros(q.shape), q.new_full(q.shape[:3], float("-inf"), dtype=_sum_dtype(q)))
    for segment in _segments(mask.starts_SB, mask.ends, mask.window):
        _attend(segment, mask, scale, (q, k, v), results)
    return results


def add_gradients_by_pieces(
    dy: Tensor,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    mask: PiecesMask,
    scale: float | None,
    gradients: tuple[Tensor, ...],
) -> None:
    """Add the gradients of q, k and v, which are `inputs`, or their terms if `results` are over more keys than k has.

    `gradients`: in the dtype of the log-sum-exps, which are the second of the results.
    """
    for segment in _segments(mask.starts_SB, mask.ends, mask.window):
        _add_gradients(segment, mask, scale, dy, inputs, results, gradients)


@functools.cache
def define_attention_by_pieces() -> None:
    """Define the operator of `attention_by_pieces`, and that of its gradients."""

    @torch.library.custom_op("shardwise::attention_by_pieces", mutates_args=(), device_types="cpu")
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_SB: Tensor | None,
        ends: Tensor,
        window: int | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        return attend_by_pieces(q, k, v, PiecesMask(ends, starts_SB, window), scale)

    @attention.register_fake
    def shapes(q: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=_sum_dtype(q))

    gradients = _define_gradients()

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, starts_SB, ends, ctx.window, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output, starts_SB, ends)
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(dy, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None, None

    attention.register_autograd(backward, setup_context=keep)


def _define_gradients() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Define the operator of the gradients of q, k and v, and return it."""

    @torch.library.custom_op("shardwise::attention_by_pieces_gradients", mutates_args=(), device_types="cpu")
    def gradients(
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sums_QBn: Tensor,
        starts_SB: Tensor | None,
        ends: Tensor,
        window: int | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_zeros(x.shape, dtype=_sum_dtype(q)) for x in (q, k, v))
        mask = PiecesMask(ends, starts_SB, window)
        add_gradients_by_pieces(dy, (q, k, v), (out, log_sums_QBn), mask, scale, (dq, dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @gradients.register_fake
    def gradient_shapes(_dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, ...]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    return gradients


@dataclass(frozen=True)
class _Piece:
    """Keys that the queries of a segment see.

    Attributes:
        keys: their places, which are their rows in tensors of all keys.
        is_causal: true if they are the segment's own: each query sees those up to it.
        mask: the mask of the queries and these keys; None: each query sees all keys, or those up to it.
    """

    keys: range
    is_causal: bool = False
    mask: AttentionMask | None = None

    def cut(self) -> Iterator[_Piece]:
        """Yield a piece without a mask in pieces of few keys, so that few gradients are held at once."""
        if self.is_causal or self.mask is not None:
            yield self
            return
        for first in range(0, len(self.keys), MANY):
            yield _Piece(self.keys[first : first + MANY])

    def among(self, key_places: tuple[range, ...]) -> Iterator[_Piece]:
        """Yield the keys of the piece that have some places, by their rows in tensors of the keys at these places."""
        first_row = 0
        for run in key_places:
            places = range(max(self.keys.start, run.start), min(self.keys.stop, run.stop))
            if places:
                row = first_row + places.start - run.start
                mask = self.mask
                if mask is not None:
                    offset = places.start - self.keys.start
                    mask = replace(mask, key_places=(range(offset, offset + len(places)),))
                yield _Piece(range(row, row + len(places)), self.is_causal, mask)
            first_row += len(run)

    def of_keys(self, x: Tensor, samples: slice) -> Tensor:
        """Return the keys' `[b, m, s, d]` of `[L, B, m, d]`."""
        return x[self.keys.start : self.keys.stop, samples].permute(1, 2, 0, 3)

    def dense(self, like: Tensor) -> Tensor | None:
        """Return the mask in the form that torch's kernel takes."""
        return None if self.mask is None else self.mask.dense(len(self.keys), like.dtype, like.device)


@dataclass(frozen=True)
class _Segment:
    """Queries that follow one another and see keys from one place on.

    Attributes:
        rows: rows of the queries.
        places: places of the queries.
        start: first place of their document.
    """

    samples: slice
    rows: slice
    places: range
    start: int

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the segment's `[b, n, s, d]` of `[Q, B, n, d]`."""
        return x[self.rows, self.samples].permute(1, 2, 0, 3)

    def is_limited(self, window: int | None) -> bool:
        """Return whether a window hides keys of the document from the last query."""
        return window is not None and self.places.stop - self.start > window

    def cut(self, size: int) -> Iterator[_Segment]:
        """Yield segments of `size` queries."""
        for first in range(0, len(self.places), size):
            places = self.places[first : first + size]
            row = self.rows.start + first
            yield _Segment(self.samples, slice(row, row + len(places)), places, self.start)

    def pieces(self, mask: PiecesMask) -> list[_Piece]:
        """Return the keys that the queries see."""
        first = self.places.start
        window = mask.window
        if self.is_limited(window):
            assert window is not None
            keys = range(max(self.start, first - window + 1), self.places.stop)
            queries = range(first - keys.start, len(keys))
            pieces = [_Piece(keys, mask=AttentionMask((queries,), window=window))]
        else:
            pieces = [_Piece(self.places, is_causal=True)]
            if self.start < first:
                pieces.append(_Piece(range(self.start, first)))
        if mask.key_places is None:
            return pieces
        return [part for piece in pieces for part in piece.among(mask.key_places)]


def _segments(starts_SB: Tensor | None, ends: Tensor, window: int | None) -> Iterator[_Segment]:
    """Yield all queries: those of a document in a run, cut into short segments where a window hides keys from them."""
    row = 0
    for run in (range(first, end) for first, end in ends.view(-1, 2).tolist()):
        for segment in _documents(starts_SB, row, run):
            if segment.is_limited(window):
                yield from segment.cut(SHORT)
            elif run.start > 0:
                yield from segment.cut(FEW)
            else:
                yield segment
        row += len(run)


def _documents(starts_SB: Tensor | None, row: int, run: range) -> Iterator[_Segment]:
    """Yield the queries of each document in a run, which begins at `row`."""
    if starts_SB is None:
        yield _Segment(slice(None), slice(row, row + len(run)), run, 0)
        return
    for b, starts_S in enumerate(starts_SB[row : row + len(run)].unbind(1)):
        # All tokens of a document have one start, and those of the next one another.
        starts, lengths = torch.unique_consecutive(starts_S, return_counts=True)
        bounds = [0, *lengths.cumsum(0).tolist()]
        for start, (first, end) in zip(starts.tolist(), pairwise(bounds), strict=True):
            yield _Segment(slice(b, b + 1), slice(row + first, row + end), run[first:end], start)


def _attend(
    segment: _Segment,
    mask: PiecesMask,
    scale: float | None,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor],
) -> None:
    """Write the output and the log-sum-exps of a segment."""
    q, k, v = inputs
    query = segment.of_queries(q)
    by_piece = []
    for piece in segment.pieces(mask):
        keys, values = (piece.of_keys(x, segment.samples) for x in (k, v))
        dense = piece.dense(q)
        out, log_sums = cpu_attention(query, keys, values, dense, scale, causal=piece.is_causal)
        if dense is not None and mask.key_places is not None:
            # Of a query that sees none of the keys, torch's kernel returns 0.
            log_sums = log_sums.masked_fill(dense.isneginf().all(-1), float("-inf"))
        by_piece.append((out, log_sums))
    if not by_piece:
        return
    out, log_sums = _merged(by_piece)
    segment.of_queries(results[0]).copy_(out)
    segment.of_queries(results[1].unsqueeze(-1)).copy_(log_sums.unsqueeze(-1))


def _add_gradients(
    segment: _Segment,
    mask: PiecesMask,
    scale: float | None,
    dy: Tensor,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
) -> None:
    """Add a segment's terms to the gradients of q, k and v."""
    q, k, v = inputs
    query = segment.of_queries(q)
    out = segment.of_queries(results[0])
    log_sums = segment.of_queries(results[1].unsqueeze(-1)).squeeze(-1)
    for piece in chain.from_iterable(piece.cut() for piece in segment.pieces(mask)):
        keys, values = (piece.of_keys(x, segment.samples) for x in (k, v))
        dq, dk, dv = cpu_attention_gradients(
            segment.of_queries(dy), query, keys, values, out, log_sums, piece.dense(q), scale, causal=piece.is_causal
        )
        segment.of_queries(gradients[0]).add_(dq)
        piece.of_keys(gradients[1], segment.samples).add_(dk)
        piece.of_keys(gradients[2], segment.samples).add_(dv)


def _merged(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exps over the keys of all pieces."""
    if len(results) == 1:
        return results[0]
    log_sums = torch.stack([sums for _, sums in results]).logsumexp(0)
    finite = log_sums.clamp_min(torch.finfo(log_sums.dtype).min)
    terms = (out * torch.exp(sums - finite).unsqueeze(-1) for out, sums in results)
    return functools.reduce(Tensor.add_, terms), log_sums


def _sum_dtype(q: Tensor) -> torch.dtype:
    # torch's CPU kernel sums narrower dtypes in float32.
    return torch.float64 if q.dtype == torch.float64 else torch.float32
