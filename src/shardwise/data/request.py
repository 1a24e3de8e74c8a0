"""The request of a run for its data: the facts of its configuration that decide them, and the stages of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from shardwise.base.files import cache_root
from shardwise.config import Config, DataConfig, samples_between
from shardwise.data.rows import Part
from shardwise.data.samples.order import MixtureStage, mix_integer

_SEED_BITS = 63
Announce = Callable[[str], None] | None
"""Called with one line when something is fetched or built."""


@dataclass(frozen=True)
class DataRequest:
    """The facts of a run by which its data are opened and cut into samples."""

    data: DataConfig  # section `data`, or that of a source of a mixture
    hook: str | None  # object of the user that gives the samples (`hooks.data`); None: the keys of `data` name them
    family: str
    objectives: tuple[str, ...]  # objectives of the model: `("lm",)`, or `("mlm", "nsp")` of BERT
    vocab_size: int
    pad_token_id: int | None  # id that a model of sentence pairs pads with; None for others
    token_types: int | None  # segments that a model of sentence pairs tells apart; None for others
    # Weights that the run starts from (`checkpoint.load`), which have a tokenizer; None if it starts anew.
    weights: str | None
    sequence_length: int
    block_length: int  # tokens that all stages of the run keep together in the order of the data
    unit_length: int  # tokens of the shortest samples into which whole documents are packed
    seed: int
    eval_every: int
    has_sets: bool
    sample_prompt: str | None
    stages: tuple[MixtureStage, ...]  # weights of a mixture's sources from the first step on; empty for other data
    root: Path  # the data cache, for results that take long to make
    announce: Announce = None  # called with a line before such work; None tells nobody
    any_size: bool = False  # True if parts may hold less than a sample each, which training needs

    @staticmethod
    def of(
        config: Config, cache_dir: Path | None = None, announce: Announce = None, *, any_size: bool = False
    ) -> DataRequest:
        """The request of the run of a configuration; `cache_dir`: see `cache_root`."""
        shapes = config.shapes
        return DataRequest(
            data=config.data,
            hook=config.hooks.data,
            family=config.model.family,
            objectives=config.model.objectives,
            vocab_size=config.model.vocab_size,
            pad_token_id=getattr(config.model, "pad_token_id", None),  # a fact of BERT's configuration alone
            token_types=shapes.token_types if shapes is not None and shapes.predicts_sentences else None,
            weights=config.checkpoint.load,
            sequence_length=config.train.sequence_length,
            block_length=config.block_length,
            unit_length=config.unit_length,
            seed=config.train.seed,
            eval_every=config.train.eval_every,
            has_sets=bool(config.evaluation.sets),
            sample_prompt=config.log.sample_prompt,
            stages=tuple(continued_stages(config, (), 0, 0)) if config.data.mixture else (),
            root=cache_root(cache_dir),
            announce=announce,
            any_size=any_size,
        )

    @property
    def in_pairs(self) -> bool:
        """True if samples are pairs of sentences."""
        return "nsp" in self.objectives

    @property
    def samples_together(self) -> int:
        """The samples of a block."""
        return self.block_length // self.sequence_length

    @property
    def needed_parts(self) -> list[Part]:
        """The parts that training reads, each of which must hold a sample."""
        if self.any_size:
            return []
        return ["train", "eval"] if self.eval_every > 0 and self.data.holds_out else ["train"]

    def of_source(self, name: str) -> DataRequest:
        """The request of a run that reads a source of the mixture alone, in its order within the mixture."""
        data = self.data.source_section(name)
        return replace(
            self,
            data=data,
            hook=self.data.mixture[name].hook,
            seed=seed_of_source(self.seed, name),
            # A source that holds nothing out is trained on alone.
            eval_every=self.eval_every if data.split_weights[1] else 0,
            stages=(),
        )


def seed_of_source(seed: int, name: str) -> int:
    """The seed of the order of a mixture's source: it depends on its name alone, and not on other sources."""
    return mix_integer(seed, xxhash.xxh3_64_intdigest(name.encode())) >> (64 - _SEED_BITS)


def continued_stages(
    config: Config, recorded: Sequence[Mapping[str, Any]], step: int, position: int
) -> list[MixtureStage]:
    """The stages of a mixture in a run that continues after `step` steps, at `position` in the order of the data.

    They count blocks of samples (`size_stages.py`). Stages that have begun stay where they began, also if the batch was
    another one then, and the later ones begin after their steps, also if `train.skip_batches` leaves out samples
    before.

    Args:
        recorded: stages in the checkpoint. Their weights are those of the configuration, which
            `size_stages.changed_size_stages` checks.
    """
    weights = {name: source.weight for name, source in config.data.mixture.items() if source.weight is not None}
    begun = (
        [MixtureStage(**stage) for stage in recorded if stage["step"] < step] if step else [MixtureStage(0, 0, weights)]
    )
    later = [
        MixtureStage(
            stage.at,
            (position + samples_between(config, step, stage.at)) // config.samples_together,
            dict(stage.weights),
        )
        for stage in config.data.stages
        if stage.weights and stage.at >= step
    ]
    return [*begun, *later]
