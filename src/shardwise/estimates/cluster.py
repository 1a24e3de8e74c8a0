"""The facts that a run asks of machines that need not be here; `shardwise_plan` describes them."""

from __future__ import annotations

from typing import Protocol


class _ClusterDevice(Protocol):
    """A device that a rank would compute with."""

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> float:
        """Its bytes."""
        ...

    @property
    def is_accelerator(self) -> bool: ...

    def require_fp8(self) -> float:
        """Return its FLOP/s in fp8. Raises ConfigError if it has none."""
        ...


class Cluster(Protocol):
    """The facts of a planned cluster that the estimates of a run ask for."""

    @property
    def device(self) -> _ClusterDevice: ...

    @property
    def world(self) -> int: ...
