"""Hooks as a user writes them, for the tests; some are wrong."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import Config


class Reader:
    """Rows that count by a stride; every fourth is shorter."""

    def __init__(self, config: Config, part: str) -> None:
        self.length, self.vocabulary = config.train.sequence_length, config.model.vocab_size
        self.count = 40 if part == "train" else 9

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        length = self.length + 1 - (number % 4 == 3) * 5
        return (np.arange(length) * (number % 3 + 1) + number) % self.vocabulary


def cross_entropy(logits_SBV: Tensor, targets_SB: Tensor) -> Tensor:
    """The family's own loss."""
    return F.cross_entropy(logits_SBV.flatten(0, 1), targets_SB.flatten(), ignore_index=-100, reduction="sum")


def mean_of_each(logits_SBV: Tensor, targets_SB: Tensor) -> Tensor:
    return logits_SBV.mean(dim=0)


def fails(logits_SBV: Tensor, targets_SB: Tensor) -> Tensor:
    raise ValueError("I have no heart")


class SignMomentum(torch.optim.Optimizer):
    """`p ← p - lr · (sign(m) + weight_decay · p)` with m the mean of gradients (Lion without its second mean)."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean.sign(), alpha=group["lr"])


class NestedState(SignMomentum):
    """Keeps several means in one entry, as pytorch_optimizer's AggMo and all of heavyball do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["means"] = {0.9: torch.zeros_like(p)}


class WithoutStep(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})


class Recorder:
    """Keeps the names of events in a list of its class."""

    heard: list[str] = []  # noqa: RUF012  the test reads it

    def __call__(self, event: dict[str, Any]) -> None:
        self.heard.append(event["event"])


def stop_at_2(event: dict[str, Any]) -> bool:
    return event["event"] == "step" and event["step"] == 2


def breaks(event: dict[str, Any]) -> None:
    if event["event"] == "step":
        raise KeyError("loss")
