"""The second half of a block, an MLP or experts: what it saves, what its backward pass holds, and its collectives.

Legend: see `estimates/rank_workload.py`. What stands in brackets is a tensor's number of elements, of `a` bytes each
where the text does not give their dtype. A block has N experts, which E ranks divide; a token has k of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from shardwise.base import units
from shardwise.config import FamilyConfig, Layout
from shardwise.config.routing import SUMS, Routing
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.transfer import Kind, Transfer, over_tensor

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True, eq=False)
class FeedForward:
    """The MLP of a block, and what other kinds change of it.

    Attributes:
        is_early: true if the gradients of its weights are complete together, before others of the block.
        keeps_input: true if its gathered input is kept for the backward pass also with `parallel.sequence_regather`.
        recorded: bytes that full recompute keeps of it beside the block's input.
    """

    workload: RankWorkload

    is_early = False
    keeps_input = False
    recorded = 0

    @property
    def width_bytes(self) -> int:
        """[T·F/t]."""
        return self.workload.a * self.workload.tokens * self.workload.local.intermediate

    @property
    def saved(self) -> int:
        """Bytes that it saves with its dropout.

        | saved                                                | elements          |
        |------------------------------------------------------|-------------------|
        | input of the first layer, as that of QKV             | T·H or T/s·H      |
        | gated: gate and up, silu(gate)·up                    | 3·T·F/t           |
        | gated, by parts: silu(gate)                          | T·F/t             |
        | else: input of the activation, and input of the last | 2·T·F/t           |
        | mask of dropout between the two, one byte each       | T·F/t             |
        | mask of dropout on what is added to x, one byte each | T·H/s             |
        """
        workload, model = self.workload, self.workload.model
        inner = (2 + workload.has_parts if model.gated else 1) * self.width_bytes
        if model.activation == "relu" and not (workload.inner_mask_elements or workload.rounds_inputs):
            inner -= self.width_bytes
        last_input = workload.input_width * workload.tokens * workload.local.intermediate
        masks = workload.inner_mask_elements + workload.mask_elements
        return workload.product_input_bytes + inner + last_input + masks

    @property
    def activated(self) -> int:
        """The part of `saved` that is computed again of what it keeps: results of the activation."""
        model = self.workload.model
        is_kept = self.workload.rounds_inputs or (model.activation == "relu" and not model.gated)
        return 0 if is_kept else self.width_bytes

    @property
    def at_work(self) -> int:
        """Bytes of the gradient of the last layer's input, [T·F/t], at which the backward pass begins."""
        return self.width_bytes

    @property
    def holds_two(self) -> bool:
        """True if there are two such gradients: at silu(gate)·up by parts, of fp8 products or compiled, and at ReLU."""
        workload, model = self.workload, self.workload.model
        single = workload.config.compile.enabled or workload.has_parts or workload.rounds_inputs
        return (model.gated and single) or (model.activation == "relu" and not workload.inner_mask_elements)

    @property
    def weight_gradients(self) -> int:
        """The most bytes of new gradients of weights: that of the last layer, [H·F/t]."""
        return self.workload.weight_gradient(self.workload.local.intermediate * self.workload.model.hidden_size)

    @property
    def load_bytes(self) -> int:
        """Bytes of the rows of each expert, [N] in int64."""
        return 0

    def forward(self, count: int, suffix: str = "") -> list[Transfer]:
        """The collectives of the forward pass in so many blocks, beside those of a block's regions."""
        return []

    def backward(self, count: int) -> list[Transfer]:
        """Likewise of the backward pass."""
        return []


