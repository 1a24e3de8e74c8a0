"""A small model with every kind of parameter, and a loop that trains it, alone or beside an equal one."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise import ZeroRedundancyOptimizer

PLAIN = {"grad_clipping": False}


class Net(nn.Module):
    """A bit of everything: tied, 0-dim, non-contiguous, frozen, empty and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(7, 6).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.frozen
        x = x + self.second(torch.tanh(self.first(x))) * self.scale
        x = x + (x @ self.turned) @ self.turned.t()
        loss: Tensor = nn.functional.cross_entropy(self.head(x), (ids + 1) % 11)
        return loss


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(model: nn.Module, wrapped: type = torch.optim.AdamW, /, **options: Any) -> ZeroRedundancyOptimizer:
    """The optimizer that shares out, around a class."""
    return ZeroRedundancyOptimizer(model.parameters(), wrapped, **options)


class Pair:
    """A model with a class of torch, and an equal one with that class in the optimizer that shares out."""

    def __init__(self, wrapped: type = torch.optim.AdamW, wrapping: dict[str, Any] = PLAIN, **options: Any) -> None:
        self.plain, self.ours = make(), make()
        self.reference = wrapped(self.plain.parameters(), **options)
        self.optimizer = sharded(self.ours, wrapped, **wrapping, **options)
        self.both = ((self.plain, self.reference), (self.ours, self.optimizer))

    def backward(self, step: int) -> None:
        for model, _ in self.both:
            model(batch(step)).backward()

    def step(self) -> None:
        self.reference.step()
        self.reference.zero_grad()
        self.optimizer.step()

    def assert_equal(self) -> None:
        assert_equal(self.ours, self.plain)

    def assert_close(self, rtol: float = 2e-6, atol: float = 1e-7) -> None:
        torch.testing.assert_close([*self.ours.parameters()], [*self.plain.parameters()], rtol=rtol, atol=atol)


def decaying_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay and have trust ratios; vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    return [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() != 2], "weight_decay": 0.0},
    ]


def batch(step: int) -> Tensor:
    return torch.randint(0, 11, (9,), generator=torch.Generator().manual_seed(step))


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int = 5, start: int = 0, *schedulers: Any) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def set_to_none(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def nothing(model: nn.Module) -> None:
    pass
