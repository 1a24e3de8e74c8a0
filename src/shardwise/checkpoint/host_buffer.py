"""Host memory between two threads of a save: one copies tensors into it, the other writes them to files.

Copies from an accelerator have a stream of their own, so that the training goes on meanwhile:

    training's stream   step 10 | step 11: forward, backward              | its update waits for the last copy
    stream of copies              block 1 | block 2 | block 3 | block 4
    writing thread                          block 1 to disk | block 2 …
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from shardwise.distributed import devices

BLOCK_BYTES = 16 * 2**20
PINNED_BYTES = 4 * 2**30
"""Pinned memory of a rank at most: all other programs of the machine lose it for as long as the run lasts."""
_LEAST_BLOCK_BYTES = 2**12


class CopyAborted(Exception):
    """The thread that copies a checkpoint from the device failed, so the bytes that arrived are incomplete."""


class HostBuffer:
    """A stream of bytes through a pool of host memory, which every save of a checkpoint uses again.

    Attributes:
        is_limited: whether `put` may have to wait until a block was written.

    Args:
        device: the device of the tensors. The first `PINNED_BYTES` from an accelerator go to pinned memory, to which
            copies are faster.
        limit: bytes of the pool, None for as much as a save needs. `put` waits while the pool is full.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self.is_limited = limit is not None
        # Of two blocks, one is filled while the other is written. Multiples of 8 bytes hold whole elements.
        if limit is None:
            self._block_bytes = BLOCK_BYTES
        else:
            self._block_bytes = max(_LEAST_BLOCK_BYTES, min(BLOCK_BYTES, limit // 2 // 8 * 8))
        self._blocks_to_allocate = None if limit is None else max(2, limit // self._block_bytes)
        self._blocks_to_pin = 0 if device.type == "cpu" else PINNED_BYTES // self._block_bytes
        self._stream = devices.side_stream(device)
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, int, torch.Event | None] | CopyAborted | None] = queue.SimpleQueue()
        self._block: Tensor | None = None
        self._filled_bytes = 0

    def put(self, tensor: Tensor) -> None:
        """Append a tensor's elements in their order.

        A tensor of an accelerator is copied behind later work: it must not change, or lose its memory, before
        `end_of_copies`.
        """
        if not tensor.numel():
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        rows = tensor.reshape(-1) if tensor.is_contiguous() else tensor
        row_bytes = rows[0].numel() * rows.element_size()
        done = 0
        while done < len(rows):
            # A row that fits into no block is put by its own rows.
            if row_bytes > self._block_bytes:
                self.put(rows[done])
                done += 1
                continue
            block = self._block if self._block is not None else self._next_block()
            count = min(len(rows) - done, (self._block_bytes - self._filled_bytes) // row_bytes)
            # A view in the tensor's dtype must begin at a multiple of its element size.
            if count and self._filled_bytes % rows.element_size() == 0:
                stop = self._filled_bytes + count * row_bytes
                target = block[self._filled_bytes : stop].view(rows.dtype).view(count, *rows.shape[1:])
                with self._stream or nullcontext():
                    target.copy_(rows[done : done + count], non_blocking=True)
                self._filled_bytes = stop
                done += count
            else:
                self._pass_on()

    def put_bytes(self, data: bytes) -> None:
        if data:
            self.put(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def end_of_copies(self) -> torch.Event | None:
        """Return the end of all copies so far as the accelerator sees it; None if they have ended."""
        return None if self._stream is None else self._stream.record_event()

    def end(self) -> None:
        """Say that all bytes of the save have been put."""
        self._pass_on()
        self._full.put(None)

    def abort(self) -> None:
        """Say that the remaining bytes of the save will not come."""
        # No copy may still be on its way into a block that is used again.
        devices.synchronize(self._device)
        self._filled_bytes = 0
        self._pass_on()
        self._full.put(CopyAborted())

    def blocks(self) -> Iterator[memoryview]:
        """Yield the bytes of one save, each block valid until the next; Aborted if the other thread gave up."""
        while True:
            message = self._full.get()
            if message is None:
                return
            if isinstance(message, CopyAborted):
                raise message
            block, filled_bytes, end_of_copies = message
            if end_of_copies is not None:
                end_of_copies.synchronize()
            # Also where the reader stops early: the other thread may wait for the block.
            try:
                yield memoryview(block.numpy().data)[:filled_bytes]
            finally:
                self._free.put(block)

    def _next_block(self) -> Tensor:
        """Return an empty block: a free one, else a new one, else the first that the other thread gives back."""
        if self._blocks_to_allocate != 0 and self._free.empty():
            if self._blocks_to_allocate is not None:
                self._blocks_to_allocate -= 1
            is_pinned = self._blocks_to_pin > 0
            self._blocks_to_pin -= is_pinned
            self._block = torch.empty(self._block_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        else:
            self._block = self._free.get()
        self._filled_bytes = 0
        return self._block

    def _pass_on(self) -> None:
        """Give the block to the thread that writes, which waits for the copies into it."""
        if self._block is None:
            return
        if self._filled_bytes:
            self._full.put((self._block, self._filled_bytes, self.end_of_copies()))
        else:
            self._free.put(self._block)
        self._block = None
        self._filled_bytes = 0
