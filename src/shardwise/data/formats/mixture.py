"""Several named sources of any format, mixed by weights that may change from stage to stage (`data.mixture`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from shardwise.config import Config, samples_between
from shardwise.data import split
from shardwise.data.formats import common
from shardwise.data.samples import batch
from shardwise.data.samples.order import Stage, mix_integer

_SEED_BITS = 63


@dataclass(frozen=True)
class PreparedMixture(common.PreparedData):
    """The data of all sources, by name."""

    sources: Mapping[str, common.PreparedData]

    @property
    def source_fingerprints(self) -> dict[str, str]:
        return {name: data.fingerprint for name, data in self.sources.items()}

    def count(self, part: split.Part) -> int:
        return sum(data.count(part) for data in self.sources.values())

    def beginning(self, part: split.Part, tokens: int) -> list[int]:
        return next((row for data in self.sources.values() if (row := data.beginning(part, tokens))), [])

    def batches(
        self, config: Config, part: split.Part, *, evaluation: bool = False, tail: bool = False
    ) -> batch.Batches | None:
        """The batches of a part, see `PreparedData`; an evaluation leaves out sources with less than one sample."""
        by_name: dict[str, batch.Batches] = {}
        for name, data in self.sources.items():
            batches = data.batches(config_of_source(config, name), part, evaluation=evaluation, tail=tail)
            if batches is not None:
                by_name[name] = batches
        if not by_name:
            return None
        if evaluation:
            weights = {name: weight for name, weight in _evaluation_weights(config).items() if name in by_name}
            return batch.BlendedBatches(by_name, [Stage(0, 0, weights)])
        return batch.BlendedBatches(by_name, first_stages(config), config.samples_together)


def config_of_source(config: Config, name: str) -> Config:
    """The configuration of a run that reads a source alone, in the order that it has within the mixture."""
    # The order of a source depends on its name, so that other sources change nothing of it.
    seed = mix_integer(config.train.seed, xxhash.xxh3_64_intdigest(name.encode())) >> (64 - _SEED_BITS)
    data = config.data.source_section(name)
    # A source that holds nothing out is trained on alone.
    eval_every = config.train.eval_every if data.split_weights[1] else 0
    return config.model_copy(
        update={
            "data": data,
            "hooks": config.hooks.model_copy(update={"data": config.data.mixture[name].hook}),
            "train": config.train.model_copy(update={"seed": seed, "eval_every": eval_every}),
        }
    )


def first_stages(config: Config) -> list[Stage]:
    """The stages of a run from its first step on."""
    return [Stage(0, 0, _first_weights(config)), *_later_stages(config, 0, 0)]


def continued_stages(config: Config, recorded: Sequence[Mapping[str, Any]], step: int, position: int) -> list[Stage]:
    """The stages of a run that continues after `step` steps, at `position` in the order of the data.

    They count blocks of samples (`size_stages.py`). Stages that have begun stay where they began, also if the batch was
    another one then, and the later ones begin after their steps, also if `train.skip_batches` leaves out samples
    before.

    Args:
        recorded: stages in the checkpoint, whose weights are those of the configuration (`size_stages.changed_stages`).
    """
    begun = [Stage(**stage) for stage in recorded if stage["step"] < step]
    return [*begun, *_later_stages(config, step, position)]


def _first_weights(config: Config) -> dict[str, float]:
    return {name: source.weight for name, source in config.data.mixture.items() if source.weight is not None}


def _evaluation_weights(config: Config) -> dict[str, float]:
    """The weight of each source in the stage in which it is first read."""
    weights: dict[str, float] = {}
    for stage in first_stages(config):
        weights = {**stage.weights, **weights}
    return {name: weights[name] for name in config.data.sources_read}


def _later_stages(config: Config, step: int, position: int) -> list[Stage]:
    return [
        Stage(
            stage.at,
            (position + samples_between(config, step, stage.at)) // config.samples_together,
            dict(stage.weights),
        )
        for stage in config.data.stages
        if stage.weights and stage.at >= step
    ]
