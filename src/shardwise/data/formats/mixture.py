"""Several named sources of any format, mixed by weights that may change from stage to stage (`data.mixture`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.data.formats import common
from shardwise.data.request import DataRequest
from shardwise.data.rows import Part
from shardwise.data.samples import batch
from shardwise.data.samples.order import Stage


@dataclass(frozen=True)
class PreparedMixture(common.PreparedData):
    """The data of all sources, by name."""

    sources: Mapping[str, common.PreparedData]

    @property
    def source_fingerprints(self) -> dict[str, str]:
        return {name: data.fingerprint for name, data in self.sources.items()}

    def count(self, part: Part) -> int:
        return sum(data.count(part) for data in self.sources.values())

    def beginning(self, part: Part, tokens: int) -> list[int]:
        return next((row for data in self.sources.values() if (row := data.beginning(part, tokens))), [])

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        """The batches of a part, see `PreparedData`; an evaluation leaves out sources with less than one sample."""
        by_name: dict[str, batch.Batches] = {}
        for name, data in self.sources.items():
            batches = data.batches(request.of_source(name), part, evaluation=evaluation, tail=tail)
            if batches is not None:
                by_name[name] = batches
        if not by_name:
            return None
        if evaluation:
            weights = {name: weight for name, weight in _evaluation_weights(request).items() if name in by_name}
            return batch.BlendedBatches(by_name, [Stage(0, 0, weights)])
        return batch.BlendedBatches(by_name, request.stages, request.samples_together)


def _evaluation_weights(request: DataRequest) -> dict[str, float]:
    """The weight of each source in the stage in which it is first read."""
    weights: dict[str, float] = {}
    for stage in request.stages:
        weights = {**stage.weights, **weights}
    return {name: weights[name] for name in request.data.sources_read}
