"""What a dry run says of each family, of recompute, of dropout that no layout changes, of LAMB and of own models."""

from typing import Any

import pytest
from rich.text import Text

from shardwise.base import units
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.config import (
    CheckpointConfig,
    Config,
    Layout,
    check_layout,
    config_from_sections,
    load_config,
    recipe_names,
)
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import checkpoint_bytes, expected_memory, memory_by_rank, memory_of_machine
from shardwise.models.flops import flops_per_token, recomputed_flops_per_token
from shardwise.models.parameter_counts import parameter_count
from shardwise.pipeline.partition import partition_by_rank
from shardwise.pipeline.schedule_picture import schedule_picture
from shardwise.train.pipeline_table import _rank_table
from shardwise.train.summary import training_summary

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
UNKNOWN = "not known for a model of your own"


def config(family: str = "gpt", optimizer: str = "adamw", **train: object) -> Config:
    sizes = SIZES if ":" not in family else {"vocab_size": 500}
    return config_from_sections(
        {
            "model": {"family": family, **sizes},
            "train": {"steps": 10, "global_batch": 4, "micro_batch": 2, "sequence_length": 64, **train},
            "optimizer": {"lr": 1e-3, "name": optimizer},
        }
    )


def rows(config: Config, layout: Layout = Layout(1), accelerator: bool = False) -> dict[str, str]:  # noqa: B008
    text = training_summary("recipe", config, layout, "cpu", accelerator)
    return {line[2:16].rstrip(): line[17:] for line in text.splitlines() if line.startswith("# ")}


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_every_family_is_told(family: str) -> None:
    chosen, layout = config(family), Layout(2, tensor=2)
    parameters = parameter_count(chosen.model) or 0
    flops = flops_per_token(chosen.model, 64, chosen.data.predictions(64)) or 0.0
    memory = expected_memory(chosen, layout)
    found = rows(chosen, layout)
    for name, beginning in {
        "layout": "TP 2 × PP 1 × DP 1 = 2 ranks",
        "parameters": f"{units.count(parameters)} ({parameters:,}), ",
        "compute": f"{units.count(flops)} FLOPs per token",
        "memory": units.size(memory.total),
    }.items():
        assert found[name].startswith(beginning)
    assert found["optimizer"] == "AdamW"
    assert "recompute" not in found


def test_the_price_of_recompute_own_models_and_keys_that_differ() -> None:
    chosen = config(recompute="full")
    again = recomputed_flops_per_token(chosen.model, 64, chosen.recompute, fused_attention=False) or 0.0
    flops = flops_per_token(chosen.model, 64) or 0.0
    assert rows(chosen)["recompute"] == f"each block: {units.count(again)} FLOPs per token more ({again / flops:+.1%})"
    chosen = config()
    shown = training_summary("recipe", chosen, Layout(1), "cpu", False)
    assert shown.startswith("# recipe: a dry run, nothing was started\n#\n# layout ")
    assert parse_yaml(shown, "dry run") == chosen.without_defaults(chosen.recorded())
    assert "hooks" not in shown
    whole = training_summary("recipe", chosen, Layout(1), "cpu", False, full=True)
    assert parse_yaml(whole, "dry run") == chosen.recorded()
    for optimizer in ["adamw", "lamb"]:
        found = rows(config("package.module:Own", optimizer, recompute="full", dropout_mode="invariant"), Layout(2))
        assert {name for name, text in found.items() if text.startswith(UNKNOWN)} == {
            "parameters", "compute", "memory", "disk", "communication",
        }  # fmt: skip
        assert found["batch"] == "2 micro batch × 1 accumulation × 2 DP = 4 global batch"


@pytest.mark.parametrize(
    ("steps", "checkpoint", "at_once", "kept"),
    [
        (100, {}, 1, "checkpoint.keep=3"),
        (100, {"every": 5}, 4, "checkpoint.keep=3"),  # the fourth is complete before the first goes
        (100, {"every_minutes": 5.0, "keep": 2, "keep_every": 50}, 5, "checkpoint.keep=2"),
    ],
)
def test_checkpoints_on_the_disk(steps: int, checkpoint: dict[str, Any], at_once: int, kept: str) -> None:
    settings = CheckpointConfig(**{"every_minutes": None} | checkpoint)
    chosen = config(steps=steps).model_copy(update={"checkpoint": settings})
    each = checkpoint_bytes(chosen) or 0
    assert rows(chosen)["disk"] == (
        f"{units.size(each)} for each checkpoint, at most {at_once} at once ({kept}), "
        f"{units.size(at_once * each)} in all"
    )


def piped(*, schedule: str, pipeline: int = 2, **train: object) -> Config:
    chosen = config(**{"global_batch": 8, "micro_batch": 1, **train})
    parallel = {"pipeline": pipeline, "schedule": schedule, "tensor": 2}
    return chosen.with_keys(model={"num_hidden_layers": 8}, parallel=parallel)


