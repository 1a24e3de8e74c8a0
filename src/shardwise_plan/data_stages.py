"""The stages of a run with other sizes (`data.stages`), in a layout that is planned for one of them."""

from __future__ import annotations

import math

from shardwise.config import Config, Layout, check_layout, size_stages_of


def stages_with_layout(config: Config, layout: Layout) -> list[Config]:
    """Return all stages of a run's data with the layout planned for `config`, which is one of them and stays as it is.

    The others keep their micro-batches, lowered where the data-parallel ranks have fewer samples.
    """
    stages = size_stages_of(config)
    if len(stages) == 1:
        return [config]
    return [
        config if stage.steps_before == config.steps_before else _laid_out(stage, config, layout) for stage in stages
    ]


def run_with_layout(config: Config, layout: Layout) -> Config:
    """Return the whole run with the layout planned for `config`, one of its stages, and each stage's micro-batch."""
    stages = stages_with_layout(config, layout)
    if len(stages) == 1:
        return config
    run = config.run
    micro_batches = {stage.steps_before: stage.train.micro_batch for stage in stages}
    later = tuple(
        stage.model_copy(update={"micro_batch": micro_batches[stage.at]}) if stage.sizes else stage
        for stage in run.data.stages
    )
    # A section that neither the recipe nor the layout sets stays so: it is not written.
    planned = {"parallel", "optimizer", "compile"} & config.model_fields_set
    update = {name: getattr(config, name) for name in planned}
    update |= {"train": stages[0].train, "data": run.data.model_copy(update={"stages": later})}
    return run.model_copy(update=update)


def check_other_stages(config: Config, layout: Layout) -> None:
    """Raise ConfigError if the rules forbid the layout planned for `config` in another stage of its run's data."""
    for stage in stages_with_layout(config, layout):
        if stage is not config:
            check_layout(stage, layout.world)


def _laid_out(stage: Config, planned: Config, layout: Layout) -> Config:
    train = stage.with_batch_for(layout.world).train
    micro_batch = math.gcd(train.micro_batch, train.global_batch // layout.data)
    laid_out = {name: getattr(planned, name) for name in ("parallel", "optimizer", "compile")}
    sizes = {"micro_batch": micro_batch, "recompute": planned.train.recompute}
    return stage.model_copy(update=laid_out | {"train": train.model_copy(update=sizes)})
