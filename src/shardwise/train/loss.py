"""The loss of a batch: the division by its targets, for training and evaluation alike; and perplexity.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group
from shardwise.train.micro_batch import MicroBatch

_LARGEST_EXPONENT = 700
"""Losses from here on give no perplexity: exp(710) exceeds the largest float, 1.8e308."""


def count_targets(micro_batches: Sequence[MicroBatch], data_parallel: Group) -> Tensor:
    """Counted targets of each objective in the global batch, [K]. Collective over data parallelism."""
    counts_K = torch.stack([batch.counts_K for batch in micro_batches]).sum(dim=0)
    return collectives.all_reduce_(counts_K, data_parallel)


def mean_over_targets(sums_K: Tensor, counts_K: Tensor) -> Tensor:
    """Divide each objective's sum over targets by the number of these targets; 0 for an objective without targets.

    A model returns sums, and this is the only place that divides them. In training `counts_K` are those of the global
    batch: the shares of all micro-batches and ranks then add up to the mean, however the batch is cut.
    """
    # Counts are int64: divided by them, sums in bfloat16 (a user's own model) would stay in bfloat16.
    return sums_K / counts_K.clamp(min=1).to(torch.promote_types(sums_K.dtype, torch.float32))


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where a float cannot hold it."""
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
