"""Experts: MLPs of which a router chooses a few for each token (arXiv:1701.06538, arXiv:2101.03961).

Shapes per rank: T tokens, H hidden, N experts, k experts a token, F width of an expert, g tensor-parallel ranks. A row
is a token at one of its experts: there are T · k rows, sorted by expert. No expert has a capacity, and no row is
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.tensor_box import Box
from shardwise.config.hugging_face_names import ExpertNames
from shardwise.config.routing import OBJECTIVES, SUMS, Routing
from shardwise.distributed import collectives, placement
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Init, Piece
from shardwise.layers.balance import RouterLosses
from shardwise.layers.bitwise import choose_class
from shardwise.layers.execution import execution
from shardwise.layers.expert_rows import Journey, SumsByToken, rows_of_each, weighted_sums
from shardwise.layers.linear import LayerOptions, ParameterMaker


def choose(routing: Routing, scores: Tensor) -> Tensor:
    """Return the numbers of the experts with the best scores `[T, N]` of each token, ascending: `[T, k]`."""
    if routing.groups > 1:
        by_group = scores.unflatten(-1, (routing.groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, routing.chosen_groups), True)
        scores = by_group.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
    return _best(scores, routing.per_token).sort(dim=-1).values


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest scores of each row; of equal scores, the first ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


_NAMES = ExpertNames()


class Router(placement.PlacedModule):
    """x `[T, H]` → weights `[T, k]`, numbers of experts `[T, k]`, ascending, scores `[T, N]` and logits `[T, N]`.

    The product, the scores and the choice are computed in float32. Of equal scores, the expert with the lower number is
    chosen. The whole router is on every rank.

    Attributes:
        choose: scores `[T, N]` → numbers of experts; proofs of layouts put another function here.

    Args:
        hidden_size: H.
        routing: the rule of the choice.
        is_partial: true if each rank sees a part of the tokens, so that its gradient is a part of the sum.
        name: canonical name of the layer, without `.weight`.
        options: see `LayerOptions`.
    """

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        *,
        is_partial: bool,
        name: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.routing = routing
        self.sequence_parallel_enabled = is_partial
        self.choose: Callable[[Tensor], Tensor] = partial(choose, routing)
        maker = ParameterMaker(self, options)
        self.group = maker.group
        shape = (routing.experts, hidden_size)
        piece = Piece.replicated(maker.name(name, "weight"), shape, maker.group, maker.init, partial=is_partial)
        self.weight = maker.parameter(shape, piece)
        self.bias: nn.Parameter | None = None
        if routing.has_bias:
            name_of_bias = f"{name or ''}.e_score_correction_bias"
            piece = Piece.replicated(name_of_bias, shape[:1], maker.group, Init.constant(0.0), partial=False)
            options["dtype"] = torch.float32
            self.bias = ParameterMaker(self, options).parameter(shape[:1], piece)
            self.bias.requires_grad_(False)
        choose_class(self)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._route(x, self.weight)

    def _route(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Return what `forward` does of some tokens; `weight`: the router's, or a view of it."""
        routing = self.routing
        logits = F.linear(x.float(), weight.float())
        scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
        known = scores.detach()
        experts = self.choose(known if self.bias is None else known + self.bias)
        weights = scores.gather(-1, experts)
        if routing.normalized:
            # Sigmoids of a token may all be 0 in float32.
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if routing.scores == "sigmoid" else 0.0))
        return (weights * routing.scale if routing.scale != 1.0 else weights), experts, scores, logits


