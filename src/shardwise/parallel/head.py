"""The output head of a language model, cut along the vocabulary."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from shardwise import comm, placement
from shardwise.mesh import Group
from shardwise.parallel.linear import DEFAULT_INIT, LayerOptions, full_name, tensor_options
from shardwise.parallel.loss import IGNORE_INDEX, linear_cross_entropy
from shardwise.parallel.matmul import linear
from shardwise.placement import Init


class ParallelLMHead(placement.PlacedModule):
    """`logits = x Wᵀ + b` with W `[V, H]` cut along the vocabulary: rank r holds `ceil(V/g)` rows, the last padded.

    `tied_weight`: the embedding's local weight, which has the same rows, instead of a weight of its own. `bias_name`:
    canonical name of the bias (whole, such as `cls.predictions.bias`); None: the head has none.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied_weight: nn.Parameter | None = None,
        bias_name: str | None = None,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.group = group = Group.of(options.get("group"))
        self.vocab_size = vocab_size
        self.sequence_parallel_enabled = sequence_parallel_enabled
        seed, init, where = options.get("seed"), options.get("init", DEFAULT_INIT), tensor_options(options)
        rows = -(-vocab_size // group.size)
        if tied_weight is not None:
            self.weight = tied_weight
        else:
            piece = placement.rows(full_name(name, "weight", seed), (vocab_size, hidden_size), group, init)
            self.weight = placement.make_parameter((rows, hidden_size), (piece,), group, **where)
        self.bias = None
        if bias_name is not None:
            piece = placement.rows(bias_name, (vocab_size,), group, Init.constant(0.0))
            self.bias = placement.make_parameter((rows,), (piece,), group, **where)

    def forward(self, x: Tensor) -> Tensor:
        """x `[S, B, H]` (`[S/g, B, H]` with sequence parallelism) → logits `[S, B, V]` on every rank."""
        enter = comm.gather_sequence if self.sequence_parallel_enabled else comm.copy_to_group
        local = linear(enter(x, self.group), self.weight, self.bias)
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
            bias=self.bias,
        )
