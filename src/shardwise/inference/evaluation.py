"""The losses of a model over a text: the evaluations of a training, and those of `shardwise evaluate`.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise import device as devices
from shardwise.config import ParallelConfig
from shardwise.data import Batches
from shardwise.inference.micro_batch import MicroBatch
from shardwise.inference.passes import Passes
from shardwise.mesh import Mesh
from shardwise.models import Bert, gives_losses

_REPORT_SECONDS = 10.0


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Sums:
    """What the micro-batches of all ranks add up to.

    Attributes:
        losses: of each objective.
        counted: targets of each objective.
        correct: of each objective the targets that the model finds likeliest; empty where this was not asked.
        tokens: that were read, without padding; 0 where this was not asked.
    """

    losses: list[float]
    counted: list[float]
    correct: list[float]
    tokens: float

    def means(self, sums: Sequence[float]) -> list[float]:
        """`sums`, each divided by the targets of its objective."""
        return [total / max(count, 1.0) for total, count in zip(sums, self.counted, strict=True)]


@torch.no_grad()
def sum_losses(
    model: nn.Module,
    rounds: Iterable[Sequence[MicroBatch]],
    objectives: int,
    mesh: Mesh,
    parallel: ParallelConfig | None = None,
    *,
    is_scored: bool = False,
) -> Sums:
    """Losses over micro-batches, without dropout; collective, equal on every rank.

    Sums are kept in float64: how samples are cut into micro-batches and over ranks changes no more than float32's own
    rounding inside of one.

    Args:
        rounds: micro-batches that go through the model together; as many on every rank.
        objectives: of the loss.
        parallel: how a model in pipeline stages is cut.
        is_scored: count right answers, where the model gives them, and tokens too.
    """
    model.eval()
    passes, cut = Passes(model, parallel, mesh), mesh.tp.size if parallel is not None and parallel.sequence else 1
    # Losses and numbers of targets; then right answers and the number of tokens.
    total = torch.zeros(3 * objectives + 1 if is_scored else 2 * objectives, dtype=torch.float64, device=mesh.device)
    for at_once in rounds:

        def compute(part: nn.Module, x: Tensor | None, number: int, at_once: Sequence[MicroBatch] = at_once) -> Tensor:
            batch, correct_K = at_once[number], None
            if is_scored and isinstance(part, Bert) and part.part.is_last:
                found, correct_K = part.scores(**batch.inputs, x=x)
            else:
                found = batch.result(part, part(**batch.arguments(part, x)))
            if gives_losses(part):
                total[:objectives] += found
                total[objectives : 2 * objectives] += batch.counts_K
                if is_scored:
                    total[-1] += batch.tokens()
                if correct_K is not None:
                    total[2 * objectives : -1] += correct_K
            return found

        shapes = [batch.inputs["ids_SB"].shape for batch in at_once]
        passes.run(compute, [(length // cut, samples) for length, samples in shapes])
    # The last stage of a pipeline alone has some.
    found: list[float] = comm.all_reduce_(comm.all_reduce_(total, mesh.dp), mesh.pp).tolist()
    losses, counted, correct = (found[row * objectives : (row + 1) * objectives] for row in range(3))
    knows_likeliest = is_scored and isinstance(passes.parts[0], Bert)
    return Sums(losses, counted, correct if knows_likeliest else [], tokens=found[-1] if is_scored else 0.0)


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a text.

    Attributes:
        losses: mean loss in nats of each objective's targets.
        counted: the number of these targets.
        accuracies: of objectives with a few right answers, the part of the targets that the model finds likeliest.
        tokens: that were read, without padding.
        sequences: samples that they came in.
        seconds: without the start.
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
        """That of the next token; None where that is not what the model predicts."""
        loss = self.losses.get("lm")
        return None if loss is None else perplexity(loss)


def evaluate(
    model: nn.Module,
    batches: Batches,
    mesh: Mesh,
    micro_batch: int,
    progress: Callable[[int, int], None] | None = None,
    parallel: ParallelConfig | None = None,
) -> Evaluation:
    """Mean losses over every sample of `batches`, each once; collective, equal on every rank.

    Args:
        progress: called now and then with the samples done and all samples.
        parallel: how a model in pipeline stages is cut.
    """
    start, names = time.perf_counter(), batches.objectives
    rounds = _rounds(batches, mesh, micro_batch, progress or _ignore)
    sums = sum_losses(model, rounds, len(names), mesh, parallel, is_scored=True)
    devices.synchronize(mesh.device)
    return Evaluation(
        losses=dict(zip(names, sums.means(sums.losses), strict=True)),
        counted=dict(zip(names, map(int, sums.counted), strict=True)),
        accuracies=dict(zip(names, sums.means(sums.correct), strict=True)) if sums.correct else {},
        tokens=int(sums.tokens),
        sequences=batches.num_samples,
        seconds=time.perf_counter() - start,
    )


def _rounds(
    batches: Batches, mesh: Mesh, micro_batch: int, progress: Callable[[int, int], None]
) -> Iterator[list[MicroBatch]]:
    """Every sample once, as many micro-batches at a time as there are pipeline ranks."""
    reported, done, portion = time.perf_counter(), 0, mesh.dp.size * micro_batch
    count = -(-batches.num_samples // portion)
    waiting = batches.eval_batches(count, portion, mesh.dp.rank, mesh.dp.size, micro_batch)
    while at_once := [MicroBatch.on(mesh.device, batch) for batch in islice(waiting, mesh.pp.size)]:
        yield at_once
        done += len(at_once)
        if time.perf_counter() - reported > _REPORT_SECONDS:
            reported = time.perf_counter()
            progress(min(done * portion, batches.num_samples), batches.num_samples)


def _ignore(_done: int, _samples: int) -> None:
    pass
