"""Pipelines that a model, a schedule or a batch does not fit, each told in one sentence with what would do."""

import pytest

from tests.unit.config.refusals import layout_of
from tests.unit.config.test_families import OWN, problems


@pytest.mark.parametrize(
    ("degree", "schedule", "batches"),
    [(4, "1f1b", [4]), (2, "dualpipev", [4]), (4, "interleaved", [8, 10]), (4, "interleaved_zero_bubble", [12, 15])],
)
def test_batches_that_a_refusal_names_are_taken(degree: int, schedule: str, batches: list[int]) -> None:
    """The refusals themselves are rows of refusals.yaml."""
    keys = ["train.micro_batch=1", f"parallel.pipeline={degree}", f"parallel.schedule={schedule}"]
    for batch in batches:
        assert layout_of([*keys, f"train.global_batch={batch}"], "gpt-tiny", degree).pipeline == degree


def test_a_model_of_your_own_has_no_stages() -> None:
    (sentence,) = problems(OWN, world=2, parallel={"pipeline": 2})
    assert sentence.startswith("parallel.pipeline (2) must be 1 with a model of your own (model.family my.package")