def test_ranks_that_need_most_and_sparse_models() -> None:
    chosen = piped(schedule="1f1b")
    layout = check_layout(chosen, 4)
    found, memory = rows(chosen, layout), memory_by_rank(chosen, layout)
    totals = [one.total for one in memory]
    most = totals.index(max(totals))
    wire = wire_bytes(step_transfers(chosen, layout, pipeline_rank=most)) or {}
    assert found["memory"] == (
        f"{units.size(max(totals))} on pipeline rank {most}, which needs most, plus about 300 MiB for Python and torch"
    )
    assert found["  pipeline"] == units.size(memory[most].pipeline)
    assert found["communication"] == f"{units.size(sum(wire.values()))} sent by pipeline rank {most} per step"
    assert "held by a rank at most" in found["parameters"]
    chosen = load_config("olmoe-tiny", ["parallel.expert=2"])
    layout = check_layout(chosen, 4)
    found = rows(chosen, layout)
    active = 989_248 - 8 * 6 * 3 * 64 * 64  # of the 8 experts of 8 blocks, 2 compute a token
    assert found["parameters"].startswith(f"989 k (989,248), {units.count(active)} of them active, ")
    twice, once = (
        sum((wire_bytes(step_transfers(chosen, layout, imbalance=imbalance)) or {}).values())
        for imbalance in (2.0, 1.0)
    )
    experts = "2 of 8 for each token in 8 blocks, 4 on each rank; loads are taken for balanced"
    assert found["experts"].startswith(experts)
    assert found["experts"].endswith(f" more memory and sends (f - 1) × {units.size(twice - once)} more")
    assert rows(chosen.with_keys(parallel={"expert": 1}), Layout(4))["experts"].endswith("all on each rank")
    assert "experts" not in rows(config("llama"))


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_keys_that_differ_from_defaults_are_the_whole_configuration(recipe: str) -> None:
    chosen = load_config(recipe).with_batch_for(256)
    recorded = chosen.recorded()
    assert config_from_sections(chosen.without_defaults(recorded)) == config_from_sections(recorded)


@pytest.mark.parametrize("has_room", [True, False])
def test_the_memory_of_a_machine_has_python_and_torch_of_ranks(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = 2 * 300 * 2**20
    needed = memory_of_machine(config(), Layout(2), range(2))
    expected = needed[1] + processes
    monkeypatch.setattr("shardwise.base.hardware.available_memory", lambda: expected if has_room else expected - 1)
    told = rows(config(), Layout(2))["host memory"]
    assert told.startswith(f"{units.size(expected)} expected for 2 ranks on one machine, ")
    assert ", with about 300 MiB for Python and torch on each; " in told
    assert ("the system may kill a rank here" in told) == (not has_room)


def chosen(world: int = 8, recipe: str = "gpt3-tiny", **parallel: Any) -> tuple[Config, Layout]:
    config = load_config(recipe, [f"parallel.{key}={value}" for key, value in parallel.items()])
    return config, check_layout(config, world)


def picture(config: Config, layout: Layout, width: int) -> list[Text]:
    return schedule_picture(config.parallel, layout.accumulation(config.train), config.recompute, width)


def shown(config: Config, layout: Layout, width: int) -> list[str]:
    return [line.plain.rstrip() for line in picture(config, layout, width)]


def test_pictures_of_schedules() -> None:
    assert shown(*chosen(), 80) == [
        "pp 0  F0F1· · B0--F2B1--F3B2--· B3--",
        "pp 1  · F0B0--F1B1--F2B2--F3B3--· ·",
        "F forward   B backward   · waits   pp: pipeline rank",
        "1f1b, 4 micro-batches: bubble 20.0% with equal stages and instant messages",
    ]
    lines = shown(*chosen(schedule="zbv"), 120)
    assert lines[:4] == [
        "pp 0  F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2I1W1f3i3w3I2W2I3W3·",
        "pp 1  · F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2I2i3I3W2w3W3",
        "F forward   I backward of the input   W backward of the weights   · waits   pp: pipeline rank",
        "small letters: a rank's later stages",
    ]
    assert "bubble 4.0%" in lines[-1]
    config, layout = chosen(96, "gpt3-175b", tensor=1, pipeline=96)
    lines = shown(config, layout, 80)
    assert lines[8] == "… 80 pipeline ranks left out"
    assert lines[7].startswith("pp 7 ")
    assert lines[9].startswith("pp 88 ")
    assert len(_rank_table(layout, partition_by_rank(config, layout), memory_by_rank(config, layout))) == 17


@pytest.mark.parametrize(("width", "schedule"), [(60, "1f1b"), (80, "interleaved_zero_bubble"), (200, "dualpipev")])
def test_a_long_step_is_cut_in_the_middle(width: int, schedule: str) -> None:
    config, layout = chosen(256, "gpt3-175b", schedule=schedule)
    lines = picture(config, layout, width)
    assert max(map(len, lines[:-1])) <= width
    rows = [line.plain for line in lines[:8]]
    assert all(row.startswith(f"pp {rank}  ") and "…" in row for rank, row in enumerate(rows))
    assert len({row.index("…") for row in rows}) == 1
    assert "F0  F1" in rows[0]
    assert lines[8].plain.endswith("units of time left out")
