"""Mixtures and stages in a configuration: what is refused, and what may change when a run goes on."""

import re
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.parsing import parse_yaml
from shardwise.config import (
    check_changes,
    config_from_sections,
    load_config,
    recipe_text,
    resume_changes,
    resume_problems,
)
from tests.arch.source import ROOT
from tests.unit.config.refusals import problem, problems

WEB = "data.mixture.web={path: web.jsonl, weight: 0.7}"
CODE = "data.mixture.code={path: code, weight: 0.3}"


def resolved(*overrides: str) -> dict[str, Any]:
    return load_config("llama2-tiny", ["data.dataset=null", WEB, CODE, *overrides]).recorded()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.stages=[{at: 4, weights: {web: 1}}]"], "data.stages.0.weights must be left out without data.mixture"),
        ([WEB, "data.dataset=tiny"], "data.dataset (tiny) must be left out with data.mixture"),
        (["data.mixture.web.path=web"], "data.mixture must have a source with a weight, which is read from the first"),
        (["data.mixture.web={hook: abc, weight: 1}"], "its hook ('abc') must read package.module:Name"),
        (["data.mixture={'a b': {path: a, weight: 1}}"], "data.mixture.a b: its name must have letters, digits"),
        ([WEB, "data.stages=[{at: 0, weights: {web: 1}}]"], "data.stages.0.at (0) must be greater than 0"),
        ([WEB, "data.stages=[{at: 5, weights: {web: 1}}, {at: 5, weights: {web: 2}}]"], "data.stages.1.at (5) must"),
        ([WEB, "data.stages=[{at: 5, weights: {wed: 1}}]"], "data.stages.0.weights.wed must be a source"),
        ([WEB, "data.stages=[{at: 5, weights: {web: 0}}]"], "data.stages.0.weights.web (0) must be above 0"),
    ],
)
def test_refused(overrides: list[str], expected: str) -> None:
    assert expected in "\n".join(problems("data.dataset=null", *overrides))


def test_a_stage_must_begin_before_the_end() -> None:
    stages = ("data.stages=[{at: 20, weights: {web: 1}}]", "train.steps=20")
    told = "data.stages.0.at (20) must be less than train.steps (20): leave out"
    assert problem("data.dataset=null", WEB, *stages, world=1).startswith(told)


def test_an_evaluation_needs_a_source_that_holds_a_part_out() -> None:
    whole = "data.mixture={web: {path: web, weight: 1, split: '1,0'}, code: {path: code, weight: 1, split: '1,0'}}"
    keys = ("data.dataset=null", whole, "train.eval_every=2")
    assert "the split of at least one source of data.mixture must leave" in problem(*keys, world=1)
    assert load_config("llama2-tiny", [*keys, "data.mixture.code.split=9,1"]).evaluates_held_out


def test_the_mixture_of_the_page_is_read() -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    section = page.partition("\n## Mixtures and stages")[2].partition("\n## ")[0]
    (text,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    recipe = parse_yaml(recipe_text("llama2-tiny"), "")
    data = config_from_sections({**recipe, **parse_yaml(text, "the page")}).data
    assert [*data.mixture] == ["web", "code", "math"]
    assert data.stages[1].weights == {"math": 1.0}
    assert data.stages[1].at > data.stages[0].at


def test_a_run_goes_on_with_another_mixture_only_where_it_is_named() -> None:
    new = resolved("data.mixture.code.weight=0.4", "data.stages=[{at: 4, weights: {web: 1}}]")
    (sentence,) = resume_problems(resolved(), new)
    assert 'data.mixture.code ({"path": "code", "weight": 0.4}) must be {"path": "code", "weight": 0.3}' in sentence
    assert "by --change data.stages --change data.mixture" in sentence
    assert resume_problems(resolved(), new, check_changes(["data.mixture", "data.stages"])) == []
    assert resume_changes(resolved(), new) == [
        'data.stages [] → [{"at": 4, "weights": {"web": 1.0}}]',
        'data.mixture.code {"path": "code", "weight": 0.3} → {"path": "code", "weight": 0.4}',
    ]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.steps", "--change train.steps must be left out: this key may change in any run"),
        ("model.hidden_size", "fits no other model.hidden_size"),
        ("data.stage", "--change data.stage: there is no such key"),
    ],
)
def test_changes_that_need_no_flag_or_have_none_are_refused(key: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_changes([key])
