"""`train.bitwise` on eight CPU ranks against one process: every layout of four families, and pairs of choices.

In float32 it is every layout, and in other formats 60 layouts that together have each pair of choices. What was
measured before is kept, since it takes hours: a part whose figures are not in the results is measured.
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parity
from report import RESULTS, Report, Table, environment

if TYPE_CHECKING:
    from shardwise.verify.layouts import Cell
    from shardwise.verify.verification import Verification

FORMATS = {
    "mixed, AdamW": "precision.mode=mixed",
    "bfloat16 by stochastic rounding, AdamW": "precision.mode=bfloat16 precision.rounding=stochastic",
    "float32, LAMB": "precision.mode=float32 optimizer.name=lamb",
}
"""Overrides of the trainings of which pairs of choices are compared."""
CELLS_OF_FORMAT = 60


def run(rounds: int) -> Report:
    from shardwise.verify.miniature import SAMPLES_WITH_BITS

    figures = measured()
    for pipeline, family in itertools.product(parity.PIPELINES, parity.FAMILIES):
        whole = f"{family}, pipeline degree {pipeline}"
        for tensor, cells in by_tensor_degree(family, pipeline).items():
            key = f"{whole}, tensor degree {tensor}"
            if whole not in figures and key not in figures:
                figures[key] = origin(environment(), SAMPLES_WITH_BITS) | verify_bits(
                    family, cells, "precision.mode=float32"
                )
                report(figures).save(RESULTS, environment())
                print(f"{key}: {figures[key]}", flush=True)
    for name, overrides in FORMATS.items():
        if name not in figures:
            figures[name] = origin(environment(), SAMPLES_WITH_BITS) | verify_pairs(overrides)
            report(figures).save(RESULTS, environment())
    parity.add_bits()
    return report(figures)


def measured() -> dict[str, dict[str, Any]]:
    """The layouts of each part that was measured, the names of those that differ, and `origin`."""
    path = RESULTS / "bits.json"
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    # Parts of files that had no origins have that of the file.
    return {key: origin(stored["environment"], micro_batch=1) | part for key, part in stored["figures"].items()}


def origin(surroundings: Mapping[str, Any], micro_batch: int) -> dict[str, Any]:
    """The commit, the date and the machine of a measurement, from its `environment`, and samples of a micro-batch."""
    machine = f"{surroundings['cores']} cores of {surroundings['cpu']}"
    return {
        "micro_batch": micro_batch, "commit": surroundings["commit"], "date": surroundings["date"], "machine": machine,
    }  # fmt: skip


def by_tensor_degree(family: str, pipeline: int) -> dict[int, list[Cell]]:
    """All layouts of a family and pipeline degree, by tensor degree: few data-parallel ranks need small batches."""
    groups: dict[int, list[Cell]] = {}
    for cell in layouts_of(family):
        if cell.pipeline == pipeline:
            groups.setdefault(cell.tensor, []).append(cell)
    return groups


def layouts_of(family: str) -> list[Cell]:
    from shardwise.config.load import load_config
    from shardwise.verify.layouts import layouts_to_verify

    chosen = {"parallel.schedule": None, "train.recompute": None, "optimizer.zero": [0, 1]}
    return layouts_to_verify(load_config(parity.FAMILIES[family], []), "cpu", parity.RANKS, chosen)


def verify_bits(family: str, cells: Sequence[Cell], overrides: str) -> dict[str, Any]:
    """The number of layouts of one pipeline degree that were compared, and the names of those that differ."""
    found = verify_cells(family, cells, overrides, parity.STEPS, bitwise=True)
    return {"layouts": len(cells), "differing": [f"{family}, {outcome.cell.name}" for outcome in found.broken]}


def by_family(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The layouts of each family, and those that differ."""
    families: dict[str, dict[str, int]] = {}
    for key, part in figures.items():
        if key not in FORMATS:
            counts = families.setdefault(key.partition(",")[0], {"with bitwise": 0, "bits differ": 0})
            counts["with bitwise"] += part["layouts"]
            counts["bits differ"] += len(part["differing"])
    return families


