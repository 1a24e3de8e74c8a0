"""Layouts, configurations that do not fit them, orders of sums that they share, and the ranks that a token visits."""

from itertools import combinations
from statistics import mean
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import Layout, check_layout, load_config, resume_changes, resume_problems
from shardwise.config.routing import Routing
from tests.unit.config.refusals import layout_of, problem, problems


@pytest.mark.parametrize(
    ("world", "overrides", "data", "accumulation"),
    [
        (1, [], 1, 4),
        (4, ["parallel.tensor=2", "parallel.sequence=true"], 2, 2),
        (8, ["parallel.tensor=4", "train.micro_batch=1"], 2, 4),
    ],
)
def test_what_fits(world: int, overrides: list[str], data: int, accumulation: int) -> None:
    config = load_config("llama2-tiny", overrides)
    layout = check_layout(config, world)
    assert (layout.world, layout.data, layout.accumulation(config.train)) == (world, data, accumulation)
    assert layout.pipeline == 1


def test_absent_axes_heads_and_places_of_ranks() -> None:
    """Sequence parallelism has no effect without tensor parallelism; scaled positions allow longer sequences."""
    assert layout_of(["parallel.sequence=true", "train.sequence_length=63"], world=1).sequence_parallel is False
    overrides = ["train.sequence_length=128", "model.rope_scaling={rope_type: linear, factor: 2}"]
    assert layout_of(overrides, world=1).world == 1
    sizes = ("num_attention_heads=12", "head_dim=8", "intermediate_size=192", "hidden_size=96")

    def keys(kv_heads: int, tensor: int) -> list[str]:
        return [*(f"model.{size}" for size in (*sizes, f"num_key_value_heads={kv_heads}")), f"parallel.tensor={tensor}"]

    assert [layout_of(keys(*degrees), world=degrees[1]).tensor for degrees in ((2, 4), (4, 2))] == [4, 2]
    assert "divide or be a multiple of model.num_key_value_heads (6)" in problem(*keys(6, 4), world=4)
    # As `Mesh` orders them: pipeline, data, tensor.
    layout = Layout(16, tensor=2, pipeline=2)
    assert layout.data == 4
    assert [layout.ranks_of(rank) for rank in (0, 1)] == ["ranks 0-7", "ranks 8-15"]
    assert [Layout(3, pipeline=3).ranks_of(rank) for rank in range(3)] == ["rank 0", "rank 1", "rank 2"]
    assert [layout.coordinates(rank) for rank in (0, 1, 2, 15)] == [
        {"pp": 0, "dp": 0, "tp": 0},
        {"pp": 0, "dp": 0, "tp": 1},
        {"pp": 0, "dp": 1, "tp": 0},
        {"pp": 1, "dp": 3, "tp": 1},
    ]
    assert Layout(8, tensor=2, context=2).coordinates(6) == {"pp": 0, "dp": 1, "cp": 1, "tp": 0}


@pytest.mark.parametrize(
    "keys",
    [
        ["data.streaming=true", "data.path=a.jsonl"],
        ["data.dataset=null", "data.mixture={web: {path: a, weight: 1, streaming: true}}"],
        ["data.prepend_bos=true"],
    ],
)
def test_what_no_trained_tokenizer_can_do_needs_one_or_weights(keys: list[str]) -> None:
    assert " (true) needs data.tokenizer: one " in problem(*keys, world=1)
    for given in ("data.tokenizer=t", "checkpoint.load=MODEL"):
        assert layout_of([*keys, given], world=1)


