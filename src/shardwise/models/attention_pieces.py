"""Masked causal attention on a CPU, by pieces: torch's kernel runs for queries and keys that need no or a small mask.

The queries of a piece follow one another in a document, and so do its keys. Either both are of the same tokens, and
each query sees the keys up to it; or the keys are before the queries, and each query sees all of them. Queries from
which the window hides some keys are cut into short runs, each of which is one piece with a dense mask. The outputs of
pieces are added with the weights that their log-sum-exps give them.

Documents of s tokens cost Σ s² in place of S², a window of w tokens S·w. Nothing of the size S² is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.distributed.torch_private import cpu_attention, cpu_attention_gradients
from shardwise.layers.bitwise.functions import in_vectors
from shardwise.models.masks import AttentionMask, PiecesMask

MANY = 4096
"""Keys of a piece without a mask: their gradients are held at once."""
FEW = 1024
"""Queries of a piece without a mask: their outputs are held at once."""
SQUARE = 256
"""Queries of a piece with their own keys: torch's kernel computes most of the scores that its causal mask hides."""
SHORT = 256
"""Queries of a piece with a mask: fewer are slower, more compute scores that the mask hides."""


def attend_by_pieces(q: Tensor, k: Tensor, v: Tensor, mask: PiecesMask, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return what `PiecesMask.attend` does and the log-sum-exps `[B, Q, n]`; 0 and -inf where no key is seen."""
    pieces = list(_pieces(mask))
    by_piece = (piece.attended(q, k, v, scale) for piece in pieces)
    has_all_keys = mask.key_places is None
    if has_all_keys and len(pieces) == 1:
        out, log_sums = next(by_piece)
        return out.permute(2, 0, 1, 3), log_sums.transpose(1, 2)
    queries, samples, heads, _ = q.shape
    out = q.new_empty(q.shape, dtype=_sum_dtype(q))
    log_sums = q.new_empty((samples, queries, heads), dtype=out.dtype)
    if not has_all_keys:
        out.zero_()
        log_sums.fill_(float("-inf"))
    for piece, (out_of_piece, log_sums_of_piece) in zip(pieces, by_piece, strict=True):
        is_first = has_all_keys and piece.has_own_keys
        _merge(piece.of_queries(out), piece.of_sums(log_sums), out_of_piece, log_sums_of_piece, is_first)
    return out.to(q.dtype), log_sums


def add_gradients_by_pieces(
    dy: Tensor,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    mask: PiecesMask,
    scale: float | None,
    gradients: tuple[Tensor, ...],
) -> None:
    """Add the gradients of q, k and v, which are `inputs`, or their terms if `results` are over more keys than k has.

    `results`: as `attend_by_pieces` gives them. `gradients`: in the dtype of the log-sum-exps.
    """
    q, k, v = inputs
    out, log_sums_BQn = results
    for piece in chain.from_iterable(piece.cut() for piece in _pieces(mask)):
        terms = piece.gradients(dy, q, k, v, out, log_sums_BQn, scale)
        piece.of_queries(gradients[0]).add_(terms[0])
        piece.of_keys(gradients[1]).add_(terms[1])
        piece.of_keys(gradients[2]).add_(terms[2])


@functools.cache
def define_attention_by_pieces() -> None:
    """Define the operator of `PiecesMask.attend`, and that of its gradients."""

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
    def shapes(q: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
        queries, samples, heads, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((samples, queries, heads), dtype=_sum_dtype(q))

    gradients = _define_gradients()

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, starts_SB, ends, ctx.window, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output, starts_SB, ends)
        ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(dy, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None, None

    attention.register_autograd(backward, setup_context=keep)


def _define_gradients() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    @torch.library.custom_op("shardwise::attention_by_pieces_gradients", mutates_args=(), device_types="cpu")
    def gradients(
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sums_BQn: Tensor,
        starts_SB: Tensor | None,
        ends: Tensor,
        window: int | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = PiecesMask(ends, starts_SB, window)
        pieces = list(_pieces(mask))
        if len(pieces) == 1 and len(pieces[0].keys) == len(k):
            dq, dk, dv = pieces[0].gradients(dy, q, k, v, out, log_sums_BQn, scale)
            return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)
        dq, dk, dv = (_by_sample(x, _sum_dtype(q)).zero_() for x in (q, k, v))
        add_gradients_by_pieces(dy, (q, k, v), (out, log_sums_BQn), mask, scale, (dq, dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @gradients.register_fake
    def gradient_shapes(_dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_arguments: Any) -> tuple[Tensor, ...]:
        return _by_sample(q, q.dtype), _by_sample(k, k.dtype), _by_sample(v, v.dtype)

    return gradients


@dataclass(frozen=True)
class _Piece:
    """Queries that follow one another, and keys."""

    samples: slice
    rows: range
    keys: range  # places of the keys, which are their rows in tensors of all keys
    is_causal: bool = False  # true if the keys are the queries' own: each query sees those up to it
    # The mask of the queries and these keys; None: each query sees all keys, or those up to it.
    mask: AttentionMask | None = None

    @property
    def has_own_keys(self) -> bool:
        """True if the queries' own keys are among the keys: the first piece of these queries."""
        return self.is_causal or self.mask is not None

    def cut(self) -> Iterator[_Piece]:
        """Yield a piece of many keys in pieces of few, so that few gradients are held at once."""
        if self.has_own_keys:
            yield self
            return
        for first in range(0, len(self.keys), MANY):
            yield _Piece(self.samples, self.rows, self.keys[first : first + MANY])

    def among(self, key_places: tuple[range, ...]) -> Iterator[_Piece]:
        """Yield the keys of the piece that have some places, by their rows in tensors of the keys at these places."""
        first_row = 0
        for run in key_places:
            places = range(max(self.keys.start, run.start), min(self.keys.stop, run.stop))
            if places:
                mask = self.mask
                if mask is not None:
                    mask = replace(mask, key_places=(_moved(places, -self.keys.start),))
                yield replace(self, keys=_moved(places, first_row - run.start), mask=mask)
            first_row += len(run)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the queries' `[b, n, s, d]` of `[Q, B, n, d]`."""
        return x[self.rows.start : self.rows.stop, self.samples].permute(1, 2, 0, 3)

    def of_sums(self, x: Tensor) -> Tensor:
        """Return the queries' `[b, n, s]` of `[B, Q, n]`."""
        return x[self.samples, self.rows.start : self.rows.stop].transpose(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the keys' `[b, m, s, d]` of `[L, B, m, d]`."""
        return x[self.keys.start : self.keys.stop, self.samples].permute(1, 2, 0, 3)

    def dense(self, like: Tensor) -> Tensor | None:
        """Return the mask in the form that torch's kernel takes."""
        return None if self.mask is None else self.mask.dense(len(self.keys), like.dtype, like.device)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Return the queries' output `[b, n, s, d]` over these keys, and the log-sum-exps `[b, n, s]`."""
        query, key, value = self.of_queries(q), self.of_keys(k), self.of_keys(v)
        dense = self.dense(q)
        out, log_sums = cpu_attention(query, key, value, dense, scale, causal=self.is_causal)
        if dense is not None and self.mask is not None and self.mask.key_places is not None:
            # Of a query that sees none of the keys, torch's kernel returns 0.
            log_sums = log_sums.masked_fill(dense.isneginf().all(-1), float("-inf"))
        return out, log_sums

    def gradients(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums_BQn: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the piece's terms in the gradients of q, k and v."""
        dy, q, out = self.of_queries(dy), self.of_queries(q), self.of_queries(out)
        log_sums = self.of_sums(log_sums_BQn)
        mask = self.dense(q)
        key, value = self.of_keys(k), self.of_keys(v)
        return cpu_attention_gradients(dy, q, key, value, out, log_sums, mask, scale, causal=self.is_causal)


def _pieces(mask: PiecesMask) -> Iterator[_Piece]:
    """Yield the pieces of all queries; of those with the same queries, the one that has the queries' own keys first."""
    pieces = _pieces_of_all_keys(mask.starts_SB, mask.ends, mask.window)
    if mask.key_places is None:
        yield from pieces
        return
    for piece in pieces:
        yield from piece.among(mask.key_places)


def _pieces_of_all_keys(starts_SB: Tensor | None, ends: Tensor, window: int | None) -> Iterator[_Piece]:
    runs = [range(first, end) for first, end in ends.view(-1, 2).tolist()]
    row = 0
    for run in runs:
        for samples, places, start in _documents(starts_SB, row, run):
            # Rows of the queries are their places, moved by `offset`.
            offset = row - run.start
            if window is not None and places.stop - start > window:
                yield from _with_window(samples, places, start, offset, window)
                continue
            if start == places.start and len(runs) == 1:
                # One call is not slower than that of a document alone, whose bits it has.
                yield _Piece(samples, _moved(places, offset), places, is_causal=True)
                continue
            for queries in _cut(places, FEW):
                yield from _squares(samples, queries, offset)
                if start < queries.start:
                    yield _Piece(samples, _moved(queries, offset), range(start, queries.start))
        row += len(run)


def _documents(starts_SB: Tensor | None, row: int, run: range) -> Iterator[tuple[slice, range, int]]:
    """Yield the samples and places of each document's queries in a run from `row` on, and its first place."""
    if starts_SB is None:
        yield slice(None), run, 0
        return
    starts_SB = starts_SB[row : row + len(run)]
    by_sample = [(slice(b, b + 1), starts_S) for b, starts_S in enumerate(starts_SB.unbind(1))]
    if torch.equal(starts_SB, starts_SB[:, :1].expand_as(starts_SB)):
        by_sample = [(slice(None), starts_SB[:, 0])]
    for samples, starts_S in by_sample:
        # All tokens of a document have one start, and those of the next one another.
        starts, lengths = torch.unique_consecutive(starts_S, return_counts=True)
        bounds = [0, *lengths.cumsum(0).tolist()]
        for start, (first, end) in zip(starts.tolist(), pairwise(bounds), strict=True):
            yield samples, run[first:end], start


def _squares(samples: slice, queries: range, offset: int) -> Iterator[_Piece]:
    if len(queries) <= SQUARE:
        yield _Piece(samples, _moved(queries, offset), queries, is_causal=True)
        return
    half = -(-len(queries) // (2 * SQUARE)) * SQUARE
    before, after = queries[:half], queries[half:]
    yield from _squares(samples, before, offset)
    yield from _squares(samples, after, offset)
    yield _Piece(samples, _moved(after, offset), before)


def _with_window(samples: slice, places: range, start: int, offset: int, window: int) -> Iterator[_Piece]:
    for queries in _cut(places, SHORT):
        keys = range(max(start, queries.start - window + 1), queries.stop)
        mask = AttentionMask((_moved(queries, -keys.start),), window=window)
        yield _Piece(samples, _moved(queries, offset), keys, mask=mask)


def _cut(places: range, size: int) -> Iterator[range]:
    for first in range(0, len(places), size):
        yield places[first : first + size]


def _moved(places: range, offset: int) -> range:
    return range(places.start + offset, places.stop + offset)


def _merge(out: Tensor, log_sums: Tensor, out_of_piece: Tensor, log_sums_of_piece: Tensor, is_first: bool) -> None:
    """Write the output and the log-sum-exps over the keys of a piece and of those before it."""
    if is_first:
        out.copy_(out_of_piece)
        log_sums.copy_(log_sums_of_piece)
        return
    # Finite also where no key of the earlier pieces is seen.
    finite = log_sums.clamp_min(torch.finfo(log_sums.dtype).min)
    share = in_vectors(torch.sigmoid, log_sums_of_piece - finite)
    out.lerp_(out_of_piece.to(out.dtype), share.unsqueeze(-1))
    log_sums.copy_(in_vectors(torch.logaddexp, log_sums, log_sums_of_piece))


def _by_sample(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty `[S, B, …]` like x in which a sample's numbers follow one another, as torch's kernel has them."""
    length, samples, *widths = x.shape
    return x.new_empty((samples, length, *widths), dtype=dtype).transpose(0, 1)


def _sum_dtype(q: Tensor) -> torch.dtype:
    # torch's CPU kernel sums narrower dtypes in float32.
    return torch.float64 if q.dtype == torch.float64 else torch.float32
