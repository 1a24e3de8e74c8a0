"""A pipeline's schedule as a picture in text: a row for each pipeline rank, `pp 0`, time to the right.

`F3` is the forward pass of micro-batch 3. `B3--` is its backward pass, which takes twice as long; `I3` and `W3` are the
two halves of a backward pass. A rank's later stages have small letters, which show without colours too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rich.text import Text

from shardwise.config import ParallelConfig, Recompute
from shardwise.pipeline.action_order import Kind
from shardwise.pipeline.simulation import Simulation, simulate


class _Look(NamedTuple):
    """How a kind of action is drawn.

    Attributes:
        letter: for the action.
        meaning: of the letter.
        styles: in a rank's first stage, and in its later ones.
    """

    letter: str
    meaning: str
    styles: tuple[str, str]


_LOOKS: dict[Kind, _Look] = {
    "forward": _Look("F", "forward", ("white on #1f5fbf", "black on #8fb8f0")),
    "backward": _Look("B", "backward", ("white on #1f7f4f", "black on #8fd8a8")),
    "input": _Look("I", "backward of the input", ("white on #107f8f", "black on #90dce0")),
    "weight": _Look("W", "backward of the weights", ("white on #8f6010", "black on #f0d080")),
}
_IDLE = "dim"
MOST_ROWS = 16

_T = TypeVar("_T")


def schedule_picture(
    parallel: ParallelConfig, micro_batches: int, recompute: Recompute, width: int, most_rows: int = MOST_ROWS
) -> list[Text]:
    """The picture, its legend and the bubble; lines of at most `width` characters unless that is too narrow."""
    simulation = simulate(parallel, micro_batches, recompute)
    length, cell, digits = simulation.makespan, len(str(micro_batches - 1)) + 1, len(str(parallel.pipeline - 1))
    most = max((width - len("pp   ") - digits) // cell, 3)
    shown = length if length <= most else most - 1  # one cell shows that others are left out

    def line(rank: int) -> Text:
        cells = shortened(_cells(simulation, rank, cell), shown, lambda _: Text("…".ljust(cell), style=_IDLE))
        return Text.assemble(f"pp {rank:<{digits}}  ", *cells)

    ranks: list[int | Text] = list(range(parallel.pipeline))
    rows = shortened(ranks, most_rows, lambda count: Text(ranks_left_out(count), style=_IDLE))
    lines = [line(row) if isinstance(row, int) else row for row in rows]
    if shown < length:
        lines.append(Text(f"…  {length - shown} of {length} units of time left out", style=_IDLE))
    bubble = (
        f"{parallel.schedule}, {micro_batches} micro-batches: bubble {simulation.bubble:.1%} with equal stages "
        "and instant messages"
    )
    return [*lines, *_legend(simulation, width), Text(bubble)]


def _cells(simulation: Simulation, rank: int, width: int) -> list[Text]:
    """A rank's step as a text of `width` characters for each unit of time."""
    cells = [Text("·".ljust(width), style=_IDLE) for _ in range(simulation.makespan)]
    first_stage = min(timed.action.stage for timed in simulation.ranks[rank])
    for timed in simulation.ranks[rank]:
        look, is_later = _LOOKS[timed.action.kind], timed.action.stage != first_stage
        letter, style = look.letter.lower() if is_later else look.letter, look.styles[is_later]
        cells[timed.start] = Text(f"{letter}{timed.action.micro_batch}".ljust(width), style=style)
        for unit in range(timed.start + 1, timed.end):
            cells[unit] = Text("-" * width, style=style)
    return cells


def shortened(items: list[_T], most: int, left_out: Callable[[int], _T]) -> list[_T]:
    """At most `most` items from both ends, and between them `left_out` of the number of other items."""
    omitted = len(items) - most
    if omitted <= 0:
        return items
    head = (most + 1) // 2
    return [*items[:head], left_out(omitted), *items[head + omitted :]]


def ranks_left_out(count: int) -> str:
    return f"… {count} pipeline ranks left out"


def _legend(simulation: Simulation, width: int) -> list[Text]:
    """The meaning of the letters that occur, in lines of at most `width` characters."""
    kinds = {timed.action.kind for row in simulation.ranks for timed in row}
    looks = [look for kind, look in _LOOKS.items() if kind in kinds]
    parts = [Text.assemble((look.letter, look.styles[0]), f" {look.meaning}") for look in looks]
    parts += [Text("· waits"), Text("pp: pipeline rank")]
    if len({timed.action.stage for timed in simulation.ranks[0]}) > 1:
        parts.append(Text("small letters: a rank's later stages"))
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] = Text.assemble(lines[-1], "   ", part)
        else:
            lines.append(part)
    return lines
