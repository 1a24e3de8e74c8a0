"""What `train.bitwise` needs, and what of it must stay when a run goes on."""

from typing import Any

import pytest

from shardwise.config import load_config, resume_changes, resume_problems


def resolved(*overrides: str) -> dict[str, Any]:
    return load_config("llama2-tiny", overrides).model_dump(mode="json")


@pytest.mark.parametrize(("micro_batches", "groups"), [(1, 1), (6, 2), (48, 8)])
def test_groups_of_gradients_are_as_many_as_may_be(micro_batches: int, groups: int) -> None:
    config = load_config("llama2-tiny", [f"train.global_batch={2 * micro_batches}", "train.bitwise=true"])
    assert config.grains == {"tp": 4, "cp": 1, "dp": groups}
    assert load_config("llama2-tiny").grains == {}


ORDER = ["train.data_grain=2", "train.micro_batch=1", "train.threads=2", "parallel.vocab_multiple=16"]
ORDER += ["parallel.grain=2", "compile.enabled=true"]
"""Other orders of sums than those of llama2-tiny."""


@pytest.mark.parametrize(
    ("override", "value"), [("parallel.grain=2", "4"), ("train.data_grain=2", "4"), ("compile.enabled=true", "false")]
)
def test_the_order_of_sums_stays(override: str, value: str) -> None:
    (sentence,) = resume_problems(resolved("train.bitwise=true"), resolved("train.bitwise=true", override))
    assert sentence.splitlines()[1].strip() == override.replace("=", " (") + f") must be {value}"


def test_layouts_may_change_and_the_grain_that_a_run_has_may_be_written() -> None:
    then = resolved("train.bitwise=true")
    written = resolved("train.bitwise=true", "train.data_grain=4")
    assert resume_problems(then, written) == []
    assert resume_changes(then, written) == []
    other = resolved("train.bitwise=true", "parallel.tensor=2", "parallel.sequence=true", "optimizer.zero=1")
    assert resume_problems(then, other) == []
    # The grain of a context degree stays where the degree changes.
    cut = resolved("train.bitwise=true", "parallel.context=2")
    (sentence,) = resume_problems(cut, then)
    assert "parallel.context_grain (1) must be 2" in sentence
    assert resume_problems(cut, resolved("train.bitwise=true", "parallel.context_grain=2")) == []


@pytest.mark.parametrize(
    ("then", "now"),
    [(["train.bitwise=true"], ORDER), ([], ["train.bitwise=true", *ORDER]), ([], ORDER)],
    ids=["off", "on", "never"],
)
def test_without_it_or_when_it_is_switched_the_order_may_change(then: list[str], now: list[str]) -> None:
    assert resume_problems(resolved(*then), resolved(*now)) == []
    changes = resume_changes(resolved(*then), resolved(*now))
    assert {"parallel.grain 4 → 2", "train.micro_batch 2 → 1"} < set(changes)