class Experts(placement.PlacedModule):
    """`y = Σ_j w_j · down_j(silu(gate_j(x)) · up_j(x))` over the experts j that a router chooses for each token.

    The layer of arXiv:1701.06538 §2, with gated MLPs. Forward: x `[S, B, H]`, or `[S/g, B, H]` with
    `sequence_parallel_enabled` → y of the same shape. Each expert is cut over the group along its width, as a gated MLP
    is. Communicates: with sequence parallelism an all-gather of x and of the choices, and a reduce-scatter of y (in the
    backward pass the reverse); without, an all-reduce of y, and in the backward pass one of the gradients of x and of
    the weights. Where ranks divide the experts, rows travel by all-to-all in each direction.

    Attributes:
        loads: rows of each expert in the backward passes of this rank since the last step (`balance_experts`), `[N]`.
        loads_of_batch: those of all ranks, where they were added up since then; None elsewhere.
        sums: sums in the same passes by `SUMS`, in float32: of the whole batch those of all ranks, tensor-parallel ones
            included, are parts. `entropy` is that of a token's scores divided by their sum, in nats, over tokens;
            objectives as `layers/balance.py` has them.

    Args:
        hidden_size: H.
        width: F of each expert.
        routing: the rule of the choice.
        sequence_parallel_enabled: true if the sequence is cut over the group between layers.
        name: canonical name of the layer.
        names: names of the router and of the projections in it.
        options: see `LayerOptions`.

    Raises:
        ValueError: `width` is not divisible by the group's size, or the experts by the number of ranks that have some.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        routing: Routing,
        *,
        sequence_parallel_enabled: bool = False,
        name: str | None = None,
        names: ExpertNames = _NAMES,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        maker = ParameterMaker(self, options)
        self.group = group = maker.group
        self.sequence_parallel_enabled = sequence_parallel_enabled
        if width % group.size:
            raise ValueError(f"width of an expert ({width}) must be divisible by the group's size ({group.size})")
        ranks = execution().experts
        degree = ranks.group.size
        if routing.experts % degree:
            raise ValueError(f"experts ({routing.experts}) must be divisible by the ranks that divide them ({degree})")
        self.router = Router(
            hidden_size,
            routing,
            is_partial=sequence_parallel_enabled,
            name=None if name is None else f"{name}.{names.router}",
            **options,
        )
        self.name = name or ""
        balance = execution().balance
        self.losses: RouterLosses | None = None
        if balance is not None and balance.names:
            self.losses = RouterLosses(balance, routing, execution().context_group)
            if balance.scaler is None:
                text = "the objectives of routers: give it to their Balance too, Balance(..., scaler=scaler)"
                cast(Any, self.router.weight).unscaled_loss_text = text
        self.ranks = ranks
        self.width = width // group.size
        self.count = routing.experts // ranks.group.size
        gate_up, down = [], []
        for place in range(self.count):
            expert = ranks.group.rank * self.count + place
            tensors = [f"{name or ''}.experts.{expert}.{leaf}.weight" for leaf in names.leaves]
            for number, tensor in enumerate(tensors[:2]):
                at = (2 * place + number) * self.width
                piece = Piece.rows(tensor, (width, hidden_size), group, maker.init, at=at)
                gate_up.append(replace(piece, experts=ranks))
            piece = Piece.columns(tensors[2], (hidden_size, width), group, maker.init)
            local = Box((place * hidden_size, 0), (hidden_size, self.width))
            down.append(replace(piece, local=local, experts=ranks))
        zeros = partial(torch.zeros, device=options.get("device"))
        self.loads = nn.Buffer(zeros(routing.experts, dtype=torch.int64), persistent=False)
        self.sums = nn.Buffer(zeros(len(SUMS), dtype=torch.float32), persistent=False)
        self.loads_of_batch: Tensor | None = None
        self.gate_up = maker.parameter((self.count * 2 * self.width, hidden_size), *gate_up)
        self.down = maker.parameter((self.count * hidden_size, self.width), *down)
        choose_class(self)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts, scores, logits = self.router(x.flatten(0, -2))
        x = collectives.gather_or_copy(x, self.group, sequence_parallel=self.sequence_parallel_enabled)
        weights = collectives.gather_or_copy(weights, self.group, sequence_parallel=self.sequence_parallel_enabled)
        if self.sequence_parallel_enabled:
            experts = collectives.all_gather(experts, self.group)
        values = None
        if self.losses is not None:
            weights, values = self.losses(weights, logits, scores, experts, x.shape[-2])
        sums = self._sums(scores.detach(), values) if torch.is_grad_enabled() else self.sums
        counts = rows_of_each(experts, len(self.loads))
        y = self._sum(x.flatten(0, -2), weights, experts, counts)
        if y.requires_grad:
            y.register_hook(partial(self._add_totals, counts, sums))
        return collectives.scatter_or_reduce(y.view_as(x), self.group, sequence_parallel=self.sequence_parallel_enabled)

    def _add_totals(self, counts: Tensor, sums: Tensor, _gradient: Tensor) -> None:
        """Add the counts and sums of a forward pass in its backward pass: recompute repeats a forward pass."""
        self.loads.add_(counts)
        self.sums.add_(sums)

    def _sum(self, x: Tensor, weights: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        """Return this rank's part of the sum over the experts of each token, `[T, H]`; `counts`: rows of each."""
        gate_up, down = (weight.unflatten(0, (self.count, -1)) for weight in (self.gate_up, self.down))
        if self.ranks.group.size == 1:
            return sum_of_experts(x, weights, experts, gate_up, down)
        journey = Journey.of(experts, counts, self.ranks.group, once=True)
        arrived = journey.tokens_there(x).squeeze(1)
        weights, experts = journey.choices_there(weights)
        y = sum_of_experts(arrived, weights, experts, gate_up, down, journey.rows)
        return journey.sums_back(y[:, None])

    def _sums(self, scores: Tensor, values: Tensor | None) -> Tensor:
        """Return the amounts of a forward pass for `sums`; values: those of `OBJECTIVES`."""
        entropy = torch.special.entr(scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)).sum().view(1)
        amounts = F.pad(entropy, (0, len(OBJECTIVES))) if values is None else torch.cat([entropy, values])
        # Without sequence parallelism all ranks of the group have all of its tokens.
        return amounts if self.sequence_parallel_enabled else amounts / self.group.size

    def extra_repr(self) -> str:
        routing = self.router.routing
        return f"{routing.per_token} of {routing.experts} experts of width {self.width} on {self.group}"


