"""Host memory between the training thread, which copies tensors into it, and the thread that writes them to a file."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise import device as devices

BLOCK_BYTES = 16 * 2**20


class Aborted(Exception):
    """The thread that copies failed, so the bytes that arrived are incomplete."""


class Conveyor:
    """A stream of bytes through a pool of memory blocks, which every save uses again.

    Attributes:
        is_limited: whether `put` may have to wait until a block was written.

    Args:
        device: where the tensors are; copies from an accelerator go to pinned memory.
        limit: bytes of the pool, None for as much as a save needs. `put` waits while the pool is full.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device, self.is_limited = device, limit is not None
        self._block_bytes = BLOCK_BYTES if limit is None else max(2**12, min(BLOCK_BYTES, limit // 2 // 8 * 8))
        self._room = None if limit is None else max(2, limit // self._block_bytes)
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, int] | Aborted | None] = queue.SimpleQueue()
        self._block: Tensor | None = None
        self._filled = 0

    def put(self, tensor: Tensor) -> None:
        """Append a tensor's elements in their order."""
        if not tensor.numel():
            return
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
        done = 0
        while done < len(flat):
            row_bytes = flat[0].numel() * flat.element_size()
            if row_bytes > self._block_bytes:
                self.put(flat[done])
                done += 1
                continue
            block = self._block if self._block is not None else self._take()
            rows = min(len(flat) - done, (self._block_bytes - self._filled) // row_bytes)
            if rows and self._filled % flat.element_size() == 0:
                size = rows * row_bytes
                room = block[self._filled : self._filled + size].view(flat.dtype).view(rows, *flat.shape[1:])
                room.copy_(flat[done : done + rows], non_blocking=True)
                self._filled += size
                done += rows
            else:
                self._pass_on()

    def put_bytes(self, data: bytes) -> None:
        if data:
            self.put(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def end(self) -> None:
        """All bytes of the save have been put."""
        self._pass_on()
        self._full.put(None)

    def abort(self) -> None:
        """The remaining bytes of the save will not come."""
        self._filled = 0
        self._pass_on()
        self._full.put(Aborted())

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of one save, block by block; each is valid until the next is asked for.

        Raises:
            Aborted: the other thread gave up.
        """
        while True:
            item = self._full.get()
            if item is None:
                return
            if isinstance(item, Aborted):
                raise item
            block, filled = item
            try:
                yield memoryview(block.numpy().data)[:filled]
            finally:
                self._free.put(block)

    def _take(self) -> Tensor:
        if self._room != 0 and self._free.empty():
            if self._room is not None:
                self._room -= 1
            pinned = self._device.type != "cpu"
            self._block = torch.empty(self._block_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        else:
            self._block = self._free.get()
        self._filled = 0
        return self._block

    def _pass_on(self) -> None:
        if self._block is None:
            return
        devices.synchronize(self._device)
        if self._filled:
            self._full.put((self._block, self._filled))
        else:
            self._free.put(self._block)
        self._block, self._filled = None, 0
