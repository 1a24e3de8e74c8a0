"""Token embedding and output head, both cut along the vocabulary (Megatron-LM, arXiv:1909.08053 §3).

Shapes per rank, g = group size: S sequence, B batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import calling_hooks, has_data
from shardwise.layers.bitwise import choose_class
from shardwise.layers.chunks import loss_chunk_elements, vocabulary_rows
from shardwise.layers.execution import execution
from shardwise.layers.linear import LayerOptions, ParameterMaker
from shardwise.layers.loss import IGNORE_INDEX, VocabularyShard, chunk_losses, summed_losses
from shardwise.layers.matmul import linear


class ParallelEmbedding(placement.PlacedModule):
    """An embedding table cut by rows over a group: rank r holds `ceil(V/g)` rows, the last rank's padded with zeros.

    Forward: ids `[S, B]`, equal on every rank → `[S, B, H]`, or `[S/g, B, H]` with `sequence_parallel_enabled`. Each
    rank looks up the ids that it holds and gives 0 for the others; the sum over the group is exact. Communicates an
    all-reduce, or with sequence parallelism a reduce-scatter (its gradient: an all-gather). Padding rows receive no
    gradient.

    Args:
        num_embeddings: V, rows of the whole table.
        embedding_dim: H.
        padding_idx: id whose row receives no gradient; one below 0 counts from the end, as in `torch.nn.Embedding`.
        row_multiple: number to a multiple of which a rank's rows are rounded up.
        sequence_parallel_enabled: true if the sequence is cut over the group between layers.
        name: canonical name of the layer, without `.weight`.
        options: see `LayerOptions`.

    Attributes:
        context_group: the ranks that share each sample in training; None: each rank has whole ones.
        shares_samples: as in `models/causal.py`.
    """

    context_group: Group | None = None
    shares_samples: bool = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sequence_parallel_enabled: bool = False,
        row_multiple: int = 1,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        maker = ParameterMaker(self, options)
        self.group = maker.group
        self.context_group = execution().context_group
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx ({padding_idx}) must be in [-{num_embeddings}, {num_embeddings})")
        self.num_embeddings = num_embeddings
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.sequence_parallel_enabled = sequence_parallel_enabled
        rows = vocabulary_rows(num_embeddings, maker.group.size, maker.group.parts * row_multiple)
        shape = (num_embeddings, embedding_dim)
        piece = placement.Piece.rows(maker.name(name, "weight"), shape, maker.group, maker.init, per_rank=rows)
        self.weight = maker.parameter((rows, embedding_dim), piece)
        choose_class(self)

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        self._check(ids)
        local_rows = self.weight.shape[0]
        first = self.group.rank * local_rows
        local_ids = ids - first
        is_elsewhere = (local_ids < 0) | (local_ids >= local_rows)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + local_rows:
            padding = self.padding_idx - first
        rows = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight, padding)
        # Exactly one rank has another value than 0 for each id, so that the sum rounds nothing.
        rows = rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return collectives.scatter_or_reduce(rows, self.group, sequence_parallel=self.sequence_parallel_enabled)

    def _check(self, ids: Tensor) -> None:
        """Refuse ids that no rank holds, as `F.embedding` does."""
        # On a CPU only: reading ids from an accelerator would stall it.
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or not (ids.numel() and has_data(ids)):
            return
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= self.num_embeddings:
            raise IndexError(f"id ({low if low < 0 else high}) must be in [0, {self.num_embeddings})")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} rows, weight={tuple(self.weight.shape)} of {self.group}"


class ReplicatedEmbedding(placement.PlacedModule):
    """A small embedding table, whole on every rank: positions, token types.

    Forward: the indices of the whole sequence, equal on all ranks, `[S, …]` → `[S, …, H]`, as in `torch.nn.Embedding`.
    With `sequence_parallel_enabled` the layer takes this rank's part of the indices and returns `[S/g, …, H]`; the
    gradient of the table is then partial over the group, which its placement says. No communication.

    Args:
        num_embeddings, embedding_dim, sequence_parallel_enabled, name, options: as in `ParallelEmbedding`.

    Attributes:
        context_group, shares_samples: as in `ParallelEmbedding`.
    """

    context_group: Group | None = None
    shares_samples: bool = True

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
        maker = ParameterMaker(self, options, warns=sequence_parallel_enabled)
        self.group = maker.group
        self.context_group = execution().context_group
        self.sequence_parallel_enabled = sequence_parallel_enabled
        shape = (num_embeddings, embedding_dim)
        piece = placement.Piece.replicated(
            maker.name(name, "weight"), shape, maker.group, maker.init, partial=sequence_parallel_enabled
        )
        self.weight = maker.parameter(shape, piece)
        choose_class(self)

    def forward(self, ids: Tensor) -> Tensor:
        """ids `[S, …]`, equal on every rank → `[S, …, H]`, or this rank's `[S/g, …, H]` with sequence parallelism."""
        return F.embedding(self._local(ids), self.weight)

    def _local(self, ids: Tensor) -> Tensor:
        """Return the part of the ids whose rows this rank returns."""
        # Ids have no gradient, so this is a slice, and no rank sends anything.
        return collectives.split_sequence(ids, self.group) if self.sequence_parallel_enabled else ids

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, sequence_parallel={self.sequence_parallel_enabled}"


