"""The training loss of each source of a mixture, from the losses that the forward pass computes anyway.

Shapes: K = sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.data.samples.batch import BlendedBatches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.layers.loss import SampleLosses
from shardwise.train.mean_loss import MicroBatch
from shardwise.train.step_record import StepDetail


class SourceLosses:
    """Sums of losses and targets by source since the last step that was logged.

    Only the first objective counts, which predicts tokens.
    """

    def __init__(self, batches: BlendedBatches, mesh: Mesh) -> None:
        self._batches = batches
        self._mesh = mesh
        self._sums_2K = torch.zeros(2, len(batches.batches), device=mesh.device)

    @contextmanager
    def of_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Count the losses of the samples of a micro-batch that are computed in the body of the `with` statement."""
        losses = SampleLosses()
        with losses.record():
            yield
        if losses.sums is not None:
            sources_B = torch.from_numpy(self._batches.sources(batch.samples))
            self._sums_2K.index_add_(1, devices.to_device(sources_B, self._mesh.device), losses.sums)

    def take(self) -> Tensor:
        """Return the sums over all ranks, `[2, K]`, and begin anew. Collective over data and pipeline parallelism."""
        sums_2K = collectives.all_reduce_(self._sums_2K, self._mesh.replicas)
        sums_2K = collectives.all_reduce_(sums_2K, self._mesh.pp)
        self._sums_2K = torch.zeros_like(sums_2K)
        return sums_2K

    def record(self, totals: Sequence[float], position: int) -> StepDetail:
        """Return the numbers of each source: the mean loss of its targets, and its samples so far, with their share.

        There is no loss where there were no targets, and where code of the user's own computes it.

        Args:
            totals: numbers of `take`, on the host.
            position: place in the order of the data after the step.
        """
        names = self._batches.order.names
        sources: dict[str, dict[str, Any]] = {}
        for number, (name, total, targets) in enumerate(zip(names, totals, totals[len(names) :], strict=False)):
            samples = self._batches.drawn(number, position)
            loss = total / targets if targets else None
            sources[name] = {"loss": loss, "samples": samples, "share": samples / position}
        scalars = {f"source_{key}": {name: sources[name][key] for name in sources} for key in ("loss", "share")}
        return StepDetail(facts={"sources": sources}, scalars=scalars)