def sum_of_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, rows: int | None = None
) -> Tensor:
    """Return the weighted sum of each token's experts, `[T, H]`, of tokens and arguments as in `weighted_sums`.

    Args:
        experts: numbers of experts, `[T, k]`, ascending.
        rows: number of choices below N, which have an expert here; None: all.
    """
    if _has_grouped_products(x, gate_up, down):
        return _grouped_sum(x, weights, experts, gate_up, down, rows)
    return weighted_sums(x[:, None], weights, experts, [gate_up], [down]).squeeze(1)


def _has_grouped_products(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    is_aligned = all(size * x.element_size() % 16 == 0 for size in (*gate_up.shape[1:], down.shape[2]))
    return x.is_cuda and is_aligned and hasattr(F, "grouped_mm")


def _grouped_sum(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, count: int | None = None
) -> Tensor:
    """Return the sum by torch's grouped products: one kernel for all experts, whose rows the host need not know."""
    rows = experts.flatten().argsort(stable=True)[:count]
    counts = rows_of_each(experts, len(gate_up) + 1)[:-1]
    ends = counts.cumsum(0).int()
    gate_up, down = (_zero_idle_gradients(weight, counts) for weight in (gate_up, down))
    gate, up = F.grouped_mm(x[rows // experts.shape[1]], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    activated = F.silu(gate) * up * weights.flatten()[rows, None].to(x.dtype)
    y = F.grouped_mm(activated, down.transpose(1, 2), offs=ends)
    return cast(Tensor, SumsByToken.apply(y, rows, experts.shape[1], len(experts)))  # type: ignore[no-untyped-call]


def _zero_idle_gradients(weight: Tensor, counts: Tensor) -> Tensor:
    """Return a view of the weights; an expert without rows has the gradient 0.

    On a B200, torch's kernel leaves any values there (github.com/pytorch/pytorch/issues/172439).
    """
    view = weight.view_as(weight)
    if view.requires_grad:
        view.register_hook(lambda gradient: torch.where(counts[:, None, None] > 0, gradient, 0.0))
    return view


def experts_of(model: nn.Module) -> list[Experts]:
    """Return the layers of experts, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def balance_experts(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Group, rate: float) -> None:
    """After each step of an optimizer, move routers' biases towards equal loads (arXiv:2408.15664, algorithm 1).

    With the loads c of a layer's experts, which are whole numbers of rows of the global batch:
    b += rate · sign(mean(c) - c). The definition depends neither on the layout nor on the size of micro-batches.
    `Experts.loads` and `sums` of all layers begin anew.

    Args:
        model: biases of layers whose routing has none are left as they are.
        optimizer: its `step` updates the biases.
        ranks: the ranks that have other samples or other tokens of them (`Mesh.replicas`): collective over them, if
            there are biases and the loads were not added up in this step already.
        rate: step of a bias.
    """
    layers = experts_of(model)
    if not layers:
        return
    biased = [layer for layer in layers if rate and layer.router.bias is not None]

    @torch.no_grad()
    def update(*_: object) -> None:
        if biased:
            known = [layer.loads if layer.loads_of_batch is None else layer.loads_of_batch for layer in biased]
            all_loads = torch.cat(known)
            if biased[0].loads_of_batch is None:
                collectives.all_reduce_(all_loads, ranks)
            for layer, loads in zip(biased, all_loads.split([*map(len, known)]), strict=True):
                assert layer.router.bias is not None
                # In whole numbers: an expert with the mean load stays.
                layer.router.bias.add_((loads.sum() - loads * len(loads)).sign(), alpha=rate)
        for layer in layers:
            layer.loads.zero_()
            layer.sums.zero_()
            layer.loads_of_batch = None
            if layer.losses is not None:
                layer.losses.rows = layer.losses.rows_of_layers = None

    optimizer.register_step_post_hook(update)
