"""Cross-entropy over a vocabulary that is cut over a group (Megatron-LM, arXiv:1909.08053 §3).

Legend, per rank with g = group size: N tokens, V vocabulary, v = ceil(V/g) local rows, H hidden, S sequence, B batch.
With `m` the maximum and `Z = Σ exp(logit - m)` over the whole vocabulary, a token's loss with label smoothing ε is
`log Z - (1-ε)·(logit_target - m) - ε·mean(logit - m)`, and its gradient `softmax - (1-ε)·onehot - ε/V`.
Ranks exchange three numbers a token, never logits. Padding columns have probability 0 and gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Never, cast

import torch
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Ranks
from shardwise.distributed.torch_private import graph_is_kept, has_data
from shardwise.layers.arguments import refuse_unknown, sharing_group
from shardwise.layers.bitwise import bit_equal
from shardwise.layers.chunks import loss_chunk_elements
from shardwise.layers.matmul import (
    add_product_,
    adds_in_one_kernel,
    gradient_to_add_to,
    linear,
    weight_gradient_in_runs,
)

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's columns of the vocabulary, the way in which targets are counted, and the products and sums of a loss.

    Attributes:
        vocabulary: V.
        first: id of the first column; a tensor in a compiled graph, which serves all ranks.
        columns: number of columns that are no padding; a tensor in a compiled graph.
        ignore_index: value of targets that have loss 0 and gradient 0.
        smoothing: ε.
    """

    group: Group
    vocabulary: int
    first: int | Tensor
    columns: int | Tensor
    ignore_index: int
    smoothing: float

    @staticmethod
    def make(group: Group, width: int, vocabulary: int | None, ignore_index: int, smoothing: float) -> VocabularyShard:
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"label_smoothing ({smoothing}) must be in [0, 1]")
        if vocabulary is None:
            vocabulary = width * group.size
        first = group.rank * width
        columns = max(0, min(width, vocabulary - first))
        kind = VocabularyShard if group.grain is None else bit_equal(VocabularyShard)
        return kind(group, vocabulary, first, columns, ignore_index, smoothing)

    def in_tensors(self, device: torch.device) -> VocabularyShard:
        """Return the shard of a compiled graph, with tensors for the numbers in which ranks differ."""
        first = torch.full((), int(self.first), device=device)
        columns = torch.full((), int(self.columns), device=device)
        return replace(self, first=first, columns=columns)

    def check(self, target: Tensor) -> None:
        """Refuse targets outside of the vocabulary."""
        # On a CPU only: reading targets from an accelerator would stall it.
        if torch.compiler.is_compiling() or target.device.type != "cpu" or not (target.numel() and has_data(target)):
            return
        counted = target[target != self.ignore_index]
        if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < self.vocabulary):
            wrong = counted[(counted < 0) | (counted >= self.vocabulary)][0].item()
            raise ValueError(f"target ({wrong}) must be in [0, {self.vocabulary}) or the ignore_index")

    def softmax_(self, logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Turn float32 logits `[N, v]` into probabilities, in place.

        Returns:
            The loss `[N]`, 0 for ignored targets; the targets' local columns `[N]`; true for targets in this rank's
            columns `[N]`; true for targets that count `[N]`.
        """
        width = logits_NV.shape[1]
        # In a compiled graph, a slice that ends at a number of the rank would make another graph for each rank.
        if isinstance(self.columns, Tensor):
            if self.vocabulary < width * self.group.size:
                logits_NV.masked_fill_(torch.arange(width, device=logits_NV.device) >= self.columns, float("-inf"))
        elif self.columns < width:
            logits_NV[:, self.columns :] = float("-inf")
        # The maximum is subtracted before exp, which would overflow. It changes neither loss nor gradient.
        largest = collectives.all_reduce_(logits_NV.amax(dim=1), self.group, op="max")
        logits_NV.sub_(largest.unsqueeze(1))
        counted = target_N != self.ignore_index
        column = target_N - self.first
        is_local = counted & (column >= 0) & (column < self.columns)
        column = column.masked_fill(~is_local, 0)
        at_target = logits_NV.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~is_local, 0.0)
        # All sums over the vocabulary go into one collective.
        terms = [at_target]
        if self.smoothing:
            terms.append(self._row_sums(self._without_padding(logits_NV)))
        logits_NV.exp_()
        terms.append(self._row_sums(logits_NV))
        sums = collectives.all_reduce_(torch.stack(terms), self.group)
        at_target = sums[0]
        total = sums[-1]
        logits_NV.div_(total.unsqueeze(1))
        loss = total.log() - (1.0 - self.smoothing) * at_target
        if self.smoothing:
            loss = loss - self.smoothing / self.vocabulary * sums[1]
        return loss.masked_fill(~counted, 0.0), column, is_local, counted

    def _row_sums(self, x_NV: Tensor) -> Tensor:
        """Return the sums over this rank's columns, `[N]`."""
        return x_NV.sum(dim=1)

    def _without_padding(self, x_NV: Tensor) -> Tensor:
        return x_NV[:, : self.columns]

    def chunk_width(self, weight_vH: Tensor) -> int:
        """Return the columns of logits by which the size of a chunk is reckoned."""
        return weight_vH.shape[0]

    def sequence_parts(self, _x_SBH: Tensor, _is_cut: bool) -> int:
        """Return the parts of a rank's sequence of which each chunk has rows."""
        return 1

    def logits(self, x_NH: Tensor, weight_vH: Tensor, _trained: bool) -> Tensor:
        """Return the logits `[N, v]` of some tokens."""
        return linear(x_NH, weight_vH)

    def input_gradient(self, dlogits_Nv: Tensor, weight_vH: Tensor) -> Tensor:
        """Return this rank's term of the gradient by the tokens `[N, H]`."""
        return linear(dlogits_Nv, weight_vH.t())

    def add_weight_gradient_(self, dw_vH: Tensor, dlogits_Nv: Tensor, x_NH: Tensor) -> None:
        """Add the gradient of some tokens' losses by the head's weight."""
        if adds_in_one_kernel(dw_vH, dlogits_Nv):
            add_product_(dw_vH, dlogits_Nv.t(), x_NH)
        else:
            dw_vH.add_(weight_gradient_in_runs(dlogits_Nv, x_NH))

    def bias_gradient(self, dlogits_Nv: Tensor) -> Tensor:
        """Return the gradient of some tokens' losses by the head's bias `[v]`."""
        return dlogits_Nv.sum(0)

    def gradient_(self, softmax_NV: Tensor, column: Tensor, is_local: Tensor, weight_N: Tensor) -> Tensor:
        """Turn probabilities into the gradient of `Σ weight · loss` by the logits, in place."""
        softmax_NV.mul_(weight_N.unsqueeze(1))
        if self.smoothing:
            softmax_NV[:, : self.columns].sub_((self.smoothing / self.vocabulary * weight_N).unsqueeze(1))
        at_target = (self.smoothing - 1.0) * weight_N.masked_fill(~is_local, 0.0)
        return softmax_NV.scatter_add_(1, column.unsqueeze(1), at_target.unsqueeze(1))


def chunk_losses(
    logits_NV: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    shard: VocabularyShard,
    with_gradient: bool,
    with_bias_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the losses of some tokens `[N]`, and the gradients of their sum by their logits and by the bias.

    The gradient by the logits has their dtype, that by the bias is float32. Float32 logits are overwritten.
    """
    dtype = logits_NV.dtype
    # No caller keeps the logits, so that those of another dtype are freed here.
    logits_NV = logits_NV.float()
    if bias_V is not None:
        logits_NV.add_(bias_V)
    loss, column, is_local, counted = shard.softmax_(logits_NV, target_N)
    if not with_gradient:
        return loss, None, None
    gradient = shard.gradient_(logits_NV, column, is_local, counted.float())
    bias_gradient = shard.bias_gradient(gradient) if with_bias_gradient else None
    return loss, gradient.to(dtype), bias_gradient


class SampleLosses:
    """The losses of each sample that `linear_cross_entropy` computes within `record`.

    Attributes:
        sums: sum of the losses and number of the targets that count of each sample, `[2, B]`; None before a loss.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the losses that are computed in the body of the `with` statement."""
        _recorders.append(self)
        try:
            yield
        finally:
            _recorders.remove(self)

    def add(self, loss_N: Tensor, counted_N: Tensor, samples: int) -> None:
        """Add the losses of tokens, of which each sample has as many, and whether their targets count."""
        loss_NB = loss_N.view(-1, samples)
        counted_NB = counted_N.view(-1, samples)
        sums = torch.stack([loss_NB.sum(0), counted_NB.sum(0, dtype=loss_NB.dtype)])
        self.sums = sums if self.sums is None else self.sums + sums


_recorders: list[SampleLosses] = []


ChunkLosses = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


def _refuse_second_derivative(name: str) -> None:
    """Raise in a backward pass that builds a graph: the gradients come from saved numbers, and have no gradient."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name} has no second derivative: leave out create_graph=True, "
            "or use torch.nn.functional.cross_entropy on the whole logits"
        )


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabularyShard) -> Tensor:
        softmax = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
        loss, column, is_local, counted = shard.softmax_(softmax, target.reshape(-1))
        ctx.save_for_backward(softmax, column, is_local, counted)
        ctx.shard = shard
        ctx.shape = logits.shape
        ctx.dtype = logits.dtype
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_derivative("parallel_cross_entropy")
        softmax, column, is_local, counted = ctx.saved_tensors
        weight = grads[0].reshape(-1).float().masked_fill(~counted, 0.0)
        # A copy: another backward pass over a graph that is kept needs the probabilities.
        gradient = ctx.shard.gradient_(softmax.clone(), column, is_local, weight)
        return gradient.view(ctx.shape).to(ctx.dtype), None, None


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    group: Ranks | None = None,
    ignore_index: int = IGNORE_INDEX,
    vocab_size: int | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the loss of each token, in float32, from logits that are cut along the vocabulary (arXiv:1909.08053 §3).

    Args:
        vocab_parallel_logits: `[…, v]`, this rank's columns; left untouched.
        target: `[…]` global token ids, equal on all ranks of the group.
        label_smoothing: ε in [0, 1], spread over the whole vocabulary as `torch.nn.functional.cross_entropy` does.
        group: the ranks that share the vocabulary.
        ignore_index: value of targets that have loss 0 and gradient 0.
        vocab_size: V, if the last columns are padding (default: no column is).
        unknown: none; another name than these is an error that suggests the right one.

    Returns:
        `[…]`, equal on all ranks. Communicates two small all-reduces forward, nothing backward.

    Raises:
        ValueError: a target outside of the vocabulary (checked on a CPU); ε outside of [0, 1].
        RuntimeError: a backward pass with `create_graph=True`.
        ArgumentError: an argument that it does not take.
    """
    if unknown:
        refuse_unknown(parallel_cross_entropy, unknown)
    ranks = sharing_group("parallel_cross_entropy", group)
    shard = VocabularyShard.make(ranks, vocab_parallel_logits.shape[-1], vocab_size, ignore_index, label_smoothing)
    shard.check(target)
    loss = _ParallelCrossEntropy.apply(vocab_parallel_logits, target, shard)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and loss, chunk by chunk. The forward pass computes the gradients, while a chunk's probabilities exist.

    The argument `needed` is true for those of x, weight and bias that need a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weight_vH: Tensor,
        bias_v: Tensor | None,
        target_SB: Tensor,
        shard: VocabularyShard,
        sequence_parallel: bool,
        chunk_elements: int,
        needed: tuple[bool, bool, bool],
        losses: ChunkLosses,
    ) -> Tensor:
        group = shard.group
        is_cut = sequence_parallel and group.size > 1
        trained = any(needed)
        dx = torch.empty_like(x_SBH) if needed[0] else None
        # Each chunk adds to these sums: in bfloat16 the small terms of many chunks would be lost.
        dw = torch.zeros_like(weight_vH, dtype=torch.float32) if needed[1] else None
        db = torch.zeros_like(bias_v, dtype=torch.float32) if needed[2] and bias_v is not None else None
        has_db = db is not None
        # A chunk has the same rows of each part of the sequence, whatever rank holds which part.
        local_parts = shard.sequence_parts(x_SBH, is_cut)
        x_RSBH = x_SBH.unflatten(0, (local_parts, -1))
        dx_RSBH = None if dx is None else dx.unflatten(0, (local_parts, -1))
        # [parts, S/parts, B]: as the gathered chunk holds them one after the other.
        target_RSB = target_SB.view(local_parts * group.size if is_cut else local_parts, -1, target_SB.shape[-1])
        tokens_of_a_row = target_RSB.shape[0] * target_RSB.shape[2]
        step = max(1, chunk_elements // (shard.chunk_width(weight_vH) * tokens_of_a_row))
        total = torch.zeros((), dtype=torch.float32, device=x_SBH.device)
        for start in range(0, x_RSBH.shape[1], step):
            rows = slice(start, min(start + step, x_RSBH.shape[1]))
            chunk = collectives.all_gather(x_RSBH[:, rows], group) if is_cut else x_RSBH[:, rows]
            flat = chunk.reshape(-1, chunk.shape[-1])
            targets = target_RSB[:, rows].reshape(-1)
            # Neither named here nor in a starred tuple: `losses` frees the logits early where nobody else holds them.
            loss, dlogits, dbias = losses(
                shard.logits(flat, weight_vH, trained), bias_v, targets, shard, trained, has_db
            )
            # Not in place: torch 2.11, traced, would drop its gradient.
            total = total + loss.sum()
            for recorder in _recorders:
                recorder.add(loss, targets != shard.ignore_index, samples=target_SB.shape[-1])
            if dlogits is None:
                continue
            if db is not None and dbias is not None:
                db.add_(dbias)
            if dw is not None:
                shard.add_weight_gradient_(dw, dlogits, flat)
            if dx_RSBH is not None:
                dchunk = shard.input_gradient(dlogits, weight_vH).view(chunk.shape)
                dx_RSBH[:, rows] = collectives.reduce_scatter(dchunk, group) if is_cut else dchunk
                del dchunk
            # One chunk at a time: the next one's logits take their place.
            del dlogits
        if dx is not None and not is_cut:
            collectives.all_reduce_(dx, group)
        ctx.save_for_backward(dx, dw, db)
        if not torch.compiler.is_compiling():
            ctx.weight = weight_vH
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("linear_cross_entropy")
        # The saved gradients stay unscaled while another backward pass may ask for them: with another incoming
        # gradient, or for the weight's alone, as schedules with a split backward pass do. The last pass needs no copy.
        is_last = not torch.compiler.is_compiling() and not graph_is_kept()
        dx, dw, db = ctx.saved_tensors
        weight_gradient = None if torch.compiler.is_compiling() else gradient_to_add_to(ctx.weight)
        if dw is not None and weight_gradient is not None:
            weight_gradient.addcmul_(dw, grads[0])
            dw = None
        scaled: list[Tensor | None] = []
        for gradient in (dx, dw, db):
            if gradient is None:
                scaled.append(None)
            elif is_last:
                scaled.append(gradient.mul_(grads[0]))
            else:
                scaled.append(gradient * grads[0])
        return (*scaled, None, None, None, None, None, None)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: Ranks | None = None,
    sequence_parallel_enabled: bool = False,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    chunk_elements: int | None = None,
    losses: ChunkLosses = chunk_losses,
) -> Tensor:
    """Return the sum over tokens of `cross_entropy(x Wᵀ + b, target)`, without holding the logits of all tokens.

    Tokens go through in chunks: logits, loss and both gradients of a chunk are computed before the next chunk begins,
    so that beyond inputs and gradients one chunk of logits is held. With sequence parallelism each chunk of x is
    gathered by itself: the whole hidden states are never held. The weight's gradient is summed in float32 and stays
    live until the backward pass. A loss in chunks of tokens follows arXiv:2411.09009.

    Args:
        sequence_parallel_enabled: true if x is a rank's part of the sequence.
        x: `[S, B, H]`, or `[S/g, B, H]` with sequence parallelism.
        weight: `[v, H]`, this rank's rows of the head.
        bias: `[v]`, this rank's elements of the bias (default: none).
        target: `[S, B]`, whole on every rank.
        chunk_elements: logits held at once on this rank (default: 2²¹ on a CPU, 2²⁷ on an accelerator, and those of 256
            tokens at least).
        group, ignore_index, label_smoothing, vocab_size: as in `parallel_cross_entropy`.
        losses: `chunk_losses`, or a compiled form of it.

    Returns:
        A float32 scalar, equal on all ranks of the group. Communicates per chunk two small all-reduces; with sequence
        parallelism also an all-gather of x and a reduce-scatter of its gradient, else one all-reduce of x's gradient.

    Raises:
        ValueError: as `parallel_cross_entropy`.
        RuntimeError: a backward pass with `create_graph=True`.
    """
    ranks = sharing_group("linear_cross_entropy", group)
    shard = VocabularyShard.make(ranks, weight.shape[0], vocab_size, ignore_index, label_smoothing)
    return summed_losses(x, weight, target, shard, sequence_parallel_enabled, bias, chunk_elements, losses)


def summed_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabularyShard,
    sequence_parallel: bool,
    bias: Tensor | None,
    chunk_elements: int | None = None,
    losses: ChunkLosses = chunk_losses,
) -> Tensor:
    """Return what `linear_cross_entropy` does, for the columns of a shard."""
    if chunk_elements is None:
        chunk_elements = loss_chunk_elements(shard.chunk_width(weight), x.device.type != "cpu")
    shard.check(target)
    is_trained = torch.is_grad_enabled()
    needs_bias = bias is not None and bias.requires_grad
    needed = (is_trained and x.requires_grad, is_trained and weight.requires_grad, is_trained and needs_bias)
    result = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, target, shard, sequence_parallel, chunk_elements, needed, losses
    )
    return cast(Tensor, result)
