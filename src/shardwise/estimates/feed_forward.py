"""The second half of a block, an MLP or experts: what it saves, and what its backward pass holds.

Legend: see `estimates/rank_workload.py`. What stands in brackets is a tensor's number of elements, of `a` bytes each
where the text does not give their dtype. A block has N experts, which E ranks divide, and a token has k of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.config.routing import SUMS, Routing
from shardwise.estimates.rank_workload import RankWorkload

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class FeedForwardBytes:
    """Estimated bytes of activations in the second half of a block."""

    saved: int  # for the backward pass, with dropout and without the norm
    activated: int  # the part of it that is computed again of the rest: results of activations
    at_work: int  # at the last layer in the backward pass, but for gradients of weights and of the output
    weight_gradients: int  # new gradients of weights, the most at a time
    holds_two: bool = False  # true if `at_work` is there twice at another moment
    is_early: bool = False  # true if it is experts, whose gradients are complete together, before others of the block
    recorded: int = 0  # what full recompute keeps beside the block's input


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
class ExpertTraffic:
    """The tokens of a block's experts on a rank."""

    rows: int  # R, those that the rank computes at an expert each: T·k where loads are balanced
    sent: int  # T·D, a token to each of D ranks; in bit-equal sums D is k, since it travels to each expert by itself
    arriving: int  # U, those that arrive at a rank's experts, of which it gets at most all of each rank
    are_apart: bool  # true if they are tensors by themselves, as those are that come from other ranks
    are_grouped: bool  # true if one kernel computes the products of all experts, as accelerators are taken to have
    choices: int  # bytes of the weights and numbers of experts that travel with a token

    @staticmethod
    def of(workload: RankWorkload, routing: Routing) -> ExpertTraffic:
        ranks, is_bit_equal = workload.layout.expert, workload.is_bit_equal
        rows = workload.tokens * routing.per_token
        rows = rows if ranks == 1 else round(workload.imbalance * rows)
        visits = routing.per_token if is_bit_equal else routing.visits(ranks)
        most = rows if is_bit_equal else workload.tokens * ranks
        return ExpertTraffic(
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
    traffic = ExpertTraffic.of(workload, routing)
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


def _saved_by_experts(workload: RankWorkload, routing: Routing, traffic: ExpertTraffic) -> int:
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