def test_all_misfits_are_told_at_once_and_a_layout_checks_itself() -> None:
    overrides = ("parallel.sequence=true", "train.global_batch=9", "optimizer.warmup_steps=99")
    found = problems("parallel.tensor=3", *overrides, world=6)
    names = ["train.global_batch", *["parallel.tensor"] * 3, "optimizer.warmup_steps"]
    assert [text.split(" ")[0] for text in found] == names
    heads = "parallel.tensor (3) must divide model.num_attention_heads (4): valid degrees are 1, 2 and 4"
    assert heads in problems("parallel.tensor=3", world=3)
    told = "parallel.context (2) must be 1 with model.family bert, whose tokens attend to later ones"
    assert problem("parallel.context=2", recipe="bert-tiny", world=2).startswith(told)
    for world, tensor, least in ((2, 2, 4), (6, 4, 8)):
        told = rf"number of ranks \({world}\) must be a multiple of .*\({tensor} × 2 = {least}\): nearest {least}"
        with pytest.raises(ConfigError, match=told):
            Layout(world, tensor=tensor, pipeline=2)
    with pytest.raises(ConfigError) as caught:
        Layout(0, tensor=0)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="nearest 6 or 12"):
        Layout(3).accumulation(load_config("llama2-tiny").train)
    recorded = Layout(8, tensor=2, sequence_parallel=True, pipeline=2).recorded()
    assert recorded == {"world": 8, "tensor": 2, "sequence": True, "pipeline": 2, "virtual": 1, "data": 2}
    parts = [Layout(8, tensor=4, sequence_parallel=sequence).sequence_parts for sequence in (False, True)]
    assert parts == [1, 4], "a sequence is cut by sequence parallelism alone"


def resolved(*overrides: str) -> dict[str, Any]:
    return load_config("llama2-tiny", overrides).model_dump(mode="json")


def test_groups_are_as_many_as_may_be_and_the_order_of_sums_stays_at_other_layouts() -> None:
    for micro_batches, groups in [(1, 1), (6, 2), (48, 8)]:
        config = load_config("llama2-tiny", [f"train.global_batch={2 * micro_batches}", "train.bitwise=true"])
        assert config.grains == {"tp": 4, "cp": 1, "dp": groups}
        assert load_config("llama2-tiny").grains == {}
    for override, value in [("parallel.grain=2", "4"), ("train.data_grain=2", "4"), ("compile.enabled=true", "false")]:
        (sentence,) = resume_problems(resolved("train.bitwise=true"), resolved("train.bitwise=true", override))
        assert sentence.splitlines()[1].strip() == override.replace("=", " (") + f") must be {value}"
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
    for stored, now in ((["train.bitwise=true"], ORDER), ([], ["train.bitwise=true", *ORDER]), ([], ORDER)):
        assert resume_problems(resolved(*stored), resolved(*now)) == []
        changes = resume_changes(resolved(*stored), resolved(*now))
        assert {"parallel.grain 4 → 2", "train.micro_batch 2 → 1"} < set(changes)


ORDER = ["train.data_grain=2", "train.micro_batch=1", "train.threads=2", "parallel.vocab_multiple=16"]
ORDER += ["parallel.grain=2", "compile.enabled=true"]
"""Other orders of sums than those of llama2-tiny."""


@pytest.mark.parametrize("ranks", [1, 3, 4, 12])
@pytest.mark.parametrize(
    "routing",
    [Routing(12, 1), Routing(12, 3), Routing(12, 12), Routing(12, 2, groups=3, chosen_groups=2),
     Routing(12, 3, groups=6, chosen_groups=3), Routing(12, 4, groups=4, chosen_groups=2)],
    ids=str,
)  # fmt: skip
def test_a_token_visits_as_many_ranks_as_the_mean_of_all_its_choices(routing: Routing, ranks: int) -> None:
    size, held = routing.experts // routing.groups, routing.experts // ranks
    visits = [
        len({expert // held for expert in chosen})
        for groups in combinations(range(routing.groups), routing.chosen_groups)
        for chosen in combinations(
            [expert for expert in range(routing.experts) if expert // size in groups], routing.per_token
        )
    ]
    if max(size, held) % min(size, held) == 0:  # no rank has a part of a group and of another one
        assert routing.visits(ranks) == pytest.approx(mean(visits), rel=1e-12)
