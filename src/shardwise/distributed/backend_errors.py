"""The meaning of exceptions of libraries that carry messages between ranks."""

from __future__ import annotations

import torch.distributed as dist


def is_lost_connection(error: BaseException) -> bool:
    """True if an exception says that another rank is gone, whichever library carries the messages."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER_WORDS)


_LOST_PEER_WORDS = (
    "gloo",
    # gloo says so, without its name, of a rank that did not answer in time.
    "Application timeout caused pair closure",
    # NCCL says so of a rank whose process has exited, and of network errors.
    "ncclRemoteError",
    # NCCL says so where a socket was closed.
    "ncclSystemError",
    # NCCL's watchdog aborts the communicator of a collective that does not end.
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
    "Connection closed by remote peer",
)


def is_shared_device(error: BaseException) -> bool:
    """True if an exception says that two ranks use one accelerator."""
    return isinstance(error, RuntimeError) and "Duplicate GPU detected" in str(error)
