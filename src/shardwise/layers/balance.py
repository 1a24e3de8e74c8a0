"""Objectives that keep the loads of experts equal, defined on the global batch alone.

Shapes per rank: T tokens, B samples of a micro-batch, N experts, k experts a token. Of the global batch: M tokens in
samples of S tokens, and L layers with experts. All tokens count, also those without a target. A token's scores are
divided by their sum, so that they are shares of 1; rows are choices, of which each token has k.

    sequence  mean over the samples of Σ_i f_i P_i, f_i = N / (k·S) · rows of expert i in the sample, P_i = mean share
              of i over its tokens (DeepSeek-V3, arXiv:2412.19437 §2.1.2, eq. 17-20)
    batch     Σ_i f_i P_i, f_i = N / (k·M) · rows of i, P_i = mean share of i over all tokens (Switch loss,
              arXiv:2101.03961 eq. 4-6, with the rows of the global batch, arXiv:2501.11873)
    pooled    N · Σ_i f_i P_i, where the rows and shares of all layers are those of one: f_i = rows of i / (L·M), P_i =
              mean share over L·M (transformers' `load_balancing_loss_func`)
    z         mean over the tokens of logsumexp(logits)² (ST-MoE, arXiv:2202.08906 eq. 5)

The first two are 1 where loads are balanced, `pooled` is k. The loss gets coefficient · objective, of all but `pooled`
summed over the layers. Rows are whole numbers, and have no gradient. An objective's gradient does not depend on the
gradient of the loss: it is that of one term of the sum over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.config.routing import OBJECTIVES, Routing
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Coefficients of the objectives of routers, and the sizes of the global batch.

    Attributes:
        sequence, batch, pooled, z: coefficient of each objective; 0: it is not computed.
        samples: samples of the global batch.
        length: S, tokens of a sample.
        layers, experts: L, of the whole model, and N.
        replicas: the ranks that have other samples, or other tokens of them (`Mesh.replicas`).
        stages: the ranks of the pipeline.
        counts_first: true if `batch` uses the rows of a pass that only counts (`counted`), since a step has several
            micro-batches; false if those of a forward pass on all ranks are those of the global batch. `pooled` always
            uses such a pass.
        scaler: what scales the loss, and then the gradients of the objectives too; None: nothing does.
    """

    sequence: float = 0.0
    batch: float = 0.0
    pooled: float = 0.0
    z: float = 0.0
    samples: int
    length: int
    layers: int = 1
    experts: int = 0
    replicas: Group = field(default_factory=Group)
    stages: Group = field(default_factory=Group)
    counts_first: bool = False
    scaler: torch.amp.GradScaler | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The objectives that are computed."""
        return tuple(name for name in OBJECTIVES if getattr(self, name))

    def coefficient(self, name: str) -> float:
        """The factor of an objective's values, which are means over the layers, but for `pooled`."""
        factor: float = getattr(self, name)
        return factor if name == "pooled" else factor * self.layers

    @property
    def needs_counts(self) -> bool:
        """True if each step begins with a pass that only counts."""
        return bool(self.pooled or (self.batch and self.counts_first))


