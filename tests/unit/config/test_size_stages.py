"""Stages that change the sizes of a step, mixtures, and keys that count steps, given in tokens."""

import re
from typing import Any

import pytest

from shardwise import config as sections
from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.config import config_from_sections, load_config, recipe_text, size_stages_of
from shardwise.config.resume_rules import check_changes, resume_changes, resume_problems
from shardwise.config.token_counts import parse_tokens, steps_of_tokens, tokens_text
from tests.arch.source import ROOT
from tests.unit.config.refusals import problem

LONG = "{at: 4, sequence_length: 128, global_batch: 4, micro_batch: 1, rope_scaling: {rope_type: linear, factor: 2.0}}"
MIDDLE = "{at: 6, sequence_length: 32, global_batch: 8}"


def config(*stages: str) -> sections.Config:
    return load_config("llama2-tiny", ["train.steps=8", f"data.stages=[{', '.join(stages)}]"])


def test_stages_are_configurations_at_places_in_the_data_and_keep_their_order() -> None:
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


WEB = "data.mixture.web={path: web.jsonl, weight: 0.7}"
CODE = "data.mixture.code={path: code, weight: 0.3}"


def resolved(*overrides: str) -> dict[str, Any]:
    return load_config("llama2-tiny", ["data.dataset=null", WEB, CODE, *overrides]).recorded()


def test_stages_and_changes_of_a_mixture_and_that_of_the_page() -> None:
    stages = ("data.stages=[{at: 20, weights: {web: 1}}]", "train.steps=20")
    told = "data.stages.0.at (20) must be less than train.steps (20): leave out"
    assert problem("data.dataset=null", WEB, *stages, world=1).startswith(told)
    whole = "data.mixture={web: {path: web, weight: 1, split: '1,0'}, code: {path: code, weight: 1, split: '1,0'}}"
    keys = ("data.dataset=null", whole, "train.eval_every=2")
    assert "the split of at least one source of data.mixture must leave" in problem(*keys, world=1)
    assert load_config("llama2-tiny", [*keys, "data.mixture.code.split=9,1"]).evaluates_held_out
    new = resolved("data.mixture.code.weight=0.4", "data.stages=[{at: 4, weights: {web: 1}}]")
    (sentence,) = resume_problems(resolved(), new)
    assert 'data.mixture.code ({"path": "code", "weight": 0.4}) must be {"path": "code", "weight": 0.3}' in sentence
    assert "by --change data.stages --change data.mixture" in sentence
    assert resume_problems(resolved(), new, check_changes(["data.mixture", "data.stages"])) == []
    assert resume_changes(resolved(), new) == [
        'data.stages [] → [{"at": 4, "weights": {"web": 1.0}}]',
        'data.mixture.code {"path": "code", "weight": 0.3} → {"path": "code", "weight": 0.4}',
    ]
    for key, expected in {
        "train.steps": "--change train.steps must be left out: this key may change in any run",
        "model.hidden_size": "fits no other model.hidden_size",
        "data.stage": "--change data.stage: there is no such key",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            check_changes([key])
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    section = page.partition("\n## Mixtures and stages")[2].partition("\n## ")[0]
    (text,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    recipe = parse_yaml(recipe_text("llama2-tiny"), "")
    data = config_from_sections({**recipe, **parse_yaml(text, "the page")}).data
    assert [*data.mixture] == ["web", "code", "math"]
    assert data.stages[1].weights == {"math": 1.0}
    assert data.stages[1].at > data.stages[0].at


TOKENS_OF_STEP = 8 * 256
"""Of llama-small."""
POINTS = ("optimizer.schedule=points", "optimizer.warmup_steps=0", "optimizer.min_lr=0")


def test_tokens_are_written_as_they_are_read_by_all_keys_that_count_steps() -> None:
    for text in ["500k", "1.5T", "300B", "2M", "1.234567M", "0.5k"]:
        assert tokens_text(parse_tokens(text)) == text
        number, unit = float(text[:-1]), {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[text[-1]]
        assert parse_tokens(f"{text[:-1]} {text[-1]} tokens") == parse_tokens(text) == round(number * unit)
    for text in ["20", 400 * "9" + "B", "20X", "20b", "1e9", "-2M", "M", "", "auto", 20, None, True]:
        assert parse_tokens(text) is None
    keys = {
        "train.steps": "4M",
        "train.eval_every": "1M",
        "optimizer.warmup_steps": "100k",
        "checkpoint.every": "2M",
        "log.drift_every": "500k",
    }
    config = load_config("llama-small", [f"{key}={value}" for key, value in keys.items()])
    values = config.recorded()
    for key, text in keys.items():
        section, name = key.split(".")
        assert values[section][name] == steps_of_tokens(parse_tokens(text), TOKENS_OF_STEP)
    points = "optimizer.points=[{at: 0, factor: 0}, {at: 100k, factor: 1}]"
    assert [point.at for point in load_config("llama-small", [*POINTS, points]).optimizer.points] == [0, 49]
    told = "train.steps ('20X') must be a whole number of steps, or tokens such as 20B, 500M or 1.5T"
    assert refused("train.steps=20X") == told
    told = "train.global_batch ('none') must be a whole number, or 'N per M ranks'"
    assert refused("train.steps=20B", "train.global_batch=none") == told
    assert refused("train.steps=9000T").startswith("train.steps ")


def refused(*overrides: str) -> str:
    return problem(*overrides, recipe="llama-small", world=2)


def test_steps_follow_a_batch_by_a_rule_where_the_tokens_are_to_stay() -> None:
    points = "optimizer.points=[{at: 0, factor: 0}, {at: 10, factor: 1}]"
    keys = [
        *POINTS,
        points,
        "train.steps=1000",
        "train.eval_every=0",
        "checkpoint.every=100",
        "train.global_batch=8 per 2 ranks",
    ]
    config = load_config("llama-small", keys)
    assert config.with_batch_for(4).train.steps == 1000
    doubled = config.with_tokens_for_any_batch().with_batch_for(4)
    assert (doubled.train.global_batch, doubled.train.steps, doubled.train.eval_every) == (16, 500, 0)
    assert doubled.checkpoint.every == 50
    assert [point.at for point in doubled.optimizer.points] == [0, 5]
    assert doubled.steps_follow_batch
    assert not config.steps_follow_batch
    written = doubled.with_tokens(doubled.model_dump(mode="json", exclude_unset=True))
    assert written["train"]["steps"] == tokens_text(1000 * TOKENS_OF_STEP)
