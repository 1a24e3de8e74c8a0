"""Collectives of blocks with experts, and those of their loads.

Legend: see `estimates/rank_workload.py`; R rows of the rank's experts, N experts, k experts a token.
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

    Ranks that divide the experts send the numbers of rows, [N] in int64, each of the T·k rows of their tokens with its
    weight, [H] and one in float32, and back what arrived, [R, H]: in bit-equal sums, each part of it. Under sequence
    parallelism, the weights and the numbers of the chosen experts are gathered, [T·k] in float32 and in int64.
    """
    transfers = []
    row = workload.a * workload.model.hidden_size
    for routing, count in routings(workload).items():
        rows = workload.tokens * routing.per_token
        results = workload.parts_of_sums * row * workload.rows(routing)
        transfers += [
            _over_experts(workload, _INT64 * routing.experts, f"numbers of rows{suffix}", count),
            _over_experts(workload, (row + _FLOAT32) * rows, f"rows and weights to their experts{suffix}", count),
            _over_experts(workload, results, f"results of rows{suffix}", count),
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
    """The backward pass of `experts`: each tensor goes the other way; the numbers of rows are known."""
    transfers = []
    kind: Kind = "reduce_scatter" if workload.layout.sequence_parallel else "all_reduce"
    row = workload.a * workload.model.hidden_size
    for routing, count in routings(workload).items():
        rows = workload.tokens * routing.per_token
        arrived = workload.parts_of_sums * (row + _FLOAT32) * workload.rows(routing)
        transfers += [
            _over_experts(workload, row * rows, "gradients of results of rows", count),
            _over_experts(workload, arrived, "gradients of rows and weights", count),
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
