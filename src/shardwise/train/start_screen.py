"""The screen of a pipeline's start: the schedule as a picture, and each pipeline rank's part.

It is apart from the summary because a dry run does without rich, which takes a tenth of its time to import.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardwise.base import units
from shardwise.config import Config, Layout
from shardwise.estimates.memory import memory_by_rank
from shardwise.pipeline import schedule_picture as picture
from shardwise.train.summary import blocks_of, stages_of_ranks

_PLAIN_WIDTH = 120
"""Characters of a line of the picture where there is no terminal."""


def rank_table(config: Config, layout: Layout, accelerator: bool) -> list[str]:
    """For each pipeline rank: its name, its global ranks, its blocks by stage; where known, parameters, activations."""
    memory = memory_by_rank(config, layout, accelerator)
    rows = []
    for rank, (stages, parameters) in enumerate(stages_of_ranks(config, layout)):
        row = f"pp {rank}  {layout.ranks_of(rank)}  blocks {' and '.join(map(blocks_of, stages))}"
        if memory is not None:
            row += f"  {units.count(parameters or 0)} parameters  {units.size(memory[rank].activations)} activations"
        rows.append(row)
    return picture.shortened(rows, picture.MOST_ROWS, picture.ranks_left_out)


def print_pipeline(console: Console, config: Config, layout: Layout, accelerator: bool) -> None:
    """Print the picture and the table."""
    width = console.width if console.is_terminal else _PLAIN_WIDTH
    micro_batches = layout.accumulation(config.train)
    for line in picture.schedule_picture(config.parallel, micro_batches, config.recompute, width):
        line.rstrip()
        console.print(line, soft_wrap=True)
    for row in rank_table(config, layout, accelerator):
        console.print(Text(row), soft_wrap=True)
