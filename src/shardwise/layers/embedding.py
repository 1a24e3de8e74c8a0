"""Token embedding cut along the vocabulary (Megatron-LM, arXiv:1909.08053 §3).

The output head of a language model, cut along the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.distributed import collectives, placement
from shardwise.distributed.placement import Init
from shardwise.distributed.torch_private import call_forward_pre_hooks, has_data
from shardwise.layers.arguments import by_name, sharing_group
from shardwise.layers.chunks import loss_chunk_elements, vocabulary_rows
from shardwise.layers.linear import DEFAULT_INIT, LayerOptions, full_name, tensor_options
from shardwise.layers.loss import IGNORE_INDEX, chunk_losses, linear_cross_entropy
from shardwise.layers.matmul import linear

_POSITIONAL = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""What torch's and neuronx-distributed's embeddings take after `padding_idx`."""


class ParallelEmbedding(placement.PlacedModule):
    """An embedding table cut by rows over a group: rank r holds `ceil(V/g)` rows, the last rank's padded with zeros.

    Forward: ids `[S, B]`, equal on every rank → `[S, B, H]`, or `[S/g, B, H]` with `sequence_parallel_enabled`. Each
    rank looks up the ids that it holds and gives 0 for the others; the sum over the group is exact. Communicates an
    all-reduce, or with sequence parallelism a reduce-scatter (its gradient: an all-gather). Padding rows receive no
    gradient.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        padding_idx: an id whose row receives no gradient; one below 0 counts from the end, as in `torch.nn.Embedding`.
        further: torch's next positional arguments, which must have torch's default values: `max_norm`, `norm_type`,
            `scale_grad_by_freq` and `sparse`.
        row_multiple: a rank's number of rows is rounded up to a multiple of this.
        sequence_parallel_enabled, name, options: as in the other layers, see `LayerOptions`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *further: Any,
        sequence_parallel_enabled: bool = False,
        row_multiple: int = 1,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        options = cast(LayerOptions, by_name(type(self).__name__, further, _POSITIONAL, options))
        where = tensor_options(self, options)
        self.group = group = sharing_group(type(self).__name__, options.get("group"))
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx ({padding_idx}) must be in [-{num_embeddings}, {num_embeddings})")
        self.num_embeddings = num_embeddings
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel_enabled = sequence_parallel_enabled
        seed, init = options.get("seed"), options.get("init", DEFAULT_INIT)
        shape, rows = (num_embeddings, embedding_dim), vocabulary_rows(num_embeddings, group.size, row_multiple)
        piece = placement.Piece.rows(full_name(name, "weight", seed), shape, group, init, per_rank=rows)
        self.weight = placement.make_parameter((rows, embedding_dim), (piece,), group, **where)

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        self._check(ids)
        held = self.weight.shape[0]
        first = self.group.rank * held
        local = ids - first
        elsewhere = (local < 0) | (local >= held)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + held:
            padding = self.padding_idx - first
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        leave = collectives.scatter_sum_sequence if self.sequence_parallel_enabled else collectives.reduce_from_group
        return leave(rows, self.group)

    def _check(self, ids: Tensor) -> None:
        """Refuse ids that no rank holds, as `F.embedding` does; on a CPU only, since reading them from an accelerator
        stalls it."""
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not (ids.numel() and has_data(ids)):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(f"id ({low if low < 0 else high}) must be in [0, {self.num_embeddings})")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} rows, weight={tuple(self.weight.shape)} of {self.group}"


class ReplicatedEmbedding(placement.PlacedModule):
    """A small embedding table, whole on every rank: positions, token types.

    With `sequence_parallel_enabled` each rank looks up its own part of the sequence: the table's gradient is then
    partial over the group, which its placement says. No communication. Indices `[…]` → `[…, H]`, as in
    `torch.nn.Embedding`.

    Args:
        num_embeddings, embedding_dim: rows of the table, and H.
        sequence_parallel_enabled, name, options: as in the other layers, see `LayerOptions`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        where, owner = tensor_options(self, options), type(self).__name__
        self.group = group = sharing_group(owner, options.get("group"), needed=sequence_parallel_enabled)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        seed, init = options.get("seed"), options.get("init", DEFAULT_INIT)
        shape = (num_embeddings, embedding_dim)
        piece = placement.Piece.replicated(
            full_name(name, "weight", seed), shape, group, init, partial=sequence_parallel_enabled
        )
        self.weight = placement.make_parameter(shape, (piece,), group, **where)

    def forward(self, ids: Tensor) -> Tensor:
        """ids `[S, …]`, equal on every rank → `[S, …, H]`, or this rank's `[S/g, …, H]` with sequence parallelism."""
        mine = collectives.split_sequence(ids, self.group) if self.sequence_parallel_enabled else ids
        return F.embedding(mine, self.weight)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, sequence_parallel={self.sequence_parallel_enabled}"