def verify_pairs(overrides: str) -> dict[str, Any]:
    """Return how many layouts of a pairwise set were compared, and the names of those of which a bit differs."""
    differing: list[str] = []
    for (family, _), cells in pairwise_cells(CELLS_OF_FORMAT).items():
        differing += verify_bits(family, cells, overrides)["differing"]
        print(f"{overrides}, {family}: {len(cells)} layouts, {len(differing)} differ so far", flush=True)
    return {"layouts": CELLS_OF_FORMAT, "differing": differing}


def pairwise_cells(count: int) -> dict[tuple[str, int], list[Cell]]:
    """Return `count` layouts by family and pipeline degree, which together have each pair of choices."""
    by_choice: dict[tuple[Any, ...], tuple[str, Cell]] = {}
    for family in parity.FAMILIES:
        for cell in layouts_of(family):
            choices = (family, cell.tensor, cell.sequence, cell.pipeline, cell.schedule, cell.zero, cell.recompute)
            by_choice[choices] = (family, cell)
    cells = [by_choice[choices] for choices in covering(list(by_choice), count)]
    groups: dict[tuple[str, int], list[Cell]] = {}
    for family, cell in sorted(cells, key=lambda pair: (pair[0], pair[1].pipeline)):
        groups.setdefault((family, cell.pipeline), []).append(cell)
    return groups


def verify_cells(family: str, cells: Sequence[Cell], overrides: str, steps: int, *, bitwise: bool) -> Verification:
    """Compare layouts of one pipeline degree with one process, by the miniature of a family's recipe."""
    from shardwise.config.load import load_config
    from shardwise.verify import miniature, verification

    recipe = load_config(parity.FAMILIES[family], overrides.split())
    # Grains are those of the largest degrees, whatever degrees the set has here.
    largest = replace(cells[0], tensor=parity.RANKS // cells[0].pipeline, sequence=False, zero=0)
    config = miniature.miniature(recipe, [*cells, largest], steps, has_accelerator=False, bitwise=bitwise)
    kept, reasons = miniature.trainable_cells(config, cells)
    if len(kept) < len(cells):
        raise RuntimeError("\n".join(reasons))
    with tempfile.TemporaryDirectory() as folder:
        return verification.verify(config, kept, Path(folder))


def covering(choices: Sequence[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """Return `count` of the combinations that together have each pair of values that any of them has, if it can be."""
    shuffled = list(choices)
    random.Random(0).shuffle(shuffled)

    def pairs(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(pairs, shuffled))
    taken = []
    while len(taken) < count:
        best = max(shuffled, key=lambda combination: len(pairs(combination) & missing))
        shuffled.remove(best)
        missing -= pairs(best)
        taken.append(best)
    if missing:
        raise RuntimeError(f"{count} layouts have not all pairs: {missing}")
    return taken


def report(figures: Mapping[str, Mapping[str, Any]]) -> Report:
    rows = []
    for key, part in figures.items():
        numbers = [str(part["layouts"]), str(len(part["differing"])), str(part["micro_batch"])]
        rows.append([key, *numbers, part["commit"], part["date"], part["machine"]])
    families = by_family(figures)
    layouts = sum(counts["with bitwise"] for counts in families.values())
    broken = sum(len(part["differing"]) for part in figures.values())
    return Report(
        "bits",
        "Bit-equal training at layouts of eight ranks against one process",
        [Table(("part", "layouts", "that differ", "micro-batch", "commit", "date", "machine"), rows)],
        {key: dict(part) for key, part in figures.items()},
        targets=[f"no bit differs at any measured layout: {f'MISSED by {broken}' if broken else 'reached'}"],
        notes=[
            "Compared are the initial weights, the losses and gradient norms of 4 steps, the gradients of the first, "
            "weights and moments after the middle and the end, and a resume from the checkpoint of another layout, of "
            "the same part. Each sum has the parts of the largest tensor degree beside the pipeline degree.",
            f"{layouts:,} layouts in float32 were measured, of 1,080: all combinations of degrees, sequence "
            "parallelism, ZeRO-1, schedule and recompute of the miniatures of "
            f"{', '.join(parity.FAMILIES.values())}.",
            "Other formats: 60 layouts and families that together have each pair of choices.",
        ],
    )
