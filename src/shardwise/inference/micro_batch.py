"""How a model is called on a micro-batch, and what it must return, in a training and in an evaluation.

Shapes: B = samples, K = objectives of the loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwise.data import Batch
from shardwise.errors import ConfigError
from shardwise.models import gives_losses
from shardwise.parallel import DropoutKey


@dataclass(frozen=True)
class MicroBatch:
    """A `Batch` on this rank's device.

    Attributes:
        inputs: by the keywords of the model's forward.
        counts_K: counted targets of each objective, [K].
        samples: each sample's number in the run, [B], on the host.
        lengths_B: tokens of each sequence before its padding, [B]; None where no sequence is padded.
    """

    inputs: dict[str, Tensor]
    counts_K: Tensor
    samples: npt.NDArray[np.int64]
    lengths_B: Tensor | None = None

    @staticmethod
    def on(device: torch.device, batch: Batch) -> MicroBatch:
        """A batch, copied to a device."""
        inputs = {name: torch.from_numpy(array).to(device) for name, array in batch.inputs.items()}
        lengths_B = None
        if batch.lengths is not None and (batch.lengths < len(inputs["ids_SB"])).any():
            lengths_B = torch.from_numpy(batch.lengths).to(device)
        return MicroBatch(inputs, torch.from_numpy(batch.counts).to(device), batch.samples, lengths_B)

    def arguments(self, part: nn.Module, x: Tensor | None = None, dropout: DropoutKey | None = None) -> dict[str, Any]:
        """The keyword arguments of a part of a model, as far as its forward names them.

        Args:
            x: what the part before returned; None for the first.
            dropout: of the step; None in an evaluation.
        """
        named = _keywords(type(part).forward)
        given: dict[str, Any] = dict(self.inputs)
        if "dropout" in named:
            given["dropout"] = dropout
        if "lengths_B" in named and self.lengths_B is not None:
            given["lengths_B"] = self.lengths_B
        return given if x is None else given | {"x": x}

    def result(self, part: nn.Module, returned: object) -> Tensor:
        """What a part of a model returned: x for the next part, or of the last part sums of losses `[K]`.

        Raises:
            ConfigError: it is neither, as the forward of a model of the user's own may return anything.
        """
        if not gives_losses(part):
            assert isinstance(returned, Tensor), "only a family's model is cut into parts"
            return returned
        if isinstance(returned, Tensor) and returned.numel() == len(self.counts_K):
            return returned.reshape(-1)
        shown = f"a {type(returned).__name__}"
        if isinstance(returned, Tensor):
            shown = f"a tensor of shape {tuple(returned.shape)}"
        raise ConfigError(
            f"model.family ({type(part).__name__}): forward must return the sum of its targets' losses "
            f"({len(self.counts_K)} in all), not {shown}"
        )

    def tokens(self) -> Tensor:
        """The number of tokens that are not padding."""
        if "mask_SB" not in self.inputs:
            return self.counts_K.sum()
        # A sample that counts nothing is made of special tokens alone.
        is_real_B = self.inputs["next_sentence_B"] >= 0
        return (self.inputs["mask_SB"].sum(dim=0) * is_real_B).sum()


@functools.cache
def _keywords(forward: Callable[..., Any]) -> Collection[str]:
    """The names of a function's arguments."""
    return inspect.signature(forward).parameters
