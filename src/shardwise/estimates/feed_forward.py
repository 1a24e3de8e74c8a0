"""The second half of a block, an MLP or experts: what it saves, what its backward pass holds, and its collectives.

Legend: see `estimates/rank_workload.py`. What stands in brackets is a tensor's number of elements, of `a` bytes each
where the text does not give their dtype. A block has N experts, which E ranks divide, and a token has k of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.base import units
from shardwise.config import FamilyConfig, Layout
from shardwise.config.routing import SUMS, Routing
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.transfer import Transfer, gather_transfer, sum_transfer

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class FeedForwardBytes:
    """Estimated bytes of activations in the second half of a block.

    Attributes:
        saved: for the backward pass, with dropout and without the norm.
        activated: the part of it that is computed again of the rest: results of activations.
        at_work: at the last layer in the backward pass, but for gradients of weights and of the output.
        weight_gradients: new gradients of weights, the most at a time.
        holds_two: true if `at_work` is there twice at another moment.
        is_early: true if it is experts, whose gradients are complete together, before others of the block.
        recorded: what full recompute keeps beside the block's input.
    """

    saved: int
    activated: int
    at_work: int
    weight_gradients: int
    holds_two: bool = False
    is_early: bool = False
    recorded: int = 0


@lru_cache(maxsize=256)
def feed_forward_bytes(workload: RankWorkload, layer: int) -> FeedForwardBytes:
    """Estimate the activations in the second half of a block."""
    routing = workload.model.routing(layer)
    return _mlp(workload) if routing is None else _experts(workload, routing)


def _mlp(workload: RankWorkload) -> FeedForwardBytes:
    """Return the bytes of an MLP.

    | saved                                                | elements     |
    |------------------------------------------------------|--------------|
    | input of the first layer, as that of QKV             | T·H or T/s·H |
    | gated: gate and up, silu(gate)·up                    | 3·T·F/t      |
    | gated, by parts: silu(gate)                          | T·F/t        |
    | else: input of the activation, and input of the last | 2·T·F/t      |
    | mask of dropout between the two, one byte each       | T·F/t        |
    | mask of dropout on what is added to x, one byte each | T·H/s        |

    In the backward pass: the gradients of the last layer's input, [T·F/t], and of its weight, [H·F/t]. Of the former
    there are two at silu(gate)·up by parts, of fp8 products or compiled, and at ReLU without dropout behind it.
    """
    model = workload.model
    feed = workload.a * workload.tokens * workload.local.intermediate
    is_relu = model.activation == "relu"
    inner = (2 + workload.has_parts if model.gated else 1) * feed
    if is_relu and not (workload.inner_mask_elements or workload.rounds_inputs):
        inner -= feed
    last_input = workload.input_width * workload.tokens * workload.local.intermediate
    masks = workload.inner_mask_elements + workload.mask_elements
    single = workload.config.compile.enabled or workload.has_parts or workload.rounds_inputs
    return FeedForwardBytes(
        saved=workload.product_input_bytes + inner + last_input + masks,
        activated=0 if workload.rounds_inputs or (is_relu and not model.gated) else feed,
        at_work=feed,
        weight_gradients=workload.weight_gradient(workload.local.intermediate * model.hidden_size),
        holds_two=(model.gated and single) or (is_relu and not workload.inner_mask_elements),
    )


@dataclass(frozen=True)
class _Traffic:
    """The tokens of a block's experts on a rank.

    Attributes:
        rows: R, those that the rank computes at an expert each: T·k where loads are balanced.
        sent: T·D, a token to each of D ranks; in bit-equal sums D is k, since it travels to each expert by itself.
        arriving: U, those that arrive at a rank's experts, of which it gets at most all of each rank.
        are_apart: true if they are tensors by themselves, as those are that come from other ranks.
        are_grouped: true if one kernel computes the products of all experts, as accelerators are taken to have.
        choices: bytes of the weights and numbers of experts that travel with a token.
    """

    rows: int
    sent: int
    arriving: int
    are_apart: bool
    are_grouped: bool
    choices: int

    @staticmethod
    def of(workload: RankWorkload, routing: Routing) -> _Traffic:
        ranks, is_bit_equal = workload.layout.expert, workload.is_bit_equal
        rows = workload.tokens * routing.per_token
        rows = rows if ranks == 1 else round(workload.imbalance * rows)
        visits = routing.per_token if is_bit_equal else routing.visits(ranks)
        most = rows if is_bit_equal else workload.tokens * ranks
        return _Traffic(
            rows,
            sent=round(workload.tokens * visits),
            arriving=min(round(workload.imbalance * workload.tokens * visits), most),
            are_apart=ranks > 1 or is_bit_equal,
            are_grouped=workload.accelerator and not is_bit_equal,
            choices=2 * _FLOAT32 * (1 if is_bit_equal else routing.per_token),
        )


def _experts(workload: RankWorkload, routing: Routing) -> FeedForwardBytes:
    """Return the bytes of a router with its experts.

    At work are rows of grouped products, [R·(2F/t + H)]. Elsewhere those of one expert are, [5F/t + 3·H] for each, with
    the gradients of its weights, [3·H·F/t], beside the gradient of x, [T·H], or those of tokens that came from other
    ranks and of their results, [2·U·H]. The backward pass of a shared expert comes before, and frees what it saved.
    """
    model, layout, a = workload.model, workload.layout, workload.a
    hidden, width = model.hidden_size, model.expert_width // layout.tensor
    shared = a * workload.tokens * model.shared_expert_width // layout.tensor
    # The router's own input in float32, where that of its experts is gathered.
    own_input = workload.x_bytes if layout.sequence_parallel and a == _FLOAT32 else 0
    of_shared = 3 * a * workload.tokens * model.shared_expert_width // layout.tensor
    if shared and layout.sequence_parallel and not workload.config.regathers:
        of_shared += workload.gathered_bytes
    traffic = _Traffic.of(workload, routing)
    if traffic.are_grouped:
        at_work = traffic.rows * (2 * width + hidden)
    else:
        moving = (2 * traffic.arriving if traffic.are_apart else workload.tokens) * hidden
        at_work = moving + traffic.rows // routing.experts * (5 * width + 3 * hidden) + 3 * hidden * width
    # Gradients are complete together, and are added one after the other, that of the down projections first. In
    # bit-equal sums the rows of each rank give a gradient by themselves.
    elements = routing.experts // layout.expert * width * hidden
    down, gate_up = (workload.weight_gradient(n * elements) for n in (1, 2))
    sources = layout.expert if workload.is_bit_equal else 1
    amounts = _INT64 * routing.experts + len(SUMS) * _FLOAT32
    return FeedForwardBytes(
        saved=_saved_by_experts(workload, routing, traffic) + own_input + amounts + of_shared,
        activated=shared + (0 if workload.config.regathers else own_input),
        at_work=a * at_work - of_shared,
        weight_gradients=max(2 * a * elements + down, gate_up, 3 * sources * a * elements),
        is_early=routing.per_token < routing.experts,
        recorded=(0 if layout.sequence_parallel else _FLOAT32 * workload.tokens * routing.per_token) + amounts,
    )


def _saved_by_experts(workload: RankWorkload, routing: Routing, traffic: _Traffic) -> int:
    """Return the bytes that a router and its experts save, but for what stands in parentheses.

    | part   | saved                                                                 | elements            |
    |--------|-----------------------------------------------------------------------|---------------------|
    | input  | as that of an MLP; U tokens that came from other ranks, their places  | T·H or T/s·H; U·H; U|
    |        | (with sequence parallelism those of router and shared expert)         | T/s·H; T·H          |
    | router | its input and weight in float32, if they have another dtype           | T/s·H + N·H         |
    |        | scores and weights, float32; where these are divided, also their sum  | T·(N + k); T·(k + 1)|
    |        | with z-loss logits and their sum; with losses the sum of sigmoids     | T·(N + 1); T        |
    |        | chosen experts, int64; (amounts for the totals of a step)             | T·k                 |
    | rows   | gate and up; in grouped products all rows and each function's output  | R·2F/t; R·(3F/t + H)|
    |        | weight; place and token, int64                                        | R; 2·R              |
    | shared | (as a gated MLP of its width, without its input)                      | 3·T·F'/t            |
    """
    a, hidden = workload.a, workload.model.hidden_size
    width = workload.model.expert_width // workload.layout.tensor
    routed = workload.tokens_between
    losses = workload.config.optimizer.router_losses
    scores = routed * (routing.experts + (routing.per_token + 1) * routing.normalized)
    scores += workload.tokens * routing.per_token
    if a != _FLOAT32:
        scores += (routed + routing.experts) * hidden
    shares = routing.scores == "sigmoid" and bool(losses)
    scores += routed * ((routing.experts + 1) * ("z" in losses) + shares)
    saved = workload.gathered_bytes + _FLOAT32 * scores + _INT64 * routed * routing.per_token
    saved += traffic.rows * (2 * a * width + a + 2 * _INT64)
    if traffic.are_grouped:
        return saved + traffic.rows * a * (3 * width + hidden)
    return saved + (traffic.arriving * (a * hidden + _INT64) if traffic.are_apart else 0)


# ---- collectives beside those of a block's regions: of E ranks a token travels to D, and U tokens arrive


def mlp_blocks(workload: RankWorkload) -> int:
    """For estimates, a rank's number of blocks whose MLP may gather its input again: routed rows are kept."""
    return workload.layers - _sparse_blocks(workload)