class ParallelLMHead(placement.PlacedModule):
    """`logits = x Wᵀ + b` with W `[V, H]` cut along the vocabulary: rank r holds `ceil(V/g)` rows, the last padded.

    The cut is that of arXiv:1909.08053 §3. Forward: x `[S, B, H]`, or `[S/g, B, H]` with `sequence_parallel_enabled`.

    Args:
        hidden_size: H.
        vocab_size: V.
        tied_weight: the embedding's local weight, which has the same rows, instead of a weight of its own.
        bias_name: whole canonical name of the bias, such as `cls.predictions.bias`; None: the head has none.
        row_multiple: a rank's number of rows is rounded up to a multiple of this.
        sequence_parallel_enabled, name, options: as in the other layers, see `LayerOptions`.

    Attributes:
        chunk_losses: what `linear_cross_entropy` takes as `losses`.
        own_loss: gives the sum of the losses of whole logits `[S, B, V]` and targets `[S, B]` instead; or None.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied_weight: nn.Parameter | None = None,
        bias_name: str | None = None,
        sequence_parallel_enabled: bool = False,
        row_multiple: int = 1,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        where = tensor_options(self, options)
        self.group = group = sharing_group(type(self).__name__, options.get("group"))
        self.vocab_size = vocab_size
        self.chunk_losses = chunk_losses
        self.own_loss: Callable[[Tensor, Tensor], Tensor] | None = None
        self.sequence_parallel_enabled = sequence_parallel_enabled
        seed, init = options.get("seed"), options.get("init", DEFAULT_INIT)
        if tied_weight is not None:
            rows, self.weight = tied_weight.shape[0], tied_weight
        else:
            shape, rows = (vocab_size, hidden_size), vocabulary_rows(vocab_size, group.size, row_multiple)
            piece = placement.Piece.rows(full_name(name, "weight", seed), shape, group, init, per_rank=rows)
            self.weight = placement.make_parameter((rows, hidden_size), (piece,), group, **where)
        self.bias = None
        if bias_name is not None:
            piece = placement.Piece.rows(bias_name, (vocab_size,), group, Init.constant(0.0), per_rank=rows)
            self.bias = placement.make_parameter((rows,), (piece,), group, **where)

    def forward(self, x: Tensor) -> Tensor:
        """x `[S, B, H]` (`[S/g, B, H]` with sequence parallelism) → logits `[S, B, V]` on every rank."""
        enter = collectives.gather_sequence if self.sequence_parallel_enabled else collectives.copy_to_group
        local = linear(enter(x, self.group), self.weight, self.bias)
        return collectives.gather_last(local, self.group)[..., : self.vocab_size]

    @torch.no_grad()
    def likeliest(self, x: Tensor) -> Tensor:
        """x `[…, H]`, whole on every rank → the id of the largest logit of each row `[…]`, chunk by chunk.

        Communicates the ranks' largest logits and their ids, not the logits.
        """
        call_forward_pre_hooks(self)
        local_rows = self.weight.shape[0]
        first = self.group.rank * local_rows
        held = max(0, min(local_rows, self.vocab_size - first))
        rows = x.flatten(0, -2)
        largest, ids = [], []
        for chunk in rows.split(max(1, loss_chunk_elements(local_rows, x.device.type != "cpu") // local_rows)):
            logits = linear(chunk, self.weight, self.bias).float()
            logits[:, held:] = float("-inf")
            value, index = logits.max(dim=-1)
            largest.append(value)
            ids.append(index + first)
        # Of ranks that tie the first wins, as it would on one rank.
        by_rank = collectives.all_gather(torch.cat(largest).unsqueeze(0), self.group)
        ids_by_rank = collectives.all_gather(torch.cat(ids).unsqueeze(0), self.group)
        return ids_by_rank.gather(0, by_rank.argmax(dim=0, keepdim=True))[0].view(x.shape[:-1])

    def loss(self, x: Tensor, targets_SB: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Sum of the tokens' cross-entropies, chunk by chunk, a float32 scalar.

        Args:
            x: as in the forward pass.
            targets_SB: `[S, B]`, whole on every rank.
            ignore_index: targets that have loss 0 and gradient 0.
        """
        if self.own_loss is not None:
            return self.own_loss(self(x).float(), targets_SB)
        call_forward_pre_hooks(self)
        return linear_cross_entropy(
            x,
            self.weight,
            targets_SB,
            group=self.group,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            ignore_index=ignore_index,
            vocab_size=self.vocab_size,
            bias=self.bias,
            losses=self.chunk_losses,
        )