@dataclass(frozen=True, eq=False)
class Experts(FeedForward):
    """A router with the experts that it chooses for each token, and the expert that all tokens use, if there is one."""

    routing: Routing

    keeps_input = True

    @property
    def is_early(self) -> bool:  # type: ignore[override]
        return self.routing.per_token < self.routing.experts

    @cached_property
    def rows(self) -> int:
        """R, the rows that a rank computes: T·k where loads are balanced."""
        rows = self.workload.tokens * self.routing.per_token
        return rows if self.workload.layout.expert == 1 else round(self.workload.imbalance * rows)

    @cached_property
    def visits(self) -> float:
        """D, the ranks to which a token travels; in bit-equal sums k, since it travels to each expert by itself."""
        routing, workload = self.routing, self.workload
        return routing.per_token if workload.is_bit_equal else routing.visits(workload.layout.expert)

    @cached_property
    def arriving(self) -> int:
        """U, the tokens that arrive at a rank's experts, of which it gets at most all of each rank."""
        workload = self.workload
        most = self.rows if workload.is_bit_equal else workload.tokens * workload.layout.expert
        return min(round(workload.imbalance * workload.tokens * self.visits), most)

    @property
    def groups_products(self) -> bool:
        """True if one kernel computes the products of all experts, as accelerators are taken to have."""
        return self.workload.accelerator and not self.workload.is_bit_equal

    @property
    def tokens_travel(self) -> bool:
        """True if the tokens of experts are tensors by themselves, as those are that come from other ranks."""
        return self.workload.layout.expert > 1 or self.workload.is_bit_equal

    @property
    def saved(self) -> int:
        """Bytes that a router and the experts of a block save, with balanced loads; R rows are T·k.

        | part   | saved                                                                 | elements            |
        |--------|-----------------------------------------------------------------------|---------------------|
        | input  | as that of an MLP; U tokens that came from other ranks, their places  | T·H or T/s·H; U·H; U|
        |        | with sequence parallelism those of router and shared expert           | T/s·H; T·H          |
        | router | its input and weight in float32, if they have another dtype           | T/s·H + N·H         |
        |        | scores and weights, float32; where these are divided, also their sum  | T·(N + k); T·(k + 1)|
        |        | with z-loss logits and their sum; with losses the sum of sigmoids     | T·(N + 1); T        |
        |        | chosen experts, int64                                                 | T·k                 |
        | rows   | gate and up; in grouped products all rows and each function's output  | R·2F/t; R·(3F/t + H)|
        |        | weight; place and token, int64                                        | R; 2·R              |
        | shared | as a gated MLP of its width, without its input                        | 3·T·F'/t            |
        """
        workload, routing = self.workload, self.routing
        a, hidden = workload.a, workload.model.hidden_size
        routed = workload.tokens_between
        scores = _FLOAT32 * routed * (routing.experts + (routing.per_token + 1) * routing.normalized)
        scores += _FLOAT32 * workload.tokens * routing.per_token
        if a != _FLOAT32:
            scores += _FLOAT32 * (routed + routing.experts) * hidden
        scores += self._own_input
        losses = workload.config.optimizer.router_losses
        shares = routing.scores == "sigmoid" and bool(losses)
        scores += _FLOAT32 * routed * ((routing.experts + 1) * ("z" in losses) + shares)
        chosen = _INT64 * routed * routing.per_token + self._amounts
        saved = workload.gathered_bytes + scores + chosen + self.rows * (2 * a * self._width + a + 2 * _INT64)
        if self.groups_products:
            saved += self.rows * a * (3 * self._width + hidden)
        elif self.tokens_travel:
            saved += self.arriving * (a * hidden + _INT64)
        return saved + self._shared

    @property
    def activated(self) -> int:
        """Those of the shared expert, and the input of the router where it is gathered again."""
        workload = self.workload
        shared = workload.a * workload.tokens * workload.model.shared_expert_width // workload.layout.tensor
        return shared + (0 if workload.config.regathers else self._own_input)

    @property
    def recorded(self) -> int:  # type: ignore[override]
        return _FLOAT32 * self.workload.tokens * self.routing.per_token + self._amounts

    @property
    def at_work(self) -> int:
        """Bytes of rows in the backward pass, [R·(2F/t + H)] of grouped products, without those of the shared expert.

        Elsewhere the rows of one expert are at work, [5F/t + 3·H] for each, with the gradients of its weights,
        [3·H·F/t], beside the gradient of x, [T·H], or those of tokens that came from other ranks and of their results,
        [2·U·H]. The backward pass of a shared expert comes before.
        """
        workload, width = self.workload, self._width
        hidden = workload.model.hidden_size
        if self.groups_products:
            return workload.a * self.rows * (2 * width + hidden) - self._shared
        travelling = (2 * self.arriving if self.tokens_travel else workload.tokens) * hidden
        of_one = self.rows // self.routing.experts * (5 * width + 3 * hidden) + 3 * hidden * width
        return workload.a * (travelling + of_one) - self._shared

    holds_two = False

    @property
    def weight_gradients(self) -> int:
        """Those of all experts, complete together, are added one after the other, that of down projections first."""
        workload = self.workload
        a, layout = workload.a, workload.layout
        held = self.routing.experts // layout.expert * workload.model.expert_width // layout.tensor
        elements = held * workload.model.hidden_size
        down, gate_up = (workload.weight_gradient(n * elements) for n in (1, 2))
        # In bit-equal sums the rows of each rank give a gradient by themselves.
        sources = layout.expert if workload.is_bit_equal else 1
        return max(2 * a * elements + down, gate_up, 3 * sources * a * elements)

    @property
    def load_bytes(self) -> int:
        return _INT64 * self.routing.experts

    @property
    def _width(self) -> int:
        return self.workload.model.expert_width // self.workload.layout.tensor

    @property
    def _shared(self) -> int:
        """Bytes that the expert of all tokens saves."""
        workload = self.workload
        width = workload.model.shared_expert_width
        gathers = width > 0 and workload.layout.sequence_parallel and not workload.config.regathers
        inner = 3 * workload.a * workload.tokens * width // workload.layout.tensor
        return inner + (workload.gathered_bytes if gathers else 0)

    @property
    def _own_input(self) -> int:
        """Bytes of the input of a router in float32, where that of its experts is gathered."""
        workload = self.workload
        return workload.x_bytes if workload.layout.sequence_parallel and workload.a == _FLOAT32 else 0

    @property
    def _amounts(self) -> int:
        """Bytes of what a block adds to the totals of its step: rows of each expert, and its sums."""
        return self.load_bytes + len(SUMS) * _FLOAT32

    # ---- collectives: of E ranks a token travels to D; U tokens arrive

    def forward(self, count: int, suffix: str = "") -> list[Transfer]:
        """Tokens that travel to their experts, and results that travel back.

        Ranks that divide the experts send two numbers to each, [2·E] in int64, tokens with their weights and numbers of
        experts, [T·D, H] and [T·D, 2k] in float32, and back what arrived, [U, H]. In bit-equal sums a token travels to
        each expert, with two numbers, and results by parts. Under sequence parallelism, the weights and the numbers of
        the chosen experts are gathered, [T·k] in float32 and in int64. Results are recomputed before a shared expert
        only. Its input and its output are a region of tensor parallelism by itself.
        """
        workload = self.workload
        row, choices, there = self._message_sizes
        has_shared = workload.model.shared_expert_width > 0
        results = 0 if suffix and not has_shared else workload.parts_of_sums * row * self.arriving
        transfers = [
            self._over_experts(2 * _INT64 * workload.layout.expert, f"numbers of tokens{suffix}", count),
            self._over_experts((row + choices) * there, f"tokens and choices{suffix}", count),
            self._over_experts(results, f"results of tokens{suffix}", count),
        ]
        is_cut = workload.layout.sequence_parallel
        if is_cut:
            chosen = (_FLOAT32 + _INT64) * workload.tokens * self.routing.per_token
            name = f"weights and numbers of chosen experts{suffix}"
            transfers.append(over_tensor(workload, "all_gather", chosen, name, count))
        if has_shared:
            size = workload.gathered_bytes
            kind: Kind = "reduce_scatter" if is_cut else "all_reduce"
            if is_cut:
                name = f"input of the shared expert{suffix}"
                transfers.append(over_tensor(workload, "all_gather", size, name, count))
            transfers.append(over_tensor(workload, kind, size, f"output of the shared expert{suffix}", count))
        return transfers

    def backward(self, count: int) -> list[Transfer]:
        """Each tensor of `forward` goes the other way; the numbers of tokens are known."""
        workload = self.workload
        row, choices, there = self._message_sizes
        is_cut = workload.layout.sequence_parallel
        kind: Kind = "reduce_scatter" if is_cut else "all_reduce"
        weights = _FLOAT32 * workload.tokens * self.routing.per_token
        arrived = (workload.parts_of_sums * row + choices) * self.arriving
        transfers = [
            self._over_experts(row * there, "gradients of results of tokens", count),
            self._over_experts(arrived, "gradients of tokens and choices", count),
            over_tensor(workload, kind, weights, "gradients of weights of chosen experts", count),
        ]
        if workload.model.shared_expert_width:
            size = workload.gathered_bytes
            gathered = ["gradient of the shared expert's output"] if is_cut else []
            gathered += ["input of the shared expert, gathered again"] if is_cut and workload.config.regathers else []
            transfers.append(over_tensor(workload, kind, size, "gradient of the shared expert's input", count))
            transfers += [over_tensor(workload, "all_gather", size, name, count) for name in gathered]
        return transfers

    @property
    def _message_sizes(self) -> tuple[int, int, int]:
        """Bytes of a token, and of its choices, and the number of tokens that this rank sends."""
        workload = self.workload
        choices = 2 * _FLOAT32 * (1 if workload.is_bit_equal else self.routing.per_token)
        return workload.a * workload.model.hidden_size, choices, round(workload.tokens * self.visits)

    def _over_experts(self, size: int, tensor: str, count: int) -> Transfer:
        """An all-to-all over ranks that divide the experts, of which a rank sends so many bytes, its own included."""
        layout = self.workload.layout
        axis = layout.replicas_axis
        axis = axis if layout.expert == layout.replicas else f"{axis}/{layout.expert}"
        return Transfer(axis, "all_to_all", layout.expert, size, count, tensor)


