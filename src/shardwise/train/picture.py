"""A pipeline's schedule as a picture in text: a row for each pipeline rank, `pp 0`, time to the right.

`F3` is the forward pass of micro-batch 3, `B3--` its backward pass, which takes twice as long, `I3` and `W3` the two
parts of one. Letters are small in a rank's later stages, so that a picture without colours says as much.
"""

from __future__ import annotations

from typing import TypeVar

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwise import units
from shardwise.config import Config, Layout
from shardwise.cost.memory import memory_by_rank
from shardwise.cost.simulation import Simulation, simulate
from shardwise.plan.order import Kind
from shardwise.plan.stage import Stage
from shardwise.train.summary import stages_of_ranks

_LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
_MEANING: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward of the input",
    "weight": "backward of the weights",
}
_STYLES: dict[Kind, tuple[str, str]] = {
    "forward": ("white on #1f5fbf", "black on #8fb8f0"),
    "backward": ("white on #1f7f4f", "black on #8fd8a8"),
    "input": ("white on #107f8f", "black on #90dce0"),
    "weight": ("white on #8f6010", "black on #f0d080"),
}
"""Of a rank's first stage, and of its later ones."""
_IDLE = "dim"
_MOST_ROWS = 16
_PLAIN_WIDTH = 120

_T = TypeVar("_T")


def schedule_picture(config: Config, layout: Layout, width: int) -> list[Text]:
    """The picture, what it means and its bubble, in lines of at most `width` characters as far as that can be."""
    micro_batches = layout.accumulation(config.train)
    simulation = simulate(config.parallel, micro_batches, config.train.recompute)
    ranks, omitted_ranks = _ends(list(range(layout.pipeline)), _MOST_ROWS)
    cell = len(str(micro_batches - 1)) + 1
    rows = {rank: _row(simulation, rank, cell) for rank in ranks}
    names = {rank: f"pp {rank:<{len(str(layout.pipeline - 1))}}  " for rank in ranks}
    most = max((width - len(names[0])) // cell, 3)
    lines, omitted = [], 0
    for place, rank in enumerate(ranks):
        if omitted_ranks and place == _MOST_ROWS // 2:
            lines.append(Text(f"… {omitted_ranks} pipeline ranks left out", style=_IDLE))
        shown, omitted = _ends(rows[rank], most - 1 if len(rows[rank]) > most else most)
        if omitted:
            shown.insert((len(shown) + 1) // 2, Text("…".ljust(cell), style=_IDLE))
        lines.append(Text.assemble(names[rank], *shown))
    if omitted:
        lines.append(Text(f"…  {omitted} of {simulation.makespan} units of time left out", style=_IDLE))
    return [*lines, *_legend(simulation, width), _bubble(config, simulation, micro_batches)]


def rank_table(config: Config, layout: Layout, accelerator: bool) -> list[tuple[str, str, str, str, str]]:
    """For each pipeline rank its name, which ranks it is, its blocks by stages, its parameters, its activations."""
    memory, stages_of = memory_by_rank(config, layout, accelerator) or [], stages_of_ranks(config, layout)
    rows = [
        (
            f"pp {rank}",
            layout.ranks_of(rank),
            "blocks " + " and ".join(map(_blocks, stages)),
            f"{units.count(parameters or 0)} parameters",
            f"{units.size(estimate.activations)} activations",
        )
        for rank, (estimate, (stages, parameters)) in enumerate(zip(memory, stages_of, strict=True))
    ]
    shown, omitted = _ends(rows, _MOST_ROWS)
    if omitted:
        shown.insert(_MOST_ROWS // 2, (f"… {omitted} pipeline ranks left out", "", "", "", ""))
    return shown


def print_pipeline(console: Console, config: Config, layout: Layout, accelerator: bool) -> None:
    """Both, in a box on a terminal, elsewhere in plain lines."""
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
    lines = schedule_picture(config, layout, console.width - 4)
    box = Panel(Group(*lines, columns), title="pipeline", title_align="left", border_style="dim", expand=False)
    console.print(box)


def _row(simulation: Simulation, rank: int, cell: int) -> list[Text]:
    """A rank's step, a text of `cell` characters for each unit of time."""
    units_ = [Text("·".ljust(cell), style=_IDLE) for _ in range(simulation.makespan)]
    first = min(each.action.stage for each in simulation.ranks[rank])
    for each in simulation.ranks[rank]:
        is_later = each.action.stage != first
        letter, style = _LETTERS[each.action.kind], _STYLES[each.action.kind][is_later]
        letter = letter.lower() if is_later else letter
        units_[each.start] = Text(f"{letter}{each.action.micro_batch}".ljust(cell), style=style)
        for later in range(each.start + 1, each.end):
            units_[later] = Text("-" * cell, style=style)
    return units_


def _ends(items: list[_T], most: int) -> tuple[list[_T], int]:
    """At most so many, from both ends, and how many are left out."""
    if len(items) <= most:
        return items, 0
    head = (most + 1) // 2
    return items[:head] + items[len(items) - (most - head) :], len(items) - most


def _legend(simulation: Simulation, width: int) -> list[Text]:
    """What the letters mean, as far as they are there."""
    kinds = {each.action.kind for row in simulation.ranks for each in row}
    several = len({each.action.stage for each in simulation.ranks[0]}) > 1
    parts = [
        Text.assemble((_LETTERS[kind], _STYLES[kind][0]), f" {_MEANING[kind]}") for kind in _LETTERS if kind in kinds
    ]
    parts += [Text("· waits"), Text("pp: pipeline rank")]
    if several:
        parts.append(Text("small letters: a rank's later stages"))
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] = Text.assemble(lines[-1], "   ", part)
        else:
            lines.append(part)
    return lines


def _bubble(config: Config, simulation: Simulation, micro_batches: int) -> Text:
    return Text(
        f"{config.parallel.schedule}, {micro_batches} micro-batches: bubble {simulation.bubble:.1%} with equal stages "
        "and instant messages"
    )


def _blocks(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    return f"{first}" if first == last else f"{first}-{last}"
