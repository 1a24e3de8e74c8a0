"""The picture of a pipeline's schedule: what it shows, with how many columns, with colours and without."""

from typing import Any

import pytest
from rich.text import Text

from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.estimates.memory import memory_by_rank
from shardwise.pipeline.partition import partition_by_rank
from shardwise.pipeline.schedule_picture import schedule_picture
from shardwise.train.pipeline_table import _rank_table


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
