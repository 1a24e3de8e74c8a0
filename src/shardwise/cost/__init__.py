"""Closed forms of what a run needs: parameters, FLOPs, bytes of state and bytes on the wire, each from one place.

None of these functions imports torch or measures anything. For a model of your own, of which nothing is known before it
is built, they return None.
"""

from shardwise.cost.activations import DropoutMasks
from shardwise.cost.comm import Transfer, evaluation_transfers, step_transfers, wire_bytes
from shardwise.cost.flops import flops_per_token, model_flops_utilization, recomputed_flops_per_token
from shardwise.cost.memory import (
    MemoryEstimate,
    checkpoint_bytes,
    expected_memory,
    invariant_dropout,
    memory_by_rank,
    memory_copies_bytes,
    memory_of_machine,
    neediest_rank,
)
from shardwise.cost.simulation import bubble, simulate

__all__ = [
    "DropoutMasks",
    "MemoryEstimate",
    "Transfer",
    "bubble",
    "checkpoint_bytes",
    "evaluation_transfers",
    "expected_memory",
    "flops_per_token",
    "invariant_dropout",
    "memory_by_rank",
    "memory_copies_bytes",
    "memory_of_machine",
    "model_flops_utilization",
    "neediest_rank",
    "recomputed_flops_per_token",
    "simulate",
    "step_transfers",
    "wire_bytes",
]
