"""Muon on eight CPU ranks against one process: 35 layouts of four families that together have each pair of choices.

What was measured before is kept: a part whose figures are not in the results is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import bits
import parity
from report import RESULTS, Report, Table, environment

STEPS = 20
CELLS = 35
FORMS = {
    "float32": ("optimizer.muon.ns_dtype=float32", False, 1e-5),
    "bfloat16, train.bitwise": ("optimizer.muon.ns_dtype=bfloat16", True, 0.0),
    "bfloat16": ("optimizer.muon.ns_dtype=bfloat16", False, 1e-3),
}
"""Overrides of each form of the iteration, whether bits are compared, and the largest difference of a loss."""
_OVERRIDES = "precision.mode=float32 optimizer.name=muon"


def run(rounds: int) -> Report:
    figures = measured()
    groups = bits.pairwise_cells(CELLS)
    for form, (overrides, bitwise, _) in FORMS.items():
        for (family, pipeline), cells in groups.items():
            key = f"{form}: {family}, pipeline degree {pipeline}"
            if key in figures:
                continue
            result = bits.verify_cells(family, cells, f"{_OVERRIDES} {overrides}", STEPS, bitwise=bitwise)
            *outcomes, _ = result.outcomes  # the last is one process that reads a checkpoint
            figures[key] = {outcome.cell.name: outcome.facts() for outcome in outcomes}
            report(figures).save(RESULTS, environment())
            print(f"{key}: {[loss_difference(facts) for facts in figures[key].values()]}", flush=True)
    return report(figures)


def measured() -> dict[str, dict[str, Any]]:
    """The layouts of each part that was measured, with their differences."""
    path = RESULTS / "muon_layouts.json"
    figures: dict[str, dict[str, Any]] = json.loads(path.read_text())["figures"] if path.exists() else {}
    return figures


def loss_difference(facts: Mapping[str, Any]) -> float:
    """The largest relative difference of a loss, before and after a checkpoint changed hands; inf if it failed."""
    return max(facts.get("losses", float("inf")), facts.get("resumed", float("inf")))


def report(figures: Mapping[str, Mapping[str, Any]]) -> Report:
    rows = []
    targets = []
    for form, (_, bitwise, limit) in FORMS.items():
        parts = {key.partition(": ")[2]: part for key, part in figures.items() if key.partition(": ")[0] == form}
        for name, part in parts.items():
            largest = max(map(loss_difference, part.values()))
            rows.append([form, name, str(len(part)), f"{largest:.0e}" if largest else "0"])
        layouts = [facts for part in parts.values() for facts in part.values()]
        differing = [facts for facts in layouts if not loss_difference(facts) <= limit]
        if bitwise:
            differing = [facts for facts in layouts if facts["problems"]]
        what = "no bit of losses, weights and momentum differs" if bitwise else f"losses within {limit:g}"
        reached = f"MISSED by {len(differing)}" if differing else "reached"
        if not layouts:
            reached = "not measured"
        targets.append(f"iteration in {form}, {len(layouts)} of {CELLS} layouts: {what}: {reached}")
    return Report(
        "muon_layouts",
        "Muon at layouts of eight ranks against one process",
        [Table(("iteration", "part", "layouts", "largest difference of a loss"), rows)],
        {key: dict(part) for key, part in figures.items()},
        targets=targets,
        notes=[
            f"{STEPS} steps of the miniatures of {', '.join(parity.FAMILIES.values())} in float32; after the half of "
            "them each layout reads the checkpoint of another one.",
            "The layouts together have each pair of family, degrees, sequence parallelism, schedule, ZeRO-1 and "
            "recompute. Differences are relative.",
        ],
    )
