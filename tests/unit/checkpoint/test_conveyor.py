"""The conveyor carries every byte in order, in as little memory as it was given."""

import threading

import pytest
import torch

from shardwise.checkpoint import save as conveyor
from shardwise.checkpoint.save import Aborted, Conveyor

CPU = torch.device("cpu")


def carried(conveyor: Conveyor, tensors: list[torch.Tensor]) -> bytes:
    """What comes out at the other end, in another thread."""
    found = bytearray()

    def consume() -> None:
        for block in conveyor.blocks():
            found.extend(block)

    thread = threading.Thread(target=consume)
    thread.start()
    for tensor in tensors:
        conveyor.put(tensor)
    conveyor.end()
    thread.join(30)
    assert not thread.is_alive(), "the consumer still waits"
    return bytes(found)


@pytest.mark.parametrize("limit", [None, 8192, 100_000])
def test_bytes_in_order(limit: int | None) -> None:
    tensors = [
        torch.arange(5000, dtype=torch.float32).view(50, 100).t(),  # not contiguous
        torch.randn(3, 7, 11).to(torch.bfloat16),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.randn(2, 40_000),  # a row is longer than the smallest block
    ]
    tensors.insert(2, torch.zeros(1, dtype=torch.bfloat16))  # and the next is not aligned to its size
    wanted = b"".join(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors)
    belt = Conveyor(CPU, limit)
    assert carried(belt, tensors) == wanted, "first save"
    assert carried(belt, tensors) == wanted, "second save, in blocks used before"


def test_memory_stays_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, empty = [], torch.empty

    def counting(size: int, **options: object) -> torch.Tensor:
        allocated.append(size)
        return empty(size, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", counting)
    belt = Conveyor(CPU, 64 * 1024)
    assert len(carried(belt, [torch.ones(1_000_000)])) == 4_000_000
    assert 0 < sum(allocated) <= 64 * 1024, f"{sum(allocated)} bytes of host memory, 65,536 were allowed"


def test_a_given_up_save_reaches_the_writer() -> None:
    belt = Conveyor(CPU)
    belt.put(torch.ones(10))
    belt.abort()
    with pytest.raises(Aborted):
        list(belt.blocks())
    assert carried(belt, [torch.ones(2)]) == torch.ones(2).numpy().tobytes(), "the next save is whole again"


def test_pinned_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost to other programs as long as the run lasts; what is beyond goes to memory that is not pinned."""
    pinned, empty = [], torch.empty

    def counting(size: int, *, pin_memory: bool, **options: object) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(size, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", counting)
    monkeypatch.setattr(conveyor, "PINNED_BYTES", 3 * conveyor.BLOCK_BYTES)
    monkeypatch.setattr(conveyor.devices, "synchronize", lambda device: None)
    belt = Conveyor(torch.device("cuda"))
    belt.put(torch.zeros(5 * conveyor.BLOCK_BYTES // 4))
    assert pinned == [True] * 3 + [False] * 2