def feed_forward(workload: RankWorkload, routing: Routing | None) -> FeedForward:
    """The second half of a block with this router, or with none."""
    return FeedForward(workload) if routing is None else Experts(workload, routing)


def kinds_on_rank(workload: RankWorkload) -> list[tuple[FeedForward, int]]:
    """The kinds of second halves of this rank's blocks, with the number of each."""
    layers = (layer for stage in workload.stages for layer in stage.layers)
    kinds = Counter(map(workload.model.routing, layers))
    return [(feed_forward(workload, routing), count) for routing, count in kinds.items()]


# ---- loads: the rows of each expert


def loads_of_objectives(workload: RankWorkload, forwards: int, *, counts_first: bool) -> list[Transfer]:
    """The loads that objectives of routers need in so many forward passes of each block (`layers/balance.py`).

    Those of samples are summed over context parallelism, [B·N], and those of the batch over all replicas, [N], unless
    they were counted before.
    """
    layout = workload.layout
    losses = workload.config.optimizer.router_losses
    samples = workload.config.train.micro_batch if "sequence" in losses else 0
    batches = int("batch" in losses and not counts_first)
    axis, replicas = layout.replicas_axis, layout.replicas
    transfers = []
    for part, count in kinds_on_rank(workload):
        size, times = part.load_bytes, forwards * count
        transfers += [
            Transfer("cp", "all_reduce", layout.context, samples * size, times, "loads of samples"),
            Transfer(axis, "all_reduce", replicas, batches * size, times, "loads of the batch"),
        ]
    return transfers