class RouterLosses(nn.Module):
    """The objectives of one layer's router.

    Attributes:
        rows: rows of each expert, `[N]`: within a pass that only counts those so far, afterwards those of the batch.
        rows_of_layers: likewise of all layers together.
        is_counting: true within that pass.
    """

    def __init__(self, balance: Balance, routing: Routing, context_group: Group) -> None:
        super().__init__()
        self.balance = balance
        self.routing = routing
        self.context_group = context_group
        self.rows: Tensor | None = None
        self.rows_of_layers: Tensor | None = None
        self.is_counting = False

    def forward(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, samples: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return a router's weights, and this rank's share of each of `OBJECTIVES`, [4].

        The weights are those given, in whose backward pass the objectives have their gradients. Of `sequence`, `batch`
        and `z` the values are shares of the mean over the layers. Without gradients there are no values. Communicates:
        for `sequence`, an all-reduce of `[B, N]` whole numbers over the context group; for `batch`, one of `[N]` over
        `Balance.replicas`, unless a pass has counted them.

        Args:
            weights: `[…, k]`.
            logits, scores: of this rank's tokens, `[T, N]`.
            experts: choices of the tokens of all tensor-parallel ranks, or with sequence parallelism `[g·T, k]`.
            samples: B. Of the tokens, every Bth is of the same sample.
        """
        balance = self.balance
        is_trained = self.training and torch.is_grad_enabled()
        if not (is_trained or self.is_counting):
            return weights, None
        chosen = experts.unflatten(0, (-1, samples)).transpose(0, 1).flatten(1)
        rows_BN = chosen.new_zeros(samples, logits.shape[-1]).scatter_add_(1, chosen, torch.ones_like(chosen))
        if self.is_counting:
            rows = rows_BN.sum(0)
            self.rows = rows if self.rows is None else self.rows + rows
        if not is_trained:
            return weights, None
        # Sigmoids of a token may all be 0 in float32.
        shares = scores if self.routing.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        shares_BN = shares.unflatten(0, (-1, samples)).sum(0)
        tokens = balance.samples * balance.length
        values = dict.fromkeys(OBJECTIVES, logits.new_zeros(()))
        normal = self.routing.experts / (self.routing.per_token * tokens * balance.layers)
        if balance.batch:
            rows_N = self._counted(self.rows) if balance.counts_first else rows_BN.sum(0)
            if not balance.counts_first:
                collectives.all_reduce_(rows_N, balance.replicas)
            values["batch"] = (shares_BN.sum(0) * rows_N).sum() * (normal / tokens)
        if balance.sequence:
            collectives.all_reduce_(rows_BN, self.context_group)
            values["sequence"] = (shares_BN * rows_BN).sum() * (normal / balance.length)
        if balance.pooled:
            pooled = (shares_BN.sum(0) * self._counted(self.rows_of_layers)).sum()
            values["pooled"] = pooled * (self.routing.experts / (balance.layers * tokens) ** 2)
        if balance.z:
            values["z"] = logits.logsumexp(-1).square().sum() / (tokens * balance.layers)
        objective = sum(values[name] * balance.coefficient(name) for name in balance.names)
        attached = cast(Tensor, _Attached.apply(weights, objective, balance.scaler))  # type: ignore[no-untyped-call]
        return attached, torch.stack([value.detach() for value in values.values()])

    def _counted(self, rows: Tensor | None) -> Tensor:
        if rows is None:
            raise RuntimeError(
                "rows of the global batch must be counted before its first backward pass: call the model on all "
                "micro-batches of the step inside shardwise.layers.balance.counted"
            )
        return rows


class _Attached(torch.autograd.Function):
    """Returns y. The gradient of the objective is 1 or the scaler's factor, whatever that of y is."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, objective: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
        ctx.scaler = scaler
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        unit_gradient = grads[0].new_ones((), dtype=torch.float32)
        return grads[0], unit_gradient if ctx.scaler is None else ctx.scaler.scale(unit_gradient), None


@contextmanager
def counted(model: nn.Module, balance: Balance) -> Iterator[None]:
    """Count the rows of each expert in the global batch, by forward passes of all micro-batches that are called inside.

    They compute nothing for a backward pass. Collective at the end, over `balance.replicas` and `balance.stages`, on
    ranks of the pipeline without a layer too.
    """
    layers = [module for module in model.modules() if isinstance(module, RouterLosses)]
    for layer in layers:
        layer.rows = None
        layer.is_counting = True
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.is_counting = False
    rows_LN = torch.zeros(len(layers), balance.experts, dtype=torch.int64, device=next(model.parameters()).device)
    for row_N, layer in zip(rows_LN, layers, strict=True):
        row_N += layer.rows
        layer.rows = row_N
    if layers:
        collectives.all_reduce_(rows_LN, balance.replicas)
    if balance.pooled:
        rows_N = collectives.all_reduce_(rows_LN.sum(0), balance.stages)
        for layer in layers:
            layer.rows_of_layers = rows_N
