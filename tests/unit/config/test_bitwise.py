"""What `train.bitwise` needs, and what of it must stay when a run goes on."""

from typing import Any

import pytest

from shardwise.config import load_config, resume_changes, resume_problems
from tests.unit.config.refusals import layout_of, problem


def resolved(*overrides: str) -> dict[str, Any]:
    return load_config("llama2-tiny", overrides).model_dump(mode="json")


# ---- layouts


@pytest.mark.parametrize(
    ("world", "overrides", "told"),
    [
        (1, ["parallel.grain=3"], "parallel.grain (3) must be a power of two with train.bitwise (true): set"),
        (1, ["parallel.context_grain=2", "train.sequence_length=12"], "train.sequence_length (12) must be a"),
        (1, ["parallel.context_grain=2", "compile.enabled=true"], "compile.enabled (true) must be false with"),
        (4, ["parallel.tensor=4", "parallel.grain=2"], "parallel.tensor (4) must divide parallel.grain (2) with"),
        (4, ["train.data_grain=2"], "the data-parallel degree (4) must divide train.data_grain (2) with"),
        (1, ["train.data_grain=8"], "train.data_grain (8) must divide the micro-batches of a step,"),
        (1, ["model.attention_dropout=0.1"], "train.dropout_mode (fast) must be invariant with train.bitwise"),
        (1, ["precision.reduce=bfloat16"], "precision.reduce (bfloat16) must be precision.gradient (float32) with"),
    ],
)
def test_what_does_not_fit(world: int, overrides: list[str], told: str) -> None:
    assert problem("train.bitwise=true", *overrides, world=world).startswith(told)
    # Without it each of them is a training.
    assert layout_of(overrides, world=world).world == world


@pytest.mark.parametrize(("micro_batches", "groups"), [(1, 1), (6, 2), (48, 8)])
def test_groups_of_gradients_are_as_many_as_may_be(micro_batches: int, groups: int) -> None:
    config = load_config("llama2-tiny", [f"train.global_batch={2 * micro_batches}", "train.bitwise=true"])
    assert config.grains == {"tp": 4, "cp": 1, "dp": groups}
    assert load_config("llama2-tiny").grains == {}


# ---- runs that go on

ORDER = (
    "parallel.grain=2",
    "train.data_grain=2",
    "train.micro_batch=1",
    "train.threads=2",
    "parallel.vocab_multiple=16",
    "compile.enabled=true",
)
"""Other orders of sums than those of llama2-tiny."""


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("parallel.grain=2", "parallel.grain (2) must be 4"),
        ("train.data_grain=2", "train.data_grain (2) must be 4"),
        ("compile.enabled=true", "compile.enabled (true) must be false"),
    ],
)
def test_the_order_of_sums_stays(override: str, difference: str) -> None:
    (sentence,) = resume_problems(resolved("train.bitwise=true"), resolved("train.bitwise=true", override))
    assert sentence.splitlines()[1].strip() == difference


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
