"""Models of a user's own that name their blocks."""

from torch import Tensor, nn

import shardwise as sw
from examples.own_model import plain, sharded

MODULES = ("embedding", "blocks", "norm", "head")

Plain = sw.pipelined(plain.Decoder, *MODULES)
Sharded = sw.pipelined(sharded.Decoder, *MODULES, batch_first=False)
Swapped = sw.pipelined(plain.Decoder, *MODULES, batch_first=False)


class _Drop(nn.Dropout):
    """`kept`: of each training forward, which elements stayed."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.scale = nn.Linear(16, 16)
        self.kept: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.new_ones(x.shape))
        if self.training:
            self.kept.append((y > 0).flatten().tolist())
        return self.scale(x * y)


class _Dropping(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, num_hidden_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(_Drop() for _ in range(num_hidden_layers))
        self.head = nn.Linear(hidden_size, vocab_size)


Dropping = sw.pipelined(_Dropping, "embedding", "blocks", "head")
