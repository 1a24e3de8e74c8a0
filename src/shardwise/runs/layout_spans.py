"""The layouts at which a run was started, and the steps that each of them took.

A run may go on at another layout than that at which it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.base.mesh_axes import AXES, layout_text
from shardwise.base.yaml_and_json import count_of

ONE_PROCESS = "one process"


@dataclass(frozen=True)
class LayoutSpan:
    """A layout at which a run took steps."""

    steps_before: int  # steps that were done before the first one at this layout
    layout: str  # such as `TP 2 + SP × DP 2`


def short_layout(layout: Mapping[str, Any]) -> str:
    """Return the layout that a run has recorded, without degrees of 1; an empty text if it lacks a degree."""
    if not all(axis.is_optional or isinstance(layout.get(axis.degree), int) for axis in AXES):
        return ""
    return layout_text(layout, sequence=bool(layout.get("sequence")), ones=False) or ONE_PROCESS


def layout_spans(events: Iterable[Mapping[str, Any]]) -> list[LayoutSpan]:
    """Return the layouts of the steps that count, in their order; [] if a start has not recorded its layout.

    A start whose steps were all undone leaves no layout, and equal layouts that follow each other are one.

    Args:
        events: "start" and "resume" events of a run, in their order; others do not matter.
    """
    starts: list[LayoutSpan] = []
    for event in events:
        if event.get("event") == "start":
            layout = event.get("layout")
            text = short_layout(layout) if isinstance(layout, Mapping) else ""
            starts.append(LayoutSpan(count_of(event.get("steps_before")) or 0, text))
        elif event.get("event") == "resume" and starts:
            # Starts of older versions did not record their first step.
            starts[-1] = LayoutSpan(count_of(event.get("step")) or 0, starts[-1].layout)
    spans: list[LayoutSpan] = []
    for start in starts:
        while spans and spans[-1].steps_before >= start.steps_before:
            spans.pop()
        if not spans or spans[-1].layout != start.layout:
            spans.append(start)
    return spans if all(span.layout for span in spans) else []


def spans_text(spans: Sequence[LayoutSpan]) -> str:
    """Say which layouts a run had: `TP 2 + SP to step 60, then DP 2`; an empty text without spans."""
    ends = [f" to step {later.steps_before:,}" for later in spans[1:]]
    texts = [f"{span.layout}{end}" for span, end in zip(spans, [*ends, ""], strict=False)]
    return ", ".join(texts[:-1] + [f"then {text}" for text in texts[-1:]]) if len(texts) > 1 else "".join(texts)
