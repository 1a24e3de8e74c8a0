"""The output head of a language model, cut along the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from shardwise import comm, placement
from shardwise._torch_private import call_forward_pre_hooks
from shardwise.parallel.arguments import sharing_group
from shardwise.parallel.linear import DEFAULT_INIT, LayerOptions, full_name, tensor_options
from shardwise.parallel.loss import IGNORE_INDEX, chunk_losses, linear_cross_entropy
from shardwise.parallel.matmul import linear
from shardwise.placement import Init
from shardwise.plan.chunks import loss_chunk_elements
from shardwise.plan.chunks import vocabulary_rows


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
        enter = comm.gather_sequence if self.sequence_parallel_enabled else comm.copy_to_group
        local = linear(enter(x, self.group), self.weight, self.bias)
        return comm.gather_last(local, self.group)[..., : self.vocab_size]

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
        by_rank = comm.all_gather(torch.cat(largest).unsqueeze(0), self.group)
        ids_by_rank = comm.all_gather(torch.cat(ids).unsqueeze(0), self.group)
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
