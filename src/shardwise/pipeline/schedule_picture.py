"""A pipeline's schedule as a picture in text: a row for each pipeline rank, `pp 0`, time to the right.

`F3` is the forward pass of micro-batch 3. `B3--` is its backward pass, which takes twice as long; `I3` and `W3` are the
two halves of a backward pass. A rank's later stages have small letters, which show without colours too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from rich.text import Text

from shardwise.config import ParallelConfig, Recompute
from shardwise.pipeline.action_order import ActionKind
from shardwise.pipeline.timeline import Timeline, simulate


class _Drawing(NamedTuple):
    """The look of one kind of action."""

    letter: str  # the letter that stands for it
    meaning: str  # its words in the legend
    first_style: str  # colours in a rank's first stage
    later_style: str  # colours in its later stages


_DRAWINGS: dict[ActionKind, _Drawing] = {
    "forward": _Drawing("F", "forward", "white on #1f5fbf", "black on #8fb8f0"),
    "backward": _Drawing("B", "backward", "white on #1f7f4f", "black on #8fd8a8"),
    "input": _Drawing("I", "backward of the input", "white on #107f8f", "black on #90dce0"),
    "weight": _Drawing("W", "backward of the weights", "white on #8f6010", "black on #f0d080"),
}
_IDLE = "dim"
MOST_ROWS = 16

_T = TypeVar("_T")


def schedule_picture(
    parallel: ParallelConfig, micro_batches: int, recompute: Recompute, width: int, most_rows: int = MOST_ROWS
) -> list[Text]:
    """Return the picture of a pipeline schedule, its legend and the bubble, in lines of at most `width` characters.

    Args:
        parallel: degrees and schedule of the pipeline.
        micro_batches: number of micro-batches of a step.
        recompute: kind of recompute.
        width: characters of a line.
        most_rows: number of rows; in place of ranks beyond it, a row says how many are left out.
    """
    step = simulate(parallel, micro_batches, recompute)
    units = int(step.makespan)
    cell_width = 1 + len(str(micro_batches - 1))
    rank_digits = len(str(parallel.pipeline - 1))
    most_cells = max((width - len("pp   ") - rank_digits) // cell_width, 3)
    shown_cells = units if units <= most_cells else most_cells - 1  # one cell shows that others are left out

    def row_of(rank: int) -> Text:
        cells = shortened(
            _cells(step, rank, cell_width), shown_cells, lambda _: Text("…".ljust(cell_width), style=_IDLE)
        )
        return Text.assemble(f"pp {rank:<{rank_digits}}  ", *cells)

    ranks: list[int | Text] = list(range(parallel.pipeline))
    rows = shortened(ranks, most_rows, lambda count: Text(ranks_left_out(count), style=_IDLE))
    lines = [row_of(row) if isinstance(row, int) else row for row in rows]
    if shown_cells < units:
        lines.append(Text(f"…  {units - shown_cells} of {units} units of time left out", style=_IDLE))
    bubble = (
        f"{parallel.schedule}, {micro_batches} micro-batches: bubble {step.bubble:.1%} with equal stages "
        "and instant messages"
    )
    return [*lines, *_legend(step, width), Text(bubble)]


def _cells(step: Timeline, rank: int, width: int) -> list[Text]:
    cells = [Text("·".ljust(width), style=_IDLE) for _ in range(int(step.makespan))]
    first_stage = min(timed.action.stage for timed in step.ranks[rank])
    for timed in step.ranks[rank]:
        drawing = _DRAWINGS[timed.action.kind]
        if timed.action.stage == first_stage:
            letter = drawing.letter
            style = drawing.first_style
        else:
            letter = drawing.letter.lower()
            style = drawing.later_style
        start = int(timed.start)
        cells[start] = Text(f"{letter}{timed.action.micro_batch}".ljust(width), style=style)
        for unit in range(start + 1, int(timed.end)):
            cells[unit] = Text("-" * width, style=style)
    return cells


def shortened(items: list[_T], most: int, left_out: Callable[[int], _T]) -> list[_T]:
    """Return at most `most` rows or cells of a schedule's picture, from both ends, and between them `left_out`."""
    omitted = len(items) - most
    if omitted <= 0:
        return items
    head = (most + 1) // 2
    return [*items[:head], left_out(omitted), *items[head + omitted :]]


def ranks_left_out(count: int) -> str:
    """Return the row of a schedule's picture that stands for ranks left out."""
    return f"… {count} pipeline ranks left out"


def _legend(step: Timeline, width: int) -> list[Text]:
    kinds = {timed.action.kind for row in step.ranks for timed in row}
    parts = [
        Text.assemble((drawing.letter, drawing.first_style), f" {drawing.meaning}")
        for kind, drawing in _DRAWINGS.items()
        if kind in kinds
    ]
    parts += [Text("· waits"), Text("pp: pipeline rank")]
    if len({timed.action.stage for timed in step.ranks[0]}) > 1:
        parts.append(Text("small letters: a rank's later stages"))
    lines = [parts[0]]
    separator = "   "
    for part in parts[1:]:
        if len(lines[-1]) + len(separator) + len(part) <= width:
            lines[-1] = Text.assemble(lines[-1], separator, part)
        else:
            lines.append(part)
    return lines
