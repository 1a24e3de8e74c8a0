"""All ranks call the same collectives in the same order, whatever parameters their samples reach."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import pytest

from shardwise.optim import bucket_collectives
from shardwise.optim.bucket_collectives import Reductions


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
