"""The losses of a model over all of a text.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise import device as devices
from shardwise.data import Batch, Batches
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.models import Bert

_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a text.

    Attributes:
        losses: mean loss in nats of each objective's targets. counted: how many these are.
        accuracies: of objectives with a few right answers, the part of the targets that the model finds likeliest.
        tokens: tokens that were read, padding left out. sequences: samples that they came in. seconds: without start.
    """

    losses: dict[str, float]
    counted: dict[str, int]
    accuracies: dict[str, float]
    tokens: int
    sequences: int
    seconds: float

    @property
    def loss(self) -> float:
        """The sum of the objectives' means, which training minimises."""
        return sum(self.losses.values())

    @property
    def perplexity(self) -> float | None:
        """exp(loss) of the next token; None where that is not what the model predicts."""
        loss = self.losses.get("lm")
        return None if loss is None else math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
    mesh: Mesh,
    micro_batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Mean losses over every sample of `batches`, each once; collective, equal on every rank.

    Sums are kept in float64 and divided once by their counts over all ranks: how samples are cut into micro-batches and
    over ranks changes no more than float32's own rounding inside of one. `progress` is called now and then with the
    samples done and all samples.
    """
    model.eval()
    start = reported = time.perf_counter()
    names, portion = batches.objectives, mesh.dp.size * micro_batch
    losses_K, correct_K = torch.zeros(2, len(names), dtype=torch.float64, device=mesh.device).unbind()
    counts_K, tokens = torch.zeros(len(names), dtype=torch.int64), 0
    rounds = -(-batches.num_samples // portion)
    for number, batch in enumerate(
        batches.eval_batches(rounds, portion, mesh.dp.rank, mesh.dp.size, micro_batch), start=1
    ):
        sums, right = _scores(model, batch, mesh.device)
        losses_K += sums
        if right is not None:
            correct_K += right
        counts_K += torch.from_numpy(batch.counts)
        tokens += _tokens(batch)
        if progress is not None and time.perf_counter() - reported > _REPORT_SECONDS:
            reported = time.perf_counter()
            progress(min(number * portion, batches.num_samples), batches.num_samples)
    read = torch.tensor([float(tokens)], dtype=torch.float64)
    own = torch.cat((losses_K, correct_K, torch.cat((counts_K.double(), read)).to(mesh.device)))
    *sums_by, all_tokens = comm.all_reduce_(own, mesh.dp).tolist()
    devices.synchronize(mesh.device)
    count = len(names)
    losses, correct, counted = (dict(zip(names, sums_by[i * count :], strict=False)) for i in range(3))
    return Evaluation(
        losses={name: losses[name] / max(counted[name], 1.0) for name in names},
        counted={name: int(counted[name]) for name in names},
        accuracies={name: correct[name] / max(counted[name], 1.0) for name in names if isinstance(model, Bert)},
        tokens=int(all_tokens),
        sequences=batches.num_samples,
        seconds=time.perf_counter() - start,
    )


def _scores(model: nn.Module, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Sums of the losses `[K]`, and how many targets are likeliest `[K]` where the model knows."""
    inputs = {name: torch.from_numpy(array).to(device) for name, array in batch.inputs.items()}
    if isinstance(model, Bert):
        return model.scores(**inputs)
    draws_masks = "dropout" in inspect.signature(model.forward).parameters
    sums: object = model(**inputs, **({"dropout": None} if draws_masks else {}))
    if not isinstance(sums, Tensor) or sums.numel() != len(batch.counts):
        raise ConfigError(f"{type(model).__name__}.forward must return the sum of its targets' losses, not {sums!r}")
    return sums.reshape(-1), None


def _tokens(batch: Batch) -> int:
    """Tokens of a micro-batch that are no padding."""
    mask = batch.inputs.get("mask_SB")
    if mask is None:
        return int(batch.counts.sum())
    # A sample that counts nothing is made of special tokens alone.
    real_B = batch.inputs["next_sentence_B"] >= 0
    return int(mask[:, real_B].sum())