class ParallelLMHead(placement.PlacedModule):
    """`logits = x Wᵀ + b` with W `[V, H]` cut along the vocabulary: rank r holds `ceil(V/g)` rows, the last padded.

    The cut is that of arXiv:1909.08053 §3. Forward: x `[S, B, H]`, or `[S/g, B, H]` with `sequence_parallel_enabled` →
    the logits of the whole vocabulary on each rank, `[S, B, V]`. `loss` needs less memory.

    Args:
        hidden_size: H.
        vocab_size: V.
        tied_weight: local weight of the embedding, which has the same rows; None: the head makes a weight.
        bias_name: full canonical name of the bias, such as `cls.predictions.bias`; None: the head has no bias.
        row_multiple, sequence_parallel_enabled, name, options: as in `ParallelEmbedding`.

    Attributes:
        chunk_losses: function that `linear_cross_entropy` takes as `losses`.
        own_loss: function of the user's that returns the sum of the losses of whole logits `[S, B, V]` and targets
            `[S, B]`; None: the cross-entropy.
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
        maker = ParameterMaker(self, options)
        self.group = group = maker.group
        self.vocab_size = vocab_size
        made_with = execution()
        self.chunk_losses = chunk_losses if made_with.compiler is None else made_with.compiler.losses()
        self.own_loss = made_with.loss
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.is_tied = tied_weight is not None
        # A tied weight keeps the embedding's record: a checkpoint then has one tensor for both.
        if tied_weight is not None:
            rows = tied_weight.shape[0]
            self.weight = tied_weight
        else:
            rows = vocabulary_rows(vocab_size, group.size, group.parts * row_multiple)
            shape = (vocab_size, hidden_size)
            piece = placement.Piece.rows(maker.name(name, "weight"), shape, group, maker.init, per_rank=rows)
            self.weight = maker.parameter((rows, hidden_size), piece)
        self.bias = None
        if bias_name is not None:
            piece = placement.Piece.rows(bias_name, (vocab_size,), group, placement.Init.constant(0.0), per_rank=rows)
            self.bias = maker.parameter((rows,), piece)
        self._shard = VocabularyShard.make(group, rows, vocab_size, IGNORE_INDEX, 0.0)
        choose_class(self)

    def forward(self, x: Tensor) -> Tensor:
        """x `[S, B, H]` (`[S/g, B, H]` with sequence parallelism) → logits `[S, B, V]` on every rank."""
        entered = collectives.gather_or_copy(x, self.group, sequence_parallel=self.sequence_parallel_enabled)
        # The last ranks' rows end with padding, which comes last in the gathered logits.
        return collectives.gather_last(self._multiply(entered), self.group)[..., : self.vocab_size]

    @property
    def _used_weight(self) -> Tensor:
        return self.weight

    def _multiply(self, x: Tensor) -> Tensor:
        """x `[…, H]`, whole on every rank → this rank's logits `[…, v]`."""
        return linear(x, self.weight, self.bias)

    @torch.no_grad()
    def likeliest(self, x: Tensor) -> Tensor:
        """x `[…, H]`, whole on every rank → the id of the largest logit of each row `[…]`, chunk by chunk.

        Communicates the ranks' largest logits and their ids, not the logits.
        """
        largest = [logits.max(dim=-1) for logits in self._chunks_of_logits(x.flatten(0, -2))]
        return self._ids_of_largest(largest).view(x.shape[:-1])

    @torch.no_grad()
    def scores(self, x_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Score targets, chunk by chunk; communicates a few numbers of each row, not the logits.

        Args:
            x_NH: last hidden states `[N, H]`, whole on every rank.
            targets_N: token ids `[N]`, equal on every rank.

        Returns:
            The logarithm of each target's probability, float32 `[N]`, and the ids of the largest logits `[N]`.
        """
        losses = []
        largest = []
        first = 0
        for logits in self._chunks_of_logits(x_NH):
            largest.append(logits.max(dim=-1))
            loss, *_ = self._shard.softmax_(logits, targets_N[first : first + len(logits)])
            losses.append(loss)
            first += len(logits)
        return -torch.cat(losses), self._ids_of_largest(largest)

    def _chunks_of_logits(self, x_NH: Tensor) -> Iterator[Tensor]:
        """Yield float32 logits `[rows, v]` of this rank's columns; those of padding are minus infinity."""
        rows = self._chunk_width
        chunk_rows = max(1, loss_chunk_elements(rows, x_NH.device.type != "cpu") // rows)
        # As in `loss`, hooks that wait for gathered parameters must run although the module is not called.
        with calling_hooks(self):
            for chunk in x_NH.split(chunk_rows):
                logits = self._multiply(chunk).float()
                # Those of padding are 0, and may be the largest.
                logits[:, self._shard.columns :] = float("-inf")
                yield logits

    @property
    def _chunk_width(self) -> int:
        return self.weight.shape[0]

    def _ids_of_largest(self, largest: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the id of the largest logit of all ranks, from the values and local columns of each rank's largest."""
        values = torch.cat([value for value, _ in largest])
        ids = torch.cat([column for _, column in largest]) + self._shard.first
        # argmax takes the first of ranks that tie, as one rank would take the lowest id.
        by_rank = collectives.all_gather(values.unsqueeze(0), self.group)
        ids_by_rank = collectives.all_gather(ids.unsqueeze(0), self.group)
        return ids_by_rank.gather(0, by_rank.argmax(dim=0, keepdim=True))[0]

    def loss(
        self,
        x: Tensor,
        targets_SB: Tensor,
        *,
        ignore_index: int = IGNORE_INDEX,
        context_group: Group | None = None,
    ) -> Tensor:
        """Return the sum of the tokens' cross-entropies, computed chunk by chunk: a float32 scalar.

        Args:
            x: input of the forward pass.
            targets_SB: `[S, B]`, whole on every rank.
            ignore_index: value of targets that have loss 0 and gradient 0.
            context_group: the ranks that share each sample, which bit-equal sums follow; the loss is that of this
                rank's tokens.
        """
        if self.own_loss is not None:
            return self.own_loss(self(x).float(), targets_SB)
        # Hooks that wait for gathered parameters run when a module is called, and this is no call. The backward pass
        # needs no weight: the gradients are computed already.
        with calling_hooks(self):
            return self._loss(x, targets_SB, ignore_index, context_group)

    def _loss(self, x: Tensor, targets_SB: Tensor, ignore_index: int, context_group: Group | None) -> Tensor:
        shard = self._shard if ignore_index == IGNORE_INDEX else replace(self._shard, ignore_index=ignore_index)
        is_cut = self.sequence_parallel_enabled
        return summed_losses(x, self._used_weight, targets_SB, shard, is_cut, self.bias, losses=self.chunk_losses)


def add_head_leaf(parameter: nn.Parameter) -> Tensor:
    """Give the weight of an embedding layer a leaf with its own gradient, by which the output head uses it.

    Over a pipeline the embedding and the head are on two ranks, whose gradients are added once a step. With a leaf,
    they are added in the same order where one rank has both.
    """
    leaf = parameter.detach().requires_grad_(parameter.requires_grad)
    cast(Any, parameter).head_leaf = leaf
    return leaf


def head_leaf(parameter: nn.Parameter) -> Tensor | None:
    """The leaf that `add_head_leaf` gave an embedding weight, on its present memory; None for any other parameter."""
    leaf: Tensor | None = getattr(parameter, "head_leaf", None)
    # The memory of a released parameter is not there, and has not moved.
    if leaf is not None and not getattr(parameter, "is_released", False):
        leaf.data = parameter.data
    return leaf
