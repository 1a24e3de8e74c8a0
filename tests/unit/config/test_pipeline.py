"""Pipelines that a model, a schedule or a batch does not fit, each told in one sentence with what would do."""

import re

import pytest

from shardwise.config import load_config
from tests.unit.config.refusals import layout_of, problem
from tests.unit.config.test_families import OWN, problems


def refused(*overrides: str, world: int | None = None) -> str:
    """The sentence that refuses gpt-tiny, which has 8 blocks, with a global batch of 8 micro-batches."""
    parallel = load_config("gpt-tiny", keys := ["train.micro_batch=1", *overrides]).parallel
    return problem(*keys, recipe="gpt-tiny", world=world or parallel.tensor * parallel.pipeline)


def keys_of(text: str) -> list[str]:
    return [key if "." in key else f"parallel.{key}" for key in text.split()]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("pipeline=9", r"pipeline \(9\) must be at most .*_layers \(8\), .*: set parallel\.pipeline=8"),
        ("pipeline=5 schedule=interleaved", "\\(5 × 2 = 10\\) must be at most .*_layers \\(8\\), .*: set"),
        ("pipeline=2 virtual_stages=2", r"virtual_stages \(2\) must be 1 with .* 1f1b: .*schedule=interleaved"),
        ("pipeline=2 schedule=zbv virtual_stages=4", r"virtual_stages \(4\) must be 2 with .* zbv: leave it out"),
        ("pipeline=3 schedule=zbv", r"\(3 × 2 = 6\) must divide .*_layers \(8\) .*: set parallel\.pipeline=2 or 4, or"),
        ("pipeline=3 stages=[4,4]", r"stages \(\[4, 4\]\) must have .* for each of 3 stages, .*such as \[2, 3, 3\]"),
        ("pipeline=2 stages=[4,5]", r"their sum \(9\) must be model\.num_hidden_layers \(8\), such as \[4, 4\]"),
        ("stages=[4,4]", r"stages \(\[4, 4\]\) must be left out with parallel\.pipeline \(1\), which cuts no model"),
    ],
)
def test_what_cannot_be_cut_so(overrides: str, told: str) -> None:
    assert re.search(told, refused(*keys_of(overrides)))


@pytest.mark.parametrize(
    ("overrides", "needs", "batches"),
    [
        ("pipeline=4 schedule=1f1b train.global_batch=3", "at least parallel.pipeline (4)", "4"),
        ("pipeline=2 schedule=dualpipev train.global_batch=3", "at least 2 × parallel.pipeline (2 × 2 = 4)", "4"),
        (
            "pipeline=4 schedule=interleaved train.global_batch=9",
            "a multiple of the 2 rounds that parallel.pipeline (4) takes them in",
            "8 or 10",
        ),
        (
            "pipeline=4 schedule=interleaved_zero_bubble train.global_batch=13",
            "a multiple of the 3 rounds that parallel.pipeline (4) takes them in",
            "12 or 15",
        ),
    ],
)
def test_too_few_or_uneven_micro_batches(overrides: str, needs: str, batches: str) -> None:
    keys = ["train.micro_batch=1", *keys_of(overrides)]
    config = load_config("gpt-tiny", keys)
    assert refused(*keys) == (
        f"the micro-batches of a step on each rank ({config.train.global_batch}) must be {needs} with "
        f"parallel.schedule {config.parallel.schedule}: set train.global_batch={batches}"
    )
    degree = config.parallel.pipeline
    for valid in batches.split(" or "):
        assert layout_of([*keys, f"train.global_batch={valid}"], "gpt-tiny", degree).pipeline == degree


def test_a_model_of_your_own_has_no_stages() -> None:
    (sentence,) = problems(OWN, world=2, parallel={"pipeline": 2})
    assert sentence.startswith("parallel.pipeline (2) must be 1 with a model of your own (model.family my.package")
