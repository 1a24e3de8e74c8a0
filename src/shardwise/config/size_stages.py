"""Stages of a run that change the sizes of a step: `data.stages` with other lengths, batches or rotary positions.

Each stage is a configuration of its own (`size_stages_of`), by which a run builds its model and its feed. The order of
the data is that of blocks, which are as long as the least common multiple of all lengths, and a step reads whole
blocks: so a stage begins where the one before stopped, and no token is lost or read twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from shardwise.base.errors import ConfigError
from shardwise.config.data import StageConfig
from shardwise.config.load import config_from_sections
from shardwise.config.model import ModelConfig
from shardwise.config.run_config import Config, SizeStage

_TRAIN_KEYS = ("sequence_length", "global_batch", "micro_batch")


def size_stages_of(config: Config) -> list[Config]:
    """The configuration of each stretch of steps with equal sizes, in their order; a run without stages is one.

    Raises:
        ConfigError: the model cannot have the rotary positions of a stage.
    """
    run = config.run
    changes = _changes(run)
    if len(changes) == 1:
        return [run]
    lengths = [sizes.get("sequence_length", run.train.sequence_length) for _, sizes in changes]
    # Stages that only change the weights stay: each configuration is valid by itself.
    weights = tuple(StageConfig(at=stage.at, weights=stage.weights) for stage in run.data.stages if stage.weights)
    data = run.data.model_copy(update={"stages": weights})
    ends = [begin for begin, _ in changes[1:]] + [run.train.steps]
    stages = []
    for (begin, sizes), end in zip(changes, ends, strict=True):
        train = {key: sizes[key] for key in _TRAIN_KEYS if key in sizes}
        if "global_batch" in train:
            train["batch_rule"] = None
        stage = run.model_copy(
            update={"data": data, "train": run.train.model_copy(update=train), "model": _model(run, begin, sizes)}
        )
        stage.let_be_stage(SizeStage(run, begin, end, math.gcd(*lengths), math.lcm(*lengths)))
        stages.append(stage)
    return stages


def size_stage_after(config: Config, step: int) -> Config:
    """The configuration of the step that follows `step` steps; of the last step after all of them."""
    stages = size_stages_of(config)
    return next((stage for stage in stages if step < stage.last_step), stages[-1])


def size_stage_of_step(config: Config, step: int) -> Config:
    """The configuration of a step, of which the first is 1; at step 0 that of the first."""
    return size_stage_after(config, max(step - 1, 0))


def largest_size_stage(config: Config) -> Config:
    """The configuration of the stage whose micro-batches have most tokens, in the longest sequences."""

    def size(stage: Config) -> tuple[int, int]:
        return stage.train.micro_batch * stage.train.sequence_length, stage.train.sequence_length

    return max(size_stages_of(config), key=size)


def samples_between(config: Config, first: int, last: int) -> int:
    """The samples of a run's steps after `first` up to `last`, as many of this stage's length as they have tokens."""
    tokens = 0
    for stage in size_stages_of(config):
        steps = max(0, min(last, stage.last_step) - max(first, stage.steps_before))
        tokens += steps * stage.train.global_batch * stage.train.sequence_length
    return tokens // config.train.sequence_length


def tokens_of_run(config: Config) -> int:
    """The tokens of all steps of a run."""
    return samples_between(config, 0, config.train.steps) * config.train.sequence_length


def data_position_after(config: Config, step: int, position: int) -> int:
    """The place of the stage in the order of the data, counted in its samples.

    Args:
        position: place after `step` steps, in samples of the stage of that step.
    """
    return position * size_stage_of_step(config, step).train.sequence_length // config.train.sequence_length


def size_stage_problems(stages: list[Config]) -> list[str]:
    """The problems of stages that change the sizes of a step, without those that each has by itself."""
    run = stages[0].run
    problems = []
    step_tokens = {stage.train.global_batch * stage.train.sequence_length for stage in stages}
    if run.counts_tokens and len(step_tokens) > 1:
        shown = " and ".join(f"{tokens:,}" for tokens in sorted(step_tokens))
        problems.append(
            f"the tokens of a step in data.stages ({shown}) must be equal where a number of steps is given in tokens: "
            "set the global_batch of each stage, or give numbers of steps"
        )
    if len({tuple(sorted(stage.grains.items())) for stage in stages}) > 1:
        problems.append(
            "the groups of train.data_grain must be the same in all data.stages: set "
            f"train.data_grain={min(stage.train.gradient_groups for stage in stages)}"
        )
    if len({stage.train.sequence_length for stage in stages}) > 1:
        problems += _length_problems(run) + _block_problems(stages)
    return problems


def changed_size_stages(stored: Mapping[str, Any], config: Config, step: int) -> list[str]:
    """The reasons why a run with other stages cannot go on after `step` steps: its order of the data would change."""
    return _changed_lengths(stored, size_stages_of(config), step) + _changed_weights(stored, config.recorded(), step)


def _changed_weights(stored: Mapping[str, Any], new: Mapping[str, Any], step: int) -> list[str]:
    then, now = (values.get("data", {}) for values in (stored, new))
    weights = _weights_before(step, then)
    is_other = not (then.get("mixture") or {}).keys() & (now.get("mixture") or {}).keys()
    if is_other or weights == _weights_before(step, now):
        return []
    earlier = [{"at": at, "weights": named} for at, named in weights]
    return [
        f"the stages before step {step:,}, from which the run goes on, must stay: the weights of data.mixture "
        f"({earlier[0]['weights']}) and data.stages ({earlier[1:]}); a stage that is changed or added must begin "
        f"at {step:,} or later"
    ]


def _weights_before(step: int, data: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """The steps before each stage of a mixture that begins before `step`, with the weights of its sources."""
    sources = data.get("mixture") or {}
    first = {name: source["weight"] for name, source in sources.items() if source.get("weight") is not None}
    stages = [(stage["at"], stage["weights"]) for stage in data.get("stages") or () if stage.get("weights")]
    return [(0, first), *((at, weights) for at, weights in stages if at < step)]


def _changed_lengths(stored: Mapping[str, Any], now: Sequence[Config], step: int) -> list[str]:
    """The problem of stages whose lengths before `step` are others, or keep other blocks together."""
    if len(now) == 1 and not _has_sizes(stored):
        return []
    then = size_stages_of(config_from_sections(stored))
    block = then[0].block_length
    if now[0].block_length != block:
        return [
            f"the sequence lengths of data.stages must keep {block:,} tokens together, as the order of the data does "
            f"from the first step on, and they keep {now[0].block_length:,}: their least common multiple must be "
            f"{block:,}; a new run with checkpoint.load begins the data anew"
        ]
    begun = [
        {stage.steps_before: stage.train.sequence_length for stage in stages if stage.steps_before < step}
        for stages in (then, now)
    ]
    if begun[0] == begun[1]:
        return []
    return [
        f"the sequence lengths before step {step:,}, from which the run goes on, must stay: a stage of data.stages "
        f"that is changed or added must begin at {step:,} or later"
    ]


def values_at_step(stored: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """The stored values of a run, with the sizes of a step in place of those of the first one."""
    if not _has_sizes(stored):
        return stored
    return size_stage_of_step(config_from_sections(stored), step).model_dump(mode="json")


def _has_sizes(stored: Mapping[str, Any]) -> bool:
    return any(stage.keys() - {"at", "weights"} for stage in stored.get("data", {}).get("stages", ()))


def _changes(run: Config) -> list[tuple[int, dict[str, Any]]]:
    """The steps before each stage that changes sizes, with all changes up to it."""
    changes: list[tuple[int, dict[str, Any]]] = [(0, {})]
    for stage in run.data.stages:
        if stage.sizes:
            changes.append((stage.at, changes[-1][1] | stage.sizes))
    return changes


def _model(run: Config, begin: int, sizes: dict[str, Any]) -> ModelConfig:
    changes = {key: sizes[key] for key in ("rope_theta", "rope_scaling") if key in sizes}
    if not changes:
        return run.model
    place = f"the stage of data.stages at {begin:,}"
    before = run.model
    missing = [key for key in changes if key not in type(before).model_fields]
    if before.is_own or missing:
        raise ConfigError(
            f"{place}: {(missing or [*changes])[0]} must be left out with model.family {run.model.family}, which has "
            "no such key"
        )
    try:
        model = type(before).model_validate(before.model_dump() | changes)
    except ValidationError as error:
        from shardwise.config.pydantic_errors import refusal

        problems = refusal(error, "model", run.model.family).problems
        raise ConfigError([f"{place}: {problem}" for problem in problems]) from None
    model.came_from(before.origin)
    return model


def _length_problems(run: Config) -> list[str]:
    """Refuse other lengths for data whose samples are made for one length."""
    must = "must be left out of data.stages"
    if "mlm" in run.model.objectives:
        return [f"sequence_length {must} with model.family {run.model.family}, whose samples have one length"]
    data = run.data
    problems = []
    if data.is_streamed:
        problems.append(f"sequence_length {must} with data.streaming (true), which packs or cuts each block once")
    if data.holds_chat:
        problems.append(f"sequence_length {must} with conversations, which are packed for one length")
    hooks = [source.hook for source in data.mixture.values() if source.hook is not None]
    for hook in [run.hooks.data] if run.hooks.data is not None else hooks:
        problems.append(f"sequence_length {must} with samples of your own ({hook}), which are rows of one length")
    return problems


def _block_problems(stages: list[Config]) -> list[str]:
    """Refuse batches that do not read whole blocks."""
    problems = []
    for stage in stages:
        train = stage.train
        together = stage.block_length // train.sequence_length
        if train.global_batch % together:
            least = -(-train.global_batch // together) * together
            problems.append(
                f"train.global_batch ({train.global_batch}) of the steps with train.sequence_length "
                f"({train.sequence_length}) must be a multiple of {together}, as data.stages keep "
                f"{stage.block_length:,} tokens together: set {least}"
            )
    return problems
