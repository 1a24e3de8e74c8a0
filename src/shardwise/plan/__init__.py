"""The plan of a run: parameters of each rank, stages, order of actions, buckets and chunk sizes.

Layers, optimizer and schedules follow it, and `cost/` predicts bytes, FLOPs and time from it. Called, the package is
`shardwise.api.planning.plan`.
"""

from shardwise.callables import make_callable
from shardwise.plan.order import Action, action_order
from shardwise.plan.parameters import (
    canonical_tensor_count,
    local_parameter_count,
    matmul_parameter_count,
    parameter_count,
)
from shardwise.plan.partition import compute_shares, stage_plan
from shardwise.plan.stage import Stage, rank_of

__all__ = [
    "Action",
    "Stage",
    "action_order",
    "canonical_tensor_count",
    "compute_shares",
    "local_parameter_count",
    "matmul_parameter_count",
    "parameter_count",
    "rank_of",
    "stage_plan",
]

make_callable(__name__, "shardwise.api.planning")
