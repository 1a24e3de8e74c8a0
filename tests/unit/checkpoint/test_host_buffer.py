"""The buffer carries every byte in order, in as little memory as it was given."""

import threading

import pytest
import torch

from shardwise.checkpoint import host_buffer
from shardwise.checkpoint.host_buffer import CopyAborted, HostBuffer

CPU = torch.device("cpu")


def carried(buffer: HostBuffer, tensors: list[torch.Tensor]) -> bytes:
    """What comes out at the other end, in another thread."""
    found = bytearray()

    def consume() -> None:
        for block in buffer.blocks():
            found.extend(block)

    thread = threading.Thread(target=consume)
    thread.start()
    for tensor in tensors:
        buffer.put(tensor)
    buffer.end()
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
    buffer = HostBuffer(CPU, limit)
    assert carried(buffer, tensors) == wanted, "first save"
    assert carried(buffer, tensors) == wanted, "second save, in blocks used before"


def test_a_given_up_save_reaches_the_writer() -> None:
    buffer = HostBuffer(CPU)
    buffer.put(torch.ones(10))
    buffer.abort()
    with pytest.raises(CopyAborted):
        list(buffer.blocks())
    assert carried(buffer, [torch.ones(2)]) == torch.ones(2).numpy().tobytes(), "the next save is whole again"


def test_memory_stays_within_the_limit_and_what_is_pinned_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is lost to other programs as long as the run lasts; beyond the bound other memory is used."""
    allocated, pinned, empty = list[int](), list[bool](), torch.empty

    def counting(size: int, *, pin_memory: bool = False, **options: object) -> torch.Tensor:
        allocated.append(size)
        pinned.append(pin_memory)
        return empty(size, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", counting)
    assert len(carried(HostBuffer(CPU, 64 * 1024), [torch.ones(1_000_000)])) == 4_000_000
    assert 0 < sum(allocated) <= 64 * 1024, f"{sum(allocated)} bytes of host memory, 65,536 were allowed"
    pinned.clear()
    monkeypatch.setattr(host_buffer, "PINNED_BYTES", 3 * host_buffer.BLOCK_BYTES)
    monkeypatch.setattr(host_buffer.devices, "side_stream", lambda device: None)
    HostBuffer(torch.device("cuda")).put(torch.zeros(5 * host_buffer.BLOCK_BYTES // 4))
    assert pinned == [True] * 3 + [False] * 2