def counted_loads(workload: RankWorkload) -> list[Transfer]:
    """Loads after forward passes that only count: of the rank's blocks, and for `pooled` of all of them."""
    layout = workload.layout
    of_blocks = sum(part.load_bytes * count for part, count in kinds_on_rank(workload))
    pooled = _most_experts(workload.model) * ("pooled" in workload.config.optimizer.router_losses)
    return [
        Transfer(layout.replicas_axis, "all_reduce", layout.replicas, of_blocks, 1, "loads of the batch"),
        Transfer("pp", "all_reduce", layout.pipeline, _INT64 * pooled, 1, "loads of all blocks"),
    ]


def read_loads(workload: RankWorkload) -> Transfer:
    """The rows of each expert and sums of all blocks of the model, [N + K] in int64 each."""
    numbers = _sparse_blocks(workload.model) * (_most_experts(workload.model) + len(SUMS))
    return Transfer("world", "all_reduce", workload.layout.world, _INT64 * numbers, 1, "loads of experts")


def routed_rows(model: FamilyConfig, layout: Layout) -> list[tuple[str, str]]:
    """The experts of a model in words, by the name of the row; empty for a model without."""
    routing = model.any_routing
    if routing is None:
        return []
    blocks = units.counted(_sparse_blocks(model), "block")
    held = "all" if layout.expert == 1 else routing.experts // layout.expert
    return [("experts", f"{routing.per_token} of {routing.experts} for each token in {blocks}, {held} on each rank")]


def _sparse_blocks(model: FamilyConfig) -> int:
    return sum(model.routing(layer) is not None for layer in range(model.num_hidden_layers))


def _most_experts(model: FamilyConfig) -> int:
    """N; 0 for a model without, whose blocks with experts are all alike."""
    return 0 if model.any_routing is None else model.any_routing.experts