def _sparse_blocks(workload: RankWorkload) -> int:
    layers = (layer for stage in workload.stages for layer in stage.layers)
    return sum(workload.model.routing(layer) is not None for layer in layers)


def _over_experts(workload: RankWorkload, size: int, tensor: str, count: int) -> Transfer:
    """An all-to-all over the ranks that divide the experts, of which a rank sends so many bytes, its own included."""
    layout = workload.layout
    axis = layout.replicas_axis
    axis = axis if layout.expert == layout.replicas else f"{axis}/{layout.expert}"
    return Transfer(axis, "all_to_all", layout.expert, size, count, tensor)


def forward_transfers(workload: RankWorkload, suffix: str = "") -> list[Transfer]:
    """The estimated transfers of the forward pass of experts in all blocks.

    Ranks that divide the experts send two numbers to each, [2·E] in int64, tokens with their weights and numbers of
    experts, [T·D, H] and [T·D, 2k] in float32, and back what arrived, [U, H]. In bit-equal sums a token travels to each
    expert, with two numbers, and results by parts. Under sequence parallelism, the weights and the numbers of the
    chosen experts are gathered, [T·k] in float32 and in int64. The expert that all tokens use is a region of tensor
    parallelism by itself; results are recomputed before it only.
    """
    routing, count = workload.model.any_routing, _sparse_blocks(workload)
    if routing is None:
        return []
    traffic = _Traffic.of(workload, routing)
    row = workload.a * workload.model.hidden_size
    shared = workload.gathered_bytes if workload.model.shared_expert_width else 0
    results = 0 if suffix and not shared else workload.parts_of_sums * row * traffic.arriving
    chosen = (_FLOAT32 + _INT64) * workload.tokens * routing.per_token
    sent = (row + traffic.choices) * traffic.sent
    return [
        _over_experts(workload, 2 * _INT64 * workload.layout.expert, f"numbers of tokens{suffix}", count),
        _over_experts(workload, sent, f"tokens and choices{suffix}", count),
        _over_experts(workload, results, f"results of tokens{suffix}", count),
        gather_transfer(workload, chosen, f"weights and numbers of chosen experts{suffix}", count),
        gather_transfer(workload, shared, f"input of the shared expert{suffix}", count),
        sum_transfer(workload, shared, f"output of the shared expert{suffix}", count),
    ]


