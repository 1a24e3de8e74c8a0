"""The whole configuration of a run: all sections together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, PrivateAttr

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.base.redaction import without_secrets
from shardwise.config.base_section import Section
from shardwise.config.data import DataConfig
from shardwise.config.evaluation import EvaluationConfig
from shardwise.config.families import FamilyConfig
from shardwise.config.launch import LaunchConfig
from shardwise.config.model import AnyModel, family_config
from shardwise.config.optimizer import Frequency, OptimizerConfig
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.config.precision import PrecisionConfig
from shardwise.config.sections import (
    BATCH_RULE,
    CheckpointConfig,
    CompileConfig,
    HooksConfig,
    LogConfig,
    ParallelConfig,
    Recompute,
    TrainConfig,
)
from shardwise.config.token_counts import Path, replace_at_place, step_places, steps_of_tokens, token_keys, tokens_text


@dataclass(frozen=True)
class SizeStage:
    """A stretch of steps with equal sizes, of a run whose `data.stages` change them."""

    run: Config
    begin: int  # steps before the stage
    end: int
    unit: int  # greatest common divisor of the sequence lengths of all stages
    block: int  # their least common multiple


class Config(Section):
    """Everything that a run reads, resolved and immutable."""

    model: AnyModel = Field(description="what is trained")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="how the model is cut")
    train: TrainConfig = Field(description="how long and in what portions")
    optimizer: OptimizerConfig = Field(description="the update rule, its schedule and its sharding")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="which dtype holds what")
    data: DataConfig = Field(default_factory=DataConfig, description="what the model reads")
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="what the model is evaluated on beside the held-out data"
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="what is saved and kept, and what a run starts from"
    )
    compile: CompileConfig = Field(default_factory=CompileConfig, description="what is compiled, and where it is kept")
    hooks: HooksConfig = Field(default_factory=HooksConfig, description="functions and classes of your own")
    launch: LaunchConfig = Field(default_factory=LaunchConfig, description="how the ranks work together")
    log: LogConfig = Field(default_factory=LogConfig, description="what the run reports")
    _token_counts: dict[Path, int] = PrivateAttr(default_factory=dict)
    _changeable: frozenset[str] = PrivateAttr(default_factory=frozenset)
    _size_stage: SizeStage | None = PrivateAttr(default=None)

    def recorded(self) -> dict[str, Any]:
        """The plain values that files show: as resolved, without the secrets that a text among them may hold.

        A stage of a run is recorded as the whole run.
        """
        recorded: dict[str, Any] = without_secrets(self.run.model_dump(mode="json"))
        return recorded

    def let_be_stage(self, stage: SizeStage) -> None:
        """Let this configuration be a stage of a run."""
        self._size_stage = stage

    @property
    def run(self) -> Config:
        """The configuration of the whole run."""
        return self if self._size_stage is None else self._size_stage.run

    @property
    def steps_before(self) -> int:
        """The steps of the run before the first one with these sizes."""
        return 0 if self._size_stage is None else self._size_stage.begin

    @property
    def last_step(self) -> int:
        """The last step with these sizes."""
        return self.train.steps if self._size_stage is None else self._size_stage.end

    def has_next_step(self, step: int) -> bool:
        """Return whether the step after `step` steps has these sizes; after the last one, whether that has."""
        return self.steps_before <= step and (step < self.last_step or self.last_step == self.train.steps)

    @property
    def block_length(self) -> int:
        """The tokens that all stages of the run keep together in the order of the data."""
        return self.train.sequence_length if self._size_stage is None else self._size_stage.block

    @property
    def samples_together(self) -> int:
        """The samples of a block."""
        return self.block_length // self.train.sequence_length

    @property
    def unit_length(self) -> int:
        """The tokens of the shortest samples into which whole documents are packed."""
        return self.train.sequence_length if self._size_stage is None else self._size_stage.unit

    @property
    def changeable(self) -> frozenset[str]:
        """Keys that may differ from those of the run that this configuration continues, though others may not."""
        return self._changeable

    def let_change(self, keys: frozenset[str]) -> None:
        """Let keys differ from those of the run that this configuration continues."""
        self._changeable = keys

    @property
    def shapes(self) -> FamilyConfig | None:
        """The model's configuration if it is of a family; None for a class of the user's, whose shapes nobody knows."""
        return family_config(self.model)

    @property
    def known_shapes(self) -> FamilyConfig:
        """The model's configuration of a family, after a rule has refused classes of the user's."""
        assert not self.model.is_own, "the shapes of a class of the user's are not known"
        return self.model

    @property
    def may_have_experts(self) -> bool:
        """False if all blocks of the model are dense, as its configuration says."""
        return self.shapes is None or self.shapes.is_sparse

    @property
    def is_bit_equal(self) -> bool:
        """True if all layouts that divide the grains give the same bits."""
        return self.train.bitwise

    @property
    def grains(self) -> dict[str, int]:
        """The parts of every sum over the ranks of an axis, by its short name; empty where any order is right."""
        if not self.is_bit_equal:
            return {}
        parallel = self.parallel
        return {"tp": parallel.grain, "cp": parallel.sequence_parts, "dp": self.train.gradient_groups}

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are computed apart from those of activations, in a pipeline's schedule."""
        return self.parallel.pipeline > 1 and SCHEDULES[self.parallel.schedule].splits_backward

    @property
    def recompute(self) -> Recompute:
        """The part that the backward pass computes again; none while `auto` is not replaced (`memory_choice.py`)."""
        return "none" if self.train.recompute == "auto" else self.train.recompute

    @property
    def passes_keys(self) -> bool:
        """True if ranks that share samples pass their keys and values round."""
        return self.parallel.context > 1 and self.parallel.context_keys == "ring"

    @property
    def regathers(self) -> bool:
        """True if column-parallel layers gather their inputs again for the backward pass."""
        return bool(self.parallel.sequence_regather)

    @property
    def reduce(self) -> Frequency:
        """The frequency at which gradients are reduced with `optimizer.zero` 2 or 3."""
        return self.optimizer.reduce or ("step" if self.is_bit_equal or self.splits_backward else "micro_batch")

    @property
    def gather(self) -> Frequency:
        """The frequency at which weights are gathered with `optimizer.zero` 3."""
        return self.optimizer.gather or ("step" if self.splits_backward else "micro_batch")

    def shard_ranks(self, data: int) -> int:
        """The number of data-parallel ranks, of `data`, over which ZeRO cuts; 1 without it."""
        return data // self.parallel.replicate if self.optimizer.zero else 1

    def vocab_multiple(self, tensor: int) -> int:
        """The number to a multiple of which the rows of embedding and head are padded on each of `tensor` ranks."""
        # Each part of a rank is padded, as each of `grain` ranks would be.
        parts = max(1, self.parallel.grain // tensor) if self.is_bit_equal else 1
        return self.parallel.vocab_multiple * parts

    @property
    def evaluates_held_out(self) -> bool:
        """True if evaluations read the part that `data.split` holds out."""
        return self.train.eval_every > 0 and self.data.holds_out

    @property
    def names_no_data(self) -> bool:
        """True if nothing names the data, as in a recipe that is for data of the user's."""
        return not self.data.is_named and self.hooks.data is None

    @property
    def held_out_text(self) -> str:
        """The part that is held out of the training, and how much of it the evaluations of the run read, for a user."""
        data = self.data
        if not data.holds_out:
            return f"nothing (data.split={data.split}): `shardwise evaluate` needs a text of its own"
        share = f"{100 * data.split_weights[1] / sum(data.split_weights):.3g}%"
        place = f"{share} of the data"
        if data.mixture:
            place = "a share of each source, as its split says"
        elif data.split_names:
            place = f"the split {data.split_names[1]}"
        elif data.streaming:
            place = f"{share} of the first {units.counted(data.shuffle_buffer, 'document')}"
        if not self.train.eval_every:
            return f"{place}; the run evaluates nothing (train.eval_every=0), `shardwise evaluate` all of it"
        most = self.train.eval_batches * self.train.global_batch
        return (
            f"{place}; an evaluation of the run reads its first {most:,} sequences at most (train.eval_batches × "
            "train.global_batch), `shardwise evaluate` all of it"
        )

    @property
    def lacks_evaluation_part(self) -> bool:
        """True if evaluations are wanted, and no data are there for them."""
        return self.train.eval_every > 0 and not self.evaluates_held_out and not self.evaluation.sets

    @property
    def companions(self) -> str | None:
        """The place that `checkpoint.companions` names, else that of `model.config`, unless weights are loaded."""
        checkpoint = self.checkpoint
        if checkpoint.companions is not None or checkpoint.load is not None:
            return checkpoint.companions
        return self.model.origin.file

    def with_keys(self, **sections: Mapping[str, Any]) -> Config:
        """Return a copy with other values of some keys, by their sections; they are not validated."""
        update = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=update)

    def with_batch_for(self, ranks: int) -> Config:
        """This configuration with the batch of its rule for so many ranks; ConfigError if that is no whole number."""
        if self.train.rule is None:
            return self
        sequences, per = self.train.rule
        if sequences * ranks % per:
            raise ConfigError(
                f"train.global_batch ({self.train.batch_rule}) must be a whole number on "
                f"{units.counted(ranks, 'rank')} ({sequences * ranks / per:g}): set train.global_batch to a number"
            )
        return self.with_batch(sequences * ranks // per)

    def with_batch(self, global_batch: int) -> Config:
        """This configuration with another global batch; numbers of steps that were given in tokens follow it."""
        config = self.with_keys(train={"global_batch": global_batch})
        step_tokens = global_batch * self.train.sequence_length
        for place, tokens in self._token_counts.items():
            config = replace_at_place(config, place, steps_of_tokens(tokens, step_tokens))
        return config

    def with_tokens_for_any_batch(self) -> Config:
        """This configuration, whose tokens stay as they are now when a rule gives it another batch: its steps follow.

        Stages with sizes of their own count the tokens of the whole run in any case.
        """
        if self.train.rule is None or self.steps_follow_batch or self.run is not self:
            return self
        step_tokens = self.train.global_batch * self.train.sequence_length
        counts = {place: steps * step_tokens for place, steps in step_places(self)}
        config = self.model_copy()
        config.came_from_tokens({**counts, **self._token_counts})
        return config

    @property
    def steps_follow_batch(self) -> bool:
        """True if the batch follows a rule and the steps follow it: any number of ranks trains the same tokens."""
        return self.train.rule is not None and ("train", "steps") in self._token_counts

    @property
    def counts_tokens(self) -> bool:
        """True if any number of steps was given in tokens."""
        return bool(self._token_counts)

    def came_from_tokens(self, token_counts: Mapping[Path, int]) -> None:
        """Remember the tokens that the numbers of steps at some places were given in."""
        self._token_counts = dict(token_counts)

    def with_tokens(self, values: dict[str, Any]) -> dict[str, Any]:
        """These values of the configuration, with tokens in place of the steps that were given in tokens."""
        for place, tokens in self._token_counts.items():
            values = replace_at_place(values, place, tokens_text(tokens))
        return values


def with_steps(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[Path, int]]:
    """Return the sections with steps in place of tokens, such as `train.steps: 20B`, and the tokens by their place.

    A batch by a rule counts as its first number, until `Config.with_batch_for`. Without a batch and a sequence length
    the steps are 1: what is missing is the problem to report.
    """
    token_counts = dict(token_keys(Config, values))
    step_tokens = _step_tokens(values.get("train"))
    for place, tokens in token_counts.items():
        values = replace_at_place(values, place, 1 if step_tokens is None else steps_of_tokens(tokens, step_tokens))
    return values, token_counts


def _step_tokens(train: Any) -> int | None:
    """Return the tokens of a step by a `train` section that is not checked yet; None if it does not tell."""
    if not isinstance(train, Mapping):
        return None
    batch = train.get("global_batch")
    rule = re.fullmatch(BATCH_RULE, batch) if isinstance(batch, str) else None
    batch = int(rule[1]) if rule else batch
    length = train.get("sequence_length")
    if type(batch) is not int or type(length) is not int or batch < 1 or length < 1:
        return None
    return batch * length
