"""Models of a user's own, as the tests of training them need them."""

import torch
from torch import Tensor, nn

import shardwise as sw


class Dropping(nn.Module):
    """Plain PyTorch with plain dropout. `kept`: of each training forward, which elements stayed."""

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocab_size)
        self.kept: list[list[bool]] = []

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        if self.training:
            self.kept.append((self.dropout(torch.ones(ids_SB.shape)) > 0).flatten().tolist())
        logits = self.head(self.dropout(self.embedding(ids_SB)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets_SB.flatten(), reduction="sum")


class NeedsKey(Dropping):
    """Its forward names the step's key without a default. `keys`: whether each call was given one."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.keys: list[bool] = []

    def forward(self, ids_SB: Tensor, targets_SB: Tensor, dropout: object) -> Tensor:  # type: ignore[override]
        self.keys.append(dropout is not None)
        return super().forward(ids_SB, targets_SB)


class Pairs(Dropping):
    """Returns logits and the loss, as many models do."""

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return self.head(self.embedding(ids_SB)), super().forward(ids_SB, targets_SB)  # type: ignore[return-value]


class Mean(Dropping):
    """Returns the mean, as most models do."""

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return super().forward(ids_SB, targets_SB) / targets_SB.numel()


class MeanOfTargets(Dropping):
    """Returns the mean over the targets that count, the default of torch's cross-entropy."""

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return super().forward(ids_SB, targets_SB) / (targets_SB != -100).sum()


class Summing(Dropping):
    """Each token sees the sum of itself and those before it along `axis`, which is right for axis 0."""

    def __init__(self, vocab_size: int, axis: int = 0) -> None:
        super().__init__(vocab_size)
        self.axis = axis

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        logits = self.head(self.dropout(self.embedding(ids_SB).cumsum(self.axis)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets_SB.flatten(), reduction="sum")


class Plain(nn.Module):
    """Plain PyTorch, with what a checkpoint may stumble over: a tied head, a scale without dims, a frozen table, no
    elements at all, and a buffer that the constructor makes again.
    """

    def __init__(self, vocab_size: int, width: int = 16, frozen: bool = True, rows: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Parameter(torch.randn(rows, width), requires_grad=not frozen)
        self.none = nn.Parameter(torch.empty(0, width))
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        hidden = self.embedding(ids_SB) * self.gain + self.table[ids_SB % len(self.table)] * self.factor
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets_SB.flatten(), reduction="sum")


class Sharded(nn.Module):
    """Our layers, and a frozen table that every rank has whole, without a placement."""

    def __init__(self, vocab_size: int, width: int = 16, group: sw.Group | None = None) -> None:
        super().__init__()
        self.embedding = sw.ParallelEmbedding(vocab_size, width, group=group)
        self.up = sw.ColumnParallelLinear(width, 2 * width, gather_output=False, group=group)
        self.down = sw.RowParallelLinear(2 * width, width, input_is_parallel=True, group=group)
        self.head = sw.ParallelLMHead(width, vocab_size, group=group)
        self.table = nn.Parameter(torch.linspace(-1, 1, 3 * width).view(3, width), requires_grad=False)

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        hidden = self.embedding(ids_SB) + self.table[ids_SB % 3]
        return self.head.loss(hidden + self.down(self.up(hidden).relu()), targets_SB)


class WholeNumbers(Dropping):
    """With a parameter that is no floating-point number."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)


class Mixed(nn.Module):
    """Torch's own modules around one sharded MLP: a tied head, a frozen projection, a norm.

    Without a seed of their own the layers of shardwise draw as torch's do, so ranks may begin with other weights.
    """

    def __init__(self, vocab_size: int = 33, width: int = 8, group: sw.Group | None = None) -> None:
        super().__init__()
        group = sw.Group.of(group)
        self.embedding = nn.Embedding(vocab_size, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.up = sw.ColumnParallelLinear(width, 2 * width, gather_output=False, group=group)
        self.down = sw.RowParallelLinear(2 * width, width, input_is_parallel=True, group=group)
        self.late = sw.RMSNorm(width, group=sw.Group())  # a layer of shardwise that shares nothing
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids_SB: Tensor) -> Tensor:
        x = self.frozen(self.embedding(ids_SB))
        x = x + self.down(self.up(self.norm(x)).relu())
        return nn.functional.cross_entropy(self.head(self.late(x)).flatten(0, 1), ids_SB.flatten())
