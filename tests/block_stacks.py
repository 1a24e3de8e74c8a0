"""The bytes that the blocks of a rank hold, of the estimate's figures at each block."""

from shardwise.estimates.activations import BlockStack, activation_stack
from shardwise.estimates.rank_workload import RankWorkload


def block_stack(workload: RankWorkload) -> BlockStack:
    """What all blocks keep for one micro-batch, and the most during their backward pass."""
    blocks = activation_stack(workload, [layer for stage in workload.stages for layer in stage.layers])
    return BlockStack(blocks[-1].kept, max(block.peak for block in blocks))
