"""The screen of a run's start: the rows of the summary, the schedule as a picture, and each pipeline rank's part.

It is apart from the summary because a dry run does without rich, which takes a tenth of its time to import.
"""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwise.base import units
from shardwise.config import Config, Layout
from shardwise.estimates.memory import memory_by_rank
from shardwise.pipeline import schedule_picture as picture
from shardwise.train.summary import blocks_of, stages_of_ranks

_PLAIN_WIDTH = 120
"""Characters of a line of the picture where there is no terminal."""


def print_summary(console: Console, rows: list[tuple[str, str]]) -> None:
    """Print the rows of the summary: in a box on a terminal, elsewhere as plain lines."""
    if not console.is_terminal:
        for name, value in rows:
            console.print(Text(f"{name:<8} {value}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        # As `Text`, since rich reads square brackets in a plain string, such as a path, as markup.
        table.add_row(name, Text(value))
    _print_box(console, "shardwise", table)


def _print_box(console: Console, title: str, content: Table | Group) -> None:
    console.print(Panel(content, title=title, title_align="left", border_style="dim", expand=False))


def schedule_picture(config: Config, layout: Layout, width: int) -> list[Text]:
    """The picture of `pipeline/schedule_picture.py` of a run."""
    return picture.schedule_picture(config.parallel, layout.accumulation(config.train), config.recompute, width)


def rank_table(config: Config, layout: Layout, accelerator: bool) -> list[tuple[str, str, str, str, str]]:
    """For each pipeline rank: its name, its global ranks, its blocks by stage, its parameters, its activations."""
    memory = memory_by_rank(config, layout, accelerator) or []
    rows = []
    for rank, (estimate, (stages, parameters)) in enumerate(zip(memory, stages_of_ranks(config, layout), strict=True)):
        blocks = "blocks " + " and ".join(map(blocks_of, stages))
        shown_parameters = f"{units.count(parameters or 0)} parameters"
        activations = f"{units.size(estimate.activations)} activations"
        rows.append((f"pp {rank}", layout.ranks_of(rank), blocks, shown_parameters, activations))
    return picture.shortened(rows, picture.MOST_ROWS, lambda count: (picture.ranks_left_out(count), "", "", "", ""))


def print_pipeline(console: Console, config: Config, layout: Layout, accelerator: bool) -> None:
    """Print the picture and the table: in a box on a terminal, elsewhere as plain lines."""
    rows = rank_table(config, layout, accelerator)
    if not console.is_terminal:
        for line in schedule_picture(config, layout, _PLAIN_WIDTH):
            console.print(Text(line.plain.rstrip()), soft_wrap=True)
        for row in rows:
            console.print(Text("  ".join(row).rstrip()), soft_wrap=True)
        return
    columns = Table.grid(padding=(0, 2))
    for row in rows:
        columns.add_row(*row)
    # The box takes 4 characters of each line: its borders, and a space beside each.
    _print_box(console, "pipeline", Group(*schedule_picture(config, layout, console.width - 4), columns))