def backward_transfers(workload: RankWorkload) -> list[Transfer]:
    """The backward pass of `forward_transfers`: tensors go the other way; the numbers of tokens are known."""
    routing, count = workload.model.any_routing, _sparse_blocks(workload)
    if routing is None:
        return []
    traffic = _Traffic.of(workload, routing)
    row = workload.a * workload.model.hidden_size
    shared = workload.gathered_bytes if workload.model.shared_expert_width else 0
    arrived = (workload.parts_of_sums * row + traffic.choices) * traffic.arriving
    weights = _FLOAT32 * workload.tokens * routing.per_token
    again = shared * workload.config.regathers
    return [
        _over_experts(workload, row * traffic.sent, "gradients of results of tokens", count),
        _over_experts(workload, arrived, "gradients of tokens and choices", count),
        sum_transfer(workload, weights, "gradients of weights of chosen experts", count),
        sum_transfer(workload, shared, "gradient of the shared expert's input", count),
        gather_transfer(workload, shared, "gradient of the shared expert's output", count),
        gather_transfer(workload, again, "input of the shared expert, gathered again", count),
    ]


def loss_transfers(workload: RankWorkload) -> list[Transfer]:
    """The transfers that the objectives of routers add to a micro-batch (`layers/balance.py`).

    Loads, in int64: [B·N] over context parallelism, [N] over all replicas in each block, again in full recompute. Where
    those of the whole batch must be known before, `count_transfers` are theirs.
    """
    layout = workload.layout
    losses = workload.config.optimizer.router_losses
    times = _sparse_blocks(workload) * (2 if workload.recompute == "full" else 1)
    samples = workload.config.train.micro_batch * _load_bytes(workload) * ("sequence" in losses)
    batch = _load_bytes(workload) * ("batch" in losses and not workload.counts_first)
    return [
        Transfer("cp", "all_reduce", layout.context, samples, times, "loads of samples"),
        Transfer(layout.replicas_axis, "all_reduce", layout.replicas, batch, times, "loads of the batch"),
    ]


