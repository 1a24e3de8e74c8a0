"""Collectives of blocks with experts, and those of their loads.

Legend: see `estimates/rank_workload.py`; of E ranks a token travels to D; U tokens arrive; k experts a token.
"""

from __future__ import annotations

from collections import Counter

from shardwise.config.routing import SUMS, Routing
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.transfer import Kind, Transfer, over_tensor

_FLOAT32 = 4
_INT64 = 8


def routings(workload: RankWorkload) -> Counter[Routing]:
    """The rules of the routers on this rank, with the number of blocks of each."""
    layers = (layer for stage in workload.stages for layer in stage.layers)
    return Counter(routing for routing in map(workload.model.routing, layers) if routing is not None)


def _over_experts(workload: RankWorkload, size: int, tensor: str, count: int) -> Transfer:
    """An all-to-all over the ranks that divide the experts, of which a rank sends so many bytes, its own included."""
    layout = workload.layout
    axis = layout.replicas_axis
    axis = axis if layout.expert == layout.replicas else f"{axis}/{layout.expert}"
    return Transfer(axis, "all_to_all", layout.expert, size, count, tensor)


def experts(workload: RankWorkload, suffix: str) -> list[Transfer]:
    """The forward pass of experts in all blocks.

    Ranks that divide the experts send two numbers to each, [2·E] in int64, tokens with their weights and numbers of
    experts, [T·D, H] and [T·D, 2k] in float32, and back what arrived, [U, H]. In bit-equal sums a token travels to each
    expert, with two numbers, and results by parts. Under sequence parallelism, the weights and the numbers of the
    chosen experts are gathered, [T·k] in float32 and in int64. Results are recomputed before a shared expert only.
    """
    transfers = []
    row = workload.a * workload.model.hidden_size
    for routing, count in routings(workload).items():
        rows = workload.tokens * routing.per_token
        there = round(workload.tokens * workload.visits(routing))
        choices = 2 * _FLOAT32 * (1 if workload.is_bit_equal else routing.per_token)
        is_last = bool(suffix) and not workload.model.shared_expert_width
        results = 0 if is_last else workload.parts_of_sums * row * workload.arriving(routing)
        transfers += [
            _over_experts(workload, 2 * _INT64 * workload.layout.expert, f"numbers of tokens{suffix}", count),
            _over_experts(workload, (row + choices) * there, f"tokens and choices{suffix}", count),
            _over_experts(workload, results, f"results of tokens{suffix}", count),
        ]
        if workload.layout.sequence_parallel:
            chosen = f"weights and numbers of chosen experts{suffix}"
            transfers.append(over_tensor(workload, "all_gather", (_FLOAT32 + _INT64) * rows, chosen, count))
        transfers += _shared_expert(workload, count, suffix)
    return transfers


def _shared_expert(workload: RankWorkload, count: int, suffix: str) -> list[Transfer]:
    """The input and the output of the expert that all tokens use, which is a region of tensor parallelism by itself."""
    if not workload.model.shared_expert_width:
        return []
    size = workload.gathered_bytes
    if not workload.layout.sequence_parallel:
        return [over_tensor(workload, "all_reduce", size, f"output of the shared expert{suffix}", count)]
    return [
        over_tensor(workload, "all_gather", size, f"input of the shared expert{suffix}", count),
        over_tensor(workload, "reduce_scatter", size, f"output of the shared expert{suffix}", count),
    ]


def gradients_of_experts(workload: RankWorkload) -> list[Transfer]:
    """The backward pass of `experts`: each tensor goes the other way; the numbers of tokens are known."""
    transfers = []
    kind: Kind = "reduce_scatter" if workload.layout.sequence_parallel else "all_reduce"
    row = workload.a * workload.model.hidden_size
    for routing, count in routings(workload).items():
        rows = workload.tokens * routing.per_token
        there = round(workload.tokens * workload.visits(routing))
        choices = 2 * _FLOAT32 * (1 if workload.is_bit_equal else routing.per_token)
        arrived = (workload.parts_of_sums * row + choices) * workload.arriving(routing)
        transfers += [
            _over_experts(workload, row * there, "gradients of results of tokens", count),
            _over_experts(workload, arrived, "gradients of tokens and choices", count),
            over_tensor(workload, kind, _FLOAT32 * rows, "gradients of weights of chosen experts", count),
        ]
        if workload.model.shared_expert_width:
            size = workload.gathered_bytes
            transfers.append(over_tensor(workload, kind, size, "gradient of the shared expert's input", count))
            if workload.layout.sequence_parallel:
                output = "gradient of the shared expert's output"
                transfers.append(over_tensor(workload, "all_gather", size, output, count))
                if workload.config.regathers:
                    again = "input of the shared expert, gathered again"
                    transfers.append(over_tensor(workload, "all_gather", size, again, count))
    return transfers


def read_loads(workload: RankWorkload) -> Transfer:
    """The rows of each expert and sums of all blocks of the model, [N + K] in int64 each."""
    model = workload.model
    rules = [rule for rule in map(model.routing, range(model.num_hidden_layers)) if rule is not None]
    numbers = len(rules) * (max((rule.experts for rule in rules), default=0) + len(SUMS))
    return Transfer("world", "all_reduce", workload.layout.world, _INT64 * numbers, 1, "loads of experts")
