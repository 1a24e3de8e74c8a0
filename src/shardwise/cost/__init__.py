"""Closed forms of what a run needs: parameters, FLOPs, bytes of state and bytes on the wire, each from one place.

Planner, training and tests call these functions; none of them imports torch or measures anything.
"""

from shardwise.cost.comm import (
    Transfer,
    bytes_per_evaluation_batch,
    bytes_per_step,
    evaluation_transfers,
    step_transfers,
)
from shardwise.cost.flops import flops_per_token, model_flops_utilization
from shardwise.cost.memory import MemoryEstimate, expected_memory, final_weights_bytes
from shardwise.cost.params import local_parameter_count, matmul_parameter_count, parameter_count

__all__ = [
    "MemoryEstimate",
    "Transfer",
    "bytes_per_evaluation_batch",
    "bytes_per_step",
    "evaluation_transfers",
    "expected_memory",
    "final_weights_bytes",
    "flops_per_token",
    "local_parameter_count",
    "matmul_parameter_count",
    "model_flops_utilization",
    "parameter_count",
    "step_transfers",
]
