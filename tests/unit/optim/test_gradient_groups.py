"""Gradients of groups of micro-batches are added in one binary tree."""

import pytest
import torch
from torch import Tensor, nn

from shardwise import ZeroRedundancyOptimizer
from shardwise.distributed.collectives import tree_sum
from shardwise.optim.buckets import GroupSums
from tests.dist.dense import random


def tree(parts: list[Tensor]) -> Tensor:
    """Return the sum of the first half and that of the second half, each made alike."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:])


def run(gradient: Tensor, sums: GroupSums, groups: Tensor) -> None:
    """Accumulate groups `[D, M, n]` of M micro-batches each."""
    for number, group in enumerate(groups):
        for micro_batch in group:
            gradient += micro_batch
        if number < len(groups) - 1:
            sums.end_group()
    sums.join()


@pytest.mark.parametrize(("count", "micro_batches"), [(1, 3), (2, 1), (8, 3)])
def test_the_sum_is_that_of_the_tree(count: int, micro_batches: int) -> None:
    groups = random(0, count, micro_batches, 999)
    gradient = torch.zeros(999)
    sums = GroupSums(gradient)
    for _ in range(2):
        gradient.zero_()
        run(gradient, sums, groups)
        by_group = []
        for group in groups:
            total = torch.zeros(999)
            for micro_batch in group:
                total += micro_batch
            by_group.append(total)
        assert torch.equal(gradient, tree(by_group))
        assert torch.equal(gradient, tree_sum(torch.stack(by_group)))


def test_dropped_groups_are_not_added() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0, grad_clipping=False)
    for is_dropped in (True, False):
        weight.sum().backward()
        optimizer.end_group()
        if is_dropped:
            optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((5,), -1.0))
