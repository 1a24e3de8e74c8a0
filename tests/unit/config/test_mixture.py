"""Mixtures and stages in a configuration: what is refused, and what may change when a run goes on."""

import re
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.parsing import parse_yaml
from shardwise.config import config_from_sections, load_config, recipe_text
from shardwise.config.resume_rules import check_changes, resume_changes, resume_problems
from tests.arch.source import ROOT
from tests.unit.config.refusals import problem

WEB = "data.mixture.web={path: web.jsonl, weight: 0.7}"
CODE = "data.mixture.code={path: code, weight: 0.3}"


def resolved(*overrides: str) -> dict[str, Any]:
    return load_config("llama2-tiny", ["data.dataset=null", WEB, CODE, *overrides]).recorded()


def test_stages_and_changes_of_a_mixture() -> None:
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


def test_the_mixture_of_the_page_is_read() -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    section = page.partition("\n## Mixtures and stages")[2].partition("\n## ")[0]
    (text,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    recipe = parse_yaml(recipe_text("llama2-tiny"), "")
    data = config_from_sections({**recipe, **parse_yaml(text, "the page")}).data
    assert [*data.mixture] == ["web", "code", "math"]
    assert data.stages[1].weights == {"math": 1.0}
    assert data.stages[1].at > data.stages[0].at
