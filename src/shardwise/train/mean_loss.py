"""The loss of a batch: a micro-batch on the device, its result, and the division by the targets of the batch.

Shapes: B = samples, K = objectives of the loss.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.config import PLAIN_MODULE, TrainConfig
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.distributed import collectives, devices
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.layers.dropout import DropoutKey
from shardwise.models.blocks import gives_losses
from shardwise.models.masks import DocumentSizes


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a training: a `Batch` of its data on this rank's device."""

    inputs: dict[str, Tensor]  # tensors by the names of the arguments of a family's forward
    counts_K: Tensor  # counted targets of each objective
    samples: npt.NDArray[np.int64]  # each sample's number in the run, [B], on the host
    samples_B: Tensor
    lengths_B: Tensor | None = None  # tokens of each sequence before its padding; None where no sequence is padded
    # Sizes of the documents in whole samples; None where documents do not attend by themselves.
    documents: DocumentSizes | None = None

    @staticmethod
    def on(device: torch.device, batch: Batch) -> MicroBatch:
        """Copy a batch to a device."""

        def copied(array: npt.NDArray[np.int64]) -> Tensor:
            return devices.to_device(torch.from_numpy(array), device)

        inputs = {name: copied(array) for name, array in batch.inputs.items()}
        lengths_B = None
        if batch.lengths is not None and (batch.lengths < len(inputs["ids_SB"])).any():
            lengths_B = copied(batch.lengths)
        documents = DocumentSizes.of(batch.inputs.get("starts_SB"))
        return MicroBatch(inputs, copied(batch.counts), batch.samples, copied(batch.samples), lengths_B, documents)

    def part(self, group: Group) -> MicroBatch:
        """The tokens that this rank has of each sample, for a group that shares them (`layers/context.py`).

        Targets were shifted before: each token keeps its own.
        """
        if (group.grain or group.size) == 1:
            return self
        from shardwise.layers.context import chunks_of_rank

        inputs = {name: chunks_of_rank(tensor, group) for name, tensor in self.inputs.items()}
        counts_K = (inputs["targets_SB"] != IGNORE).sum().view(1)
        return replace(self, inputs=inputs, counts_K=counts_K, documents=None)

    def empty_on(self, device: torch.device) -> MicroBatch:
        """A micro-batch of the same shapes on another device, with any numbers."""

        def empty(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=device)

        inputs = {name: empty(tensor) for name, tensor in self.inputs.items()}
        lengths_B = None if self.lengths_B is None else empty(self.lengths_B)
        return replace(
            self, inputs=inputs, counts_K=empty(self.counts_K), samples_B=empty(self.samples_B), lengths_B=lengths_B
        )

    def dropout_key(self, train: TrainConfig, step: int) -> DropoutKey:
        """The key of this micro-batch's dropout masks in a step of the training."""
        return DropoutKey(train.seed, step, self.samples_B, int(self.samples[0]), train.dropout_mode)

    def call_of(self, part: nn.Module, x: Tensor | None = None, dropout: DropoutKey | None = None) -> Callable[[], Any]:
        """The call of a part of a model with this micro-batch, for the caller to make.

        `dropout`, `lengths_B` and `documents` are given only if its forward names them.

        Args:
            x: output of the part before; None for the first part.
            dropout: key of the step; None in an evaluation.
        """
        parameters = _signature(type(part).forward).parameters
        arguments: dict[str, Any] = dict(self.inputs)
        # By position: a user's own model may give these two any names.
        positional = [arguments.pop(name) for name in ("ids_SB", "targets_SB") if name in arguments]
        if "dropout" in parameters:
            arguments["dropout"] = dropout
        if "lengths_B" in parameters and self.lengths_B is not None:
            arguments["lengths_B"] = self.lengths_B
        if "documents" in parameters:
            arguments["documents"] = self.documents
        if x is not None:
            arguments["x"] = x
        return functools.partial(part, *positional, **arguments)

    def result(self, part: nn.Module, returned: object) -> Tensor:
        """The output of a part of a model, checked: x for the next part, or sums of losses `[K]` of the last part.

        Raises:
            ConfigError: a model of the user's own returned something else.
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
            f"({len(self.counts_K)} in all), not {shown}; {PLAIN_MODULE}"
        )

    def tokens(self) -> Tensor:
        """The number of targets of the next token; for BERT, of tokens that are not padding."""
        if "mask_SB" not in self.inputs:
            return self.counts_K.sum()
        # Samples that only fill up a micro-batch have no label, and their special tokens do not count.
        is_real_B = self.inputs["next_sentence_B"] >= 0
        return (self.inputs["mask_SB"].sum(dim=0) * is_real_B).sum()

    def bytes(self, bytes_V: Tensor) -> Tensor:
        """The bytes of the targets' text; `bytes_V`: those of each id."""
        targets_SB = self.inputs["targets_SB"]
        # No selection of targets, for whose number the host would wait.
        return (bytes_V[targets_SB.clamp(min=0)] * (targets_SB != IGNORE)).sum()


# A signature takes tens of microseconds, and is asked for each micro-batch and stage.
_signature = functools.cache(inspect.signature)


_LARGEST_EXPONENT = 700  # losses from here on give no perplexity: exp(710) exceeds the largest float, 1.8e308


def count_targets(micro_batches: Sequence[MicroBatch], data_parallel: Group) -> Pending:
    """Start counting the targets of each objective in the global batch, [K]. Collective over data parallelism."""
    counts_K = torch.stack([batch.counts_K for batch in micro_batches]).sum(dim=0)
    return collectives.all_reduce_async(counts_K, data_parallel)


def mean_over_targets(sums_K: Tensor, counts_K: Tensor) -> Tensor:
    """Divide each objective's sum over targets by the number of these targets; 0 for an objective without targets.

    A model returns sums, and this is the only place that divides them. In training `counts_K` are those of the global
    batch: the shares of all micro-batches and ranks then add up to the mean, however the batch is cut.
    """
    # Counts are int64: divided by them, sums in bfloat16 (a user's own model) would stay in bfloat16.
    return sums_K / counts_K.clamp(min=1).to(torch.promote_types(sums_K.dtype, torch.float32))


def perplexity(loss: float) -> float:
    """Return exp(mean loss), or infinity where a float cannot hold it."""
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
