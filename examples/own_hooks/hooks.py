"""A reader of data, a loss, an optimizer and a callback of one's own, for hooks.yaml (docs/hooks.md)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Config


class Additions:
    """Samples such as `12+34=46`, as the ids of their bytes; a torch `Dataset` has the same two methods."""

    def __init__(self, config: Config, part: str) -> None:
        self.first = 0 if part == "train" else 9_000  # the evaluation part has other numbers
        self.count = 9_000 if part == "train" else 1_000

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> list[int]:
        a, b = divmod((self.first + number) * 7_919 % 10_000, 100)
        return list(f"{a:02d}+{b:02d}={a + b:03d}\n".encode())


def smoothed(logits_SBV: Tensor, targets_SB: Tensor) -> Tensor:
    """The sum of cross-entropies with label smoothing."""
    logits, targets = logits_SBV.flatten(0, 1), targets_SB.flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, label_smoothing=0.1, reduction="sum")


class Lion(torch.optim.Optimizer):
    """`p ← p - lr · (sign(β₁·m + (1-β₁)·g) + weight_decay · p)`, with m the mean of gradients (arXiv:2302.06675)."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["mean"] = torch.zeros_like(p)
                mean = self.state[p]["mean"]
                direction = mean.lerp(p.grad, 1 - first).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                mean.lerp_(p.grad, 1 - second)


class StopWhenLearned:
    """Asks the run to stop once an evaluation is good enough."""

    def __call__(self, event: dict[str, Any]) -> bool:
        return event["event"] == "eval" and event["loss"] < 1.0
