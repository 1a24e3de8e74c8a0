"""The losses of a model on a text: evaluations within a training, and those of `shardwise evaluate`.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from shardwise.config import ParallelConfig
from shardwise.data.samples.batch import Batches
from shardwise.distributed import collectives
from shardwise.distributed.devices import widest_dtype
from shardwise.distributed.mesh import Mesh
from shardwise.models.bert import Bert
from shardwise.models.blocks import Stages, gives_losses
from shardwise.pipeline.forward import relay
from shardwise.train.micro_batch import MicroBatch

_REPORT_SECONDS = 10.0


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        losses: mean loss of each objective's targets, in nats.
        counted: targets of each objective.
        accuracies: of each objective of BERT, the part of the targets that the model finds likeliest; else empty.
        tokens: tokens read, without padding; 0 where they were not counted.
        seconds: without the start.
        sequences: samples read; 0 where they were not counted.
    """

    losses: dict[str, float]
    counted: dict[str, int]
    accuracies: dict[str, float]
    tokens: int
    seconds: float
    sequences: int = 0

    @property
    def loss(self) -> float:
        """The sum of the objectives' means, which training minimises."""
        return sum(self.losses.values())

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the next token; None for a model that predicts something else."""
        loss = self.losses.get("lm")
        return None if loss is None else perplexity(loss)


@torch.no_grad()
def evaluate_rounds(
    model: nn.Module,
    rounds: Iterable[Sequence[MicroBatch]],
    objectives: Sequence[str],
    mesh: Mesh,
    parallel: ParallelConfig | None = None,
    *,
    is_scored: bool = False,
) -> Evaluation:
    """Mean losses over micro-batches, without dropout; collective, equal on every rank.

    Sums are kept in float64 where the device has it, so that only the rounding of float32 within a micro-batch depends
    on how samples are cut into micro-batches and over ranks.

    Args:
        rounds: micro-batches that go through the model together; every rank has the same number of them.
        objectives: their names.
        parallel: how a model in pipeline stages is cut.
        is_scored: also count tokens, and the right answers of BERT.
    """
    model.eval()
    start, K = time.perf_counter(), len(objectives)
    cut = mesh.tp.size if parallel is not None and parallel.sequence else 1
    # Losses [K], numbers of targets [K]; if scored also right answers [K] and the number of tokens [1].
    total = torch.zeros(3 * K + 1 if is_scored else 2 * K, dtype=widest_dtype(mesh.device), device=mesh.device)
    for at_once in rounds:

        def compute(part: nn.Module, x: Tensor | None, number: int, at_once: Sequence[MicroBatch] = at_once) -> Tensor:
            batch = at_once[number]
            if is_scored and isinstance(part, Bert) and part.part.is_last:
                out, correct_K = part.scores(**batch.inputs, x=x)
                total[2 * K : -1] += correct_K
            else:
                out = batch.result(part, part(**batch.arguments(part, x)))
            if gives_losses(part):
                total[:K] += out
                total[K : 2 * K] += batch.counts_K
                if is_scored:
                    total[-1] += batch.tokens()
            return out

        shapes = [batch.inputs["ids_SB"].shape for batch in at_once]
        relay(model, parallel, mesh, compute, [(length // cut, samples) for length, samples in shapes])
    # Over the pipeline too, as only its last stage has losses.
    sums: list[float] = collectives.all_reduce_(collectives.all_reduce_(total, mesh.dp), mesh.pp).tolist()
    losses, counted, correct = (dict(zip(objectives, sums[row * K :], strict=False)) for row in range(3))
    knows_likeliest = is_scored and isinstance(model[0] if isinstance(model, Stages) else model, Bert)
    return Evaluation(
        losses={name: losses[name] / max(counted[name], 1.0) for name in objectives},
        counted={name: int(counted[name]) for name in objectives},
        accuracies={name: correct[name] / max(counted[name], 1.0) for name in objectives if knows_likeliest},
        tokens=int(sums[-1]) if is_scored else 0,
        seconds=time.perf_counter() - start,
    )


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
        progress: called every 10 seconds with the samples done and all samples.
        parallel: how a model in pipeline stages is cut.
    """
    rounds = _rounds(batches, mesh, micro_batch, progress)
    evaluation = evaluate_rounds(model, rounds, batches.objectives, mesh, parallel, is_scored=True)
    return replace(evaluation, sequences=batches.num_samples)


def _rounds(
    batches: Batches, mesh: Mesh, micro_batch: int, progress: Callable[[int, int], None] | None
) -> Iterator[list[MicroBatch]]:
    """Yield every sample once, as many micro-batches at a time as there are pipeline ranks."""
    reported, done, portion = time.perf_counter(), 0, mesh.dp.size * micro_batch
    count = -(-batches.num_samples // portion)
    waiting = batches.eval_batches(count, portion, mesh.dp.rank, mesh.dp.size, micro_batch)
    while at_once := [MicroBatch.on(mesh.device, batch) for batch in islice(waiting, mesh.pp.size)]:
        yield at_once
        done += len(at_once) * portion
        if progress is not None and time.perf_counter() - reported > _REPORT_SECONDS:
            reported = time.perf_counter()
            progress(min(done, batches.num_samples), batches.num_samples)
