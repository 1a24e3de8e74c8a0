"""Stages that change the sizes of a step: their configurations, their rules, and the place in the data."""

from shardwise import config as sections
from shardwise.config import config_from_sections, load_config, size_stages_of

LONG = "{at: 4, sequence_length: 128, global_batch: 4, micro_batch: 1, rope_scaling: {rope_type: linear, factor: 2.0}}"
MIDDLE = "{at: 6, sequence_length: 32, global_batch: 8}"


def config(*stages: str) -> sections.Config:
    return load_config("llama2-tiny", ["train.steps=8", f"data.stages=[{', '.join(stages)}]"])


def test_each_stage_is_a_configuration_at_a_place_in_the_data() -> None:
    run = config(LONG, MIDDLE)
    stages = size_stages_of(run)
    assert [(stage.steps_before, stage.last_step) for stage in stages] == [(0, 4), (4, 6), (6, 8)]
    lengths = [(stage.train.sequence_length, stage.train.global_batch, stage.train.micro_batch) for stage in stages]
    assert lengths == [(64, 8, 2), (128, 4, 1), (32, 8, 1)], "what a stage does not set stays"
    assert stages[0].model == run.model
    assert {(stage.unit_length, stage.block_length) for stage in stages} == {(32, 128)}
    assert [stage.samples_together for stage in stages] == [2, 1, 4]
    assert all(stage.recorded() == run.recorded() for stage in stages)
    assert [sections.size_stage_after(run, step).last_step for step in (0, 3, 4, 7, 8)] == [4, 4, 6, 8, 8]
    assert [sections.size_stage_of_step(run, step).last_step for step in (0, 4, 5, 8)] == [4, 4, 6, 8]
    assert [stage.has_next_step(4) for stage in stages] == [False, True, False]
    assert stages[2].has_next_step(8)
    assert sections.largest_size_stage(run) == stages[1]
    # A program reads each by itself, such as one that compiles its graphs.
    for stage in stages:
        values = stage.model_dump(mode="json")
        assert config_from_sections(values).train == stage.train
        assert values["data"]["stages"] == []
    assert sections.values_at_step(run.recorded(), 5) == stages[1].model_dump(mode="json")
    stages = size_stages_of(config(LONG, MIDDLE))
    assert sections.tokens_of_run(stages[0]) == 4 * 512 + 2 * 512 + 2 * 256
    assert sections.samples_between(stages[2], 3, 7) == (512 + 1024 + 256) // 32
    assert sections.data_position_after(stages[1], 4, 32) == 16
    assert sections.data_position_after(stages[1], 5, 20) == 20
    assert sections.data_position_after(stages[2], 6, 24) == 96


def test_stages_of_a_run_that_goes_on_keep_its_order() -> None:
    stored = config(LONG, MIDDLE).recorded()
    later = MIDDLE.replace("at: 6", "at: 7")
    assert sections.changed_size_stages(stored, size_stages_of(config(LONG, later))[1], 6) == []
    (problem,) = sections.changed_size_stages(stored, config(LONG, later), 7)
    assert "the sequence lengths before step 7, from which the run goes on, must stay" in problem
    (problem,) = sections.changed_size_stages(stored, config(LONG, MIDDLE.replace("32", "256")), 5)
    assert "must keep 128 tokens together" in problem
    plain = load_config("llama2-tiny", ["train.steps=8"])
    assert sections.changed_size_stages({}, plain, 4) == []
    assert sections.changed_size_stages(plain.recorded(), config(LONG), 4), (
        "the order of a run without stages is that of samples"
    )
