"""Buckets: the order of their sums and collectives, and their sizes; how they are packed, optimizer and costs test."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from shardwise import ZeroRedundancyOptimizer
from shardwise.distributed.collectives import tree_sum
from shardwise.optim import bucket_collectives
from shardwise.optim.bucket_collectives import Reductions
from shardwise.optim.bucket_layout import bucket_bytes
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


@dataclass(eq=False)
class Recorded:
    """Takes the place of a bucket, with one parameter; notes when its reduction begins, and when it is waited for."""

    name: str
    calls: list[str]
    stage: int = 0
    group: ClassVar = SimpleNamespace(size=2)
    parameters: tuple[str] = ("p",)
    reduced: bool = False
    is_reducing: bool = False
    ready: set[int] = field(default_factory=set)

    def adopt(self, index: int) -> None:
        assert not self.is_reducing, "the memory of a sum under way would be written"

    def start_reduction(self) -> None:
        self.reduced = True
        self.is_reducing = True
        self.calls.append(f"start {self.name}")

    def finish_reduction(self) -> None:
        if self.is_reducing:
            self.calls.append(f"finish {self.name}")
        self.is_reducing = False


def made(buckets: dict[str, Recorded]) -> Reductions:
    """Reductions of these buckets, each with a parameter of its name."""
    places = {name: (bucket, 0) for name, bucket in buckets.items()}
    return Reductions(list(buckets.values()), places, each_pass=True)  # type: ignore[arg-type]


def calls_of(passes: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a step with three buckets, where each pass has the gradients of the named ones, in this order."""
    calls: list[str] = []
    buckets = {name: Recorded(name, calls) for name in "ABC"}
    at_end: list[Callable[[], None]] = []
    monkeypatch.setattr(bucket_collectives, "after_backward", at_end.append)
    step = made(buckets)
    for number, names in enumerate(passes):
        monkeypatch.setattr(bucket_collectives, "backward_number", lambda number=number: number)
        for name in names:
            step.take(name)  # type: ignore[arg-type]
        while at_end:
            at_end.pop()()
    step.finish()
    return calls


@pytest.mark.parametrize("passes", [["BC", "ABC"], ["A", "C"], ["CBA", "BA"], ["ABC", "C"], ["B", "B"], ["ABCB"]])
def test_ranks_without_some_gradients_do_as_the_others(passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one's second gradient begins a new round, as where a parameter's gradient comes in two parts."""
    expected = [call for call in calls_of(["ABC", "ABC"], monkeypatch) if call.startswith("start")]
    assert expected == ["start A", "start B", "start C"] * 2
    calls = calls_of(passes, monkeypatch)
    assert [call for call in calls if call.startswith("start")] == expected
    finished = [call.removeprefix("finish ") for call in calls if call.startswith("finish")]
    assert finished == ["A", "B", "C"] * 2, "sums over copies of the parts begin when a reduction is waited for"


MIB = 2**20


def seen(gradients: float, ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Seconds of a backward pass's reductions that nothing hides: each one's messages, and the whole last one."""
    return (ranks - 1) * (gradients / size * latency + size / (ranks * bandwidth))


def test_the_size_is_the_one_with_the_least_to_see() -> None:
    for gradients, ranks in [(50 * MIB, 2), (500 * MIB, 64), (4000 * MIB, 8)]:
        size = bucket_bytes(gradients, ranks, accelerator=True)
        bandwidth = 200e9
        link = (2**20 / bandwidth, bandwidth)
        least = seen(gradients, ranks, size, *link)
        assert all(seen(gradients, ranks, size * factor, *link) > least for factor in (0.5, 0.9, 1.1, 2.0))
    assert bucket_bytes(400 * MIB, 4, accelerator=True) == 40 * MIB
    assert bucket_bytes(400 * MIB, 4, accelerator=False) == pytest.approx(40 * MIB / 8**0.5)
    assert bucket_bytes(0.1 * MIB, 4, accelerator=False) == MIB
