"""Closed forms of what a run needs: parameters, FLOPs, bytes of state and bytes on the wire, each from one place.

Planner, training and tests call these functions; none of them imports torch or measures anything. Of a model of your
own nothing is known before it is built: there they return None.
"""

from shardwise.cost.activations import DropoutMasks
from shardwise.cost.comm import (
    Transfer,
    bytes_per_evaluation_batch,
    bytes_per_step,
    evaluation_transfers,
    step_transfers,
)
from shardwise.cost.flops import flops_per_token, model_flops_utilization, recomputed_flops_per_token
from shardwise.cost.memory import (
    MemoryEstimate,
    checkpoint_bytes,
    expected_memory,
    invariant_dropout,
    memory_by_rank,
    neediest_rank,
)
from shardwise.cost.simulation import bubble, simulate

__all__ = [
    "DropoutMasks",
    "MemoryEstimate",
    "Transfer",
    "bubble",
    "bytes_per_evaluation_batch",
    "bytes_per_step",
    "checkpoint_bytes",
    "evaluation_transfers",
    "expected_memory",
    "flops_per_token",
    "invariant_dropout",
    "memory_by_rank",
    "model_flops_utilization",
    "neediest_rank",
    "recomputed_flops_per_token",
    "simulate",
    "step_transfers",
]
