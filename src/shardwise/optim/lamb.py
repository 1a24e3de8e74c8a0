"""LAMB: Adam with a step of its own length for each tensor (You et al., arXiv:1904.00962).

It is exact under ZeRO-1 and tensor parallelism, as the norms are those of canonical tensors: see `LAMB.step_slices`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.optim.gradient_norms import ElementRun, chunk_elements, row_norms
from shardwise.optim.wrapped_class import ModelSlices, RoundedSlices, SliceOptimizer, gradient_of


class LAMB(SliceOptimizer):
    """Layer-wise adaptive moments for large batches (arXiv:1904.00962, algorithm 2, with φ the identity).

    For each tensor w with gradient g, at step t:

        m ← β₁ m + (1 − β₁) g
        v ← β₂ v + (1 − β₂) g²
        u = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε) + λ w
        w ← w − lr · (‖w‖ / ‖u‖) · u

    The trust ratio ‖w‖ / ‖u‖ is 1 where either norm is 0, and for parameter groups with `weight_decay` λ = 0: the
    authors' code leaves biases and normalisations out of decay and of adaptation by one list (`lamb_optimizer.py`:
    `exclude_from_layer_adaptation` is `exclude_from_weight_decay` unless given).

    Alone, each parameter is one tensor. Through `ZeroRedundancyOptimizer(params, LAMB, …)` the ratios are those of
    whole canonical tensors at any layout: Q, K and V of a fused weight have their own.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: β₁, β₂.
        eps: ε.
        weight_decay: λ.
        trust_clip: bound the trust ratios by 1.

    Raises:
        ValueError: an option is out of its range.
        RuntimeError: a gradient is sparse or complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        trust_clip: bool = False,
    ) -> None:
        problems = [
            f"{name} ({value}) must be at least 0"
            for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay))
            if not value >= 0
        ]
        if not all(0 <= beta < 1 for beta in betas):
            problems.append(f"betas ({list(betas)}) must lie in [0, 1)")
        if problems:
            raise ValueError("; ".join(problems))
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.trust_clip = trust_clip

    def step_tensors(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    u = self.direction(p, group, torch.empty_like(p))
                    if self._needs_whole_tensors(group):
                        norms = [torch.linalg.vector_norm(row_norms(t.detach().reshape(-1))) for t in (p, u)]
                        u.mul_(self.trust_ratio(*norms))
                    p.add_(u, alpha=-float(group["lr"]))

    @torch.no_grad()
    def step_slices(self, model: ModelSlices) -> None:
        """Update the slices of many tensors that this rank owns, as `model` has them; every rank of the model does so.

        Each slice's direction is written over its gradient, so that no further memory is needed. Then the squared
        norms of all T canonical tensors and of their directions are summed in one all-reduce of 2·T float32 numbers.
        """
        for group, buckets in zip(self.param_groups, model.groups, strict=True):
            for bucket in buckets:
                self.direction(bucket.master, group, gradient_of(bucket))
        adapted = self.whole_tensor_groups()
        ratios = self.trust_ratio(*model.norms.measure(adapted, ElementRun.master, _direction))
        for i, (group, buckets) in enumerate(zip(self.param_groups, model.groups, strict=True)):
            lr = float(group["lr"])
            if i in adapted:
                for number, run in model.norms.runs(i):
                    run.master().addcmul_(_direction(run), ratios[number], value=-lr)
            else:
                for bucket in buckets:
                    bucket.master.add_(gradient_of(bucket), alpha=-lr)

    @torch.no_grad()
    def step_rounded(self, model: ModelSlices, slices: RoundedSlices) -> None:
        """Update what has trust ratios in `model`, with stochastic rounding by `slices`.

        The norms of directions must be known before an element is updated. No memory could hold the directions in
        float32, so they are computed twice.
        """
        adapted = self.whole_tensor_groups()
        ratios = self.trust_ratio(
            *model.norms.measure(adapted, ElementRun.master, lambda run: slices.load_direction(run)[1])
        )
        for i in adapted:
            for number, run in model.norms.runs(i):
                for chunk in run.split(chunk_elements(run.bucket)):
                    masters, direction = slices.load_direction(chunk)
                    masters.sub_(direction.mul_(ratios[number]), alpha=float(self.param_groups[i]["lr"]))
                    slices.store(chunk)

    @staticmethod
    def _needs_whole_tensors(group: dict[str, Any]) -> bool:
        return bool(group["weight_decay"])

    def trust_ratio(self, weight_norm: Tensor, direction_norm: Tensor) -> Tensor:
        """Return `weight_norm` / `direction_norm`, ‖w‖ / ‖u‖, `[N]` of N tensors, and 1 where either is 0.

        With `trust_clip`, no ratio is above 1.
        """
        usable = (weight_norm > 0) & (direction_norm > 0)
        ratio = torch.where(usable, weight_norm / direction_norm, 1.0)
        return ratio.clamp(max=1.0) if self.trust_clip else ratio

    def direction(self, p: nn.Parameter, group: dict[str, Any], out: Tensor) -> Tensor:
        """Take the gradient of p `[…]`, of the parameter group `group`, into the moments, and write u to `out`."""
        gradient = self._gradient(p)
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        correction1, correction2 = (1 - beta ** state["step"].item() for beta in (beta1, beta2))
        m = state["exp_avg"]
        v = state["exp_avg_sq"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # `out` may be the gradient's memory: from here on the gradient is no longer read.
        denominator = torch.sqrt(v, out=out).div_(correction2**0.5).add_(group["eps"])
        return torch.div(m, denominator, out=out).div_(correction1).add_(p, alpha=group["weight_decay"])


def _direction(run: ElementRun) -> Tensor:
    """Return the direction of some elements, once it has replaced their gradient."""
    return run.of(gradient_of(run.bucket))
