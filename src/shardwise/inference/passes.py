"""The forward pass of a model that is in one piece, or in the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.config import ParallelConfig
from shardwise.mesh import Mesh
from shardwise.models import Stages
from shardwise.models.blocks import Family
from shardwise.pipeline import Compute, relay


class Passes:
    """Brings micro-batches through all parts of a model.

    Args:
        model: whole, or this rank's stages.
        parallel: how the model is cut into stages.
        mesh: of the job.

    Attributes:
        parts: those of the model that are on this rank.
    """

    def __init__(self, model: nn.Module, parallel: ParallelConfig | None, mesh: Mesh) -> None:
        self._model, self._parallel, self._mesh = model, parallel, mesh
        self.parts: list[nn.Module] = list(model) if isinstance(model, Stages) else [model]

    @torch.no_grad()
    def run(self, compute: Compute, lengths_and_sizes: Sequence[tuple[int, int]]) -> None:
        """Run `compute(part, x, number)` on every part and micro-batch; collective over the pipeline.

        lengths_and_sizes: of each micro-batch, how much of the sequences a rank has between blocks, and how many
        sequences there are.
        """
        if not isinstance(self._model, Stages):
            for number in range(len(lengths_and_sizes)):
                compute(self._model, None, number)
            return
        assert self._parallel is not None, "stages come with the configuration that cut them"
        like, hidden = next(self._model.parameters()), self._hidden_size()

        def empty(number: int) -> Tensor:
            return torch.empty(*lengths_and_sizes[number], hidden, dtype=like.dtype, device=self._mesh.device)

        relay(self._model, self._parallel, self._mesh, compute, len(lengths_and_sizes), empty)

    def _hidden_size(self) -> int:
        part = self.parts[0]
        assert isinstance(part, Family), "only a family's model is cut into stages"
        return int(part.config.hidden_size)
