"""The output head of a language model, cut along the vocabulary."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from shardwise import comm, placement
from shardwise.mesh import Group
from shardwise.parallel.linear import DEFAULT_INIT, LayerOptions, full_name, tensor_options
from shardwise.parallel.loss import IGNORE_INDEX, linear_cross_entropy
from shardwise.parallel.matmul import linear


class ParallelLMHead(placement.PlacedModule):
    """`logits = x Wᵀ` with W `[V, H]` cut along the vocabulary: rank r holds `ceil(V/g)` rows, the last ones padded.

    `tied_weight`: the embedding's local weight, which has the same rows, instead of a weight of its own.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied_weight: nn.Parameter | None = None,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.group = group = Group.of(options.get("group"))
        self.vocab_size = vocab_size
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if tied_weight is not None:
            self.weight = tied_weight
            return
        seed, init = options.get("seed"), options.get("init", DEFAULT_INIT)
        piece = placement.rows(full_name(name, "weight", seed), (vocab_size, hidden_size), group, init)
        self.weight = placement.make_parameter(
            (-(-vocab_size // group.size), hidden_size),
            (piece,),
            group,
            **tensor_options(options),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x `[S, B, H]` (`[S/g, B, H]` with sequence parallelism) → logits `[S, B, V]` on every rank."""
        enter = comm.gather_sequence if self.sequence_parallel_enabled else comm.copy_to_group
        local = linear(enter(x, self.group), self.weight)
        return comm.gather_last(local, self.group)[..., : self.vocab_size]

    def loss(self, x: Tensor, targets_SB: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """Sum of the tokens' cross-entropies, chunk by chunk. Targets are whole on every rank."""
        return linear_cross_entropy(
            x,
            self.weight,
            targets_SB,
            group=self.group,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            ignore_index=ignore_index,
            vocab_size=self.vocab_size,
        )