def count_transfers(workload: RankWorkload) -> list[Transfer]:
    """Loads after the forward passes that only count: of the rank's blocks, and for `pooled` of all of them."""
    layout = workload.layout
    of_blocks = _load_bytes(workload) * _sparse_blocks(workload)
    pooled = _load_bytes(workload) * ("pooled" in workload.config.optimizer.router_losses)
    return [
        Transfer(layout.replicas_axis, "all_reduce", layout.replicas, of_blocks, 1, "loads of the batch"),
        Transfer("pp", "all_reduce", layout.pipeline, pooled, 1, "loads of all blocks"),
    ]


def _load_bytes(workload: RankWorkload) -> int:
    """The bytes of the row counts of each expert of a block, [N] in int64."""
    routing = workload.model.any_routing
    return 0 if routing is None else _INT64 * routing.experts


def load_reading_transfers(workload: RankWorkload) -> Transfer:
    """The transfers that collect the loads of experts of all blocks for the log, [N + K] in int64 each."""
    size = len(workload.model.routings) * (_load_bytes(workload) + _INT64 * len(SUMS))
    return Transfer("world", "all_reduce", workload.layout.world, size, 1, "loads of experts")


def feed_forward_rows(model: FamilyConfig, layout: Layout) -> list[tuple[str, str]]:
    """The experts of a model as a row beside the estimates of a dry run; none for a dense model."""
    rule = model.any_routing
    if rule is None:
        return []
    local_experts = "all" if layout.expert == 1 else rule.experts // layout.expert
    blocks = units.counted(len(model.routings), "block")
    return [("experts", f"{rule.per_token} of {rule.experts} for each token in {blocks}, {local_experts} on each rank")]
