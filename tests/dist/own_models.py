"""Models of a user's own, as the tests of training them need them."""

import torch
from torch import Tensor, nn


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


class Mean(Dropping):
    """Returns the mean, as most models do."""

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return super().forward(ids_SB, targets_SB) / targets_SB.numel()
