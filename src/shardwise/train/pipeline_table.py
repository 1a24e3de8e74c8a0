"""The screen of a pipeline's start: the schedule as a picture, and each pipeline rank's part.

It is apart from the summary because a dry run does without rich, which takes a tenth of its time to import.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from shardwise.base import units
from shardwise.config import Config, Layout
from shardwise.config.layout import LayoutStage
from shardwise.estimates.memory import MemoryEstimate, memory_by_rank
from shardwise.pipeline import schedule_picture as picture
from shardwise.pipeline.partition import partition_by_rank

_PLAIN_WIDTH = 120  # characters of a line of the picture where there is no terminal


def _rank_table(
    layout: Layout,
    stages_by_rank: Sequence[tuple[list[LayoutStage], int | None]],
    memory: Sequence[MemoryEstimate] | None,
) -> list[str]:
    """For each pipeline rank: its name, its global ranks, its blocks by stage; where known, parameters, activations."""
    rows = []
    for rank, (stages, parameters) in enumerate(stages_by_rank):
        row = f"pp {rank}  {layout.ranks_of(rank)}  blocks {' and '.join(stage.block_range for stage in stages)}"
        if memory is not None:
            row += f"  {units.count(parameters or 0)} parameters  {units.size(memory[rank].activations)} activations"
        rows.append(row)
    return picture.shortened(rows, picture.MOST_ROWS, picture.ranks_left_out)


def print_pipeline(console: Console, config: Config, layout: Layout, accelerator: bool) -> None:
    """Print the picture of a pipeline's schedule, and the table of its ranks, at the start of a training."""
    width = console.width if console.is_terminal else _PLAIN_WIDTH
    micro_batches = layout.accumulation(config.train)
    for line in picture.schedule_picture(config.parallel, micro_batches, config.recompute, width):
        line.rstrip()
        console.print(line, soft_wrap=True)
    memory = memory_by_rank(config, layout, accelerator)
    for row in _rank_table(layout, partition_by_rank(config, layout), memory):
        console.print(Text(row), soft_wrap=True)
