"""The totals that a rank adds up between logged steps: losses by source of a mixture, and loads of experts.

Losses by source are those that the forward pass computes anyway. Loads are over the whole global batch and all blocks.

Shapes: M = sources of a mixture; of experts L = blocks of the whole model that have some, N = most experts of a block,
K = `SUMS` of `config/routing.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config import ModelConfig
from shardwise.config.routing import SUMS, Routing
from shardwise.data.samples.batch import BlendedBatches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.layers.experts import Experts, experts_of
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
        self._sums_2M = torch.zeros(2, len(batches.batches), device=mesh.device)

    @contextmanager
    def of_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Count the losses of the samples of a micro-batch that are computed in the body of the `with` statement."""
        losses = SampleLosses()
        with losses.record():
            yield
        if losses.sums is not None:
            sources_B = torch.from_numpy(self._batches.sources(batch.samples))
            self._sums_2M.index_add_(1, devices.to_device(sources_B, self._mesh.device), losses.sums)

    def take(self) -> Tensor:
        """Return the sums over all ranks, `[2, M]`, and begin anew. Collective over data and pipeline parallelism."""
        sums_2M = collectives.all_reduce_(self._sums_2M, self._mesh.replicas)
        sums_2M = collectives.all_reduce_(sums_2M, self._mesh.pp)
        self._sums_2M = torch.zeros_like(sums_2M)
        return sums_2M

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


_PARTS = 2.0**32
"""Parts of 1 in which sums travel, as whole numbers beside the loads: no order of the ranks changes their total."""


class ExpertTotals:
    """Loads and sums of a step by block. `balance_experts` begins them anew after each step.

    Args:
        layers: layers of experts on this rank, by the numbers of their blocks.
        routings: rule of each block with experts of the whole model, by its number.
    """

    def __init__(self, layers: Mapping[int, Experts], routings: Mapping[int, Routing], mesh: Mesh) -> None:
        self._rows = {row: layers[number] for row, number in enumerate(routings) if number in layers}
        self._routings = routings
        self._mesh = mesh

    @staticmethod
    def of(model: nn.Module, config: ModelConfig, mesh: Mesh) -> list[ExpertTotals]:
        """Return the totals of this rank's part of a model; empty if the whole model has no experts."""
        if config.is_own:
            layers = dict(enumerate(experts_of(model)))
            routings = {number: layer.router.routing for number, layer in layers.items()}
        else:
            # Another rank has other blocks: the name tells which these are.
            layers = {int(re.findall(r"\d+", layer.name)[0]): layer for layer in experts_of(model)}
            routings = config.routings
        return [ExpertTotals(layers, routings, mesh)] if routings else []

    def take(self) -> Tensor:
        """Return the totals of all blocks over all ranks, `[L, N + K]` in float32. Collective over all ranks.

        Loads are exact up to 2^24 rows of an expert.
        """
        most = max(routing.experts for routing in self._routings.values())
        device = self._mesh.device
        place = device if devices.has_wide_integers(device) else torch.device("cpu")
        totals = torch.zeros(len(self._routings), most + len(SUMS), dtype=torch.int64, device=place)
        for row, layer in self._rows.items():
            # Tensor-parallel ranks have the same rows.
            if self._mesh.tp.rank == 0:
                totals[row, : len(layer.loads)] = layer.loads
            totals[row, most:] = (layer.sums.to(place) * _PARTS).round()
        collectives.all_reduce_(totals, self._mesh.world)
        for row, layer in self._rows.items():
            layer.loads_of_batch = totals[row, : len(layer.loads)].to(device)
        return torch.cat([totals[:, :most].float(), totals[:, most:].float() / _PARTS], dim=1).to(device)

    def record(self, totals: Sequence[float], _position: int) -> StepDetail | None:
        """Return the record of the numbers of `take`, on the host; None if no token came by an expert.

        It has the largest load, which is the most rows of an expert over the mean of its block; the part of all experts
        that had no token; and the entropy of a token's normalised scores over ln N, a mean over tokens and blocks: 1
        where all scores are equal. Objectives of routers (`layers/balance.py`) are without their coefficients, and
        means over the blocks, but for `pooled`. Loads, the rows of each expert, are by number of the block.
        """
        width = len(totals) // len(self._routings)
        loads: dict[int, tuple[int, ...]] = {}
        sums = dict.fromkeys(SUMS, 0.0)
        tokens = 0.0
        for at, (number, routing) in zip(range(0, len(totals), width), self._routings.items(), strict=True):
            loads[number] = tuple(map(int, totals[at : at + routing.experts]))
            tokens += sum(loads[number]) / routing.per_token
            for name, value in zip(SUMS, totals[at + width - len(SUMS) : at + width], strict=True):
                # A router of one expert has no entropy.
                sums[name] += value / math.log(max(routing.experts, 2)) if name == SUMS[0] else value
        if not tokens:
            return None
        every = [load for block in loads.values() for load in block]
        numbers = {
            "expert_load_max": max(max(block) * len(block) / max(sum(block), 1) for block in loads.values()),
            "expert_idle": every.count(0) / len(every),
            "expert_entropy": sums.pop(SUMS[0]) / tokens,
        }
        # An objective that is computed is above 0.
        losses = {name: value for name, value in sums.items() if value}
        facts = {"balance_losses": losses} if losses else {}
        return StepDetail(numbers, facts, scalars={"balance": losses}, lines={"experts": {"loads": loads}})
