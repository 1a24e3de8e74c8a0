"""Sparse models at layouts and with keys that meet, against one process, with their choices counted.

A cell is trained as `shardwise verify` trains it. Where its routers choose other experts than those of one process, as
rounding may decide, it is compared with the choices of one process replayed.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.config import Recompute, Schedule
from shardwise.verify import cell_training
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature, trainable_cells
from shardwise.verify.tolerance import Tolerance
from tests.dist.test_experts import SIZES
from tests.dist.training import SPARSE, Sections, make_config, named

STEPS = 4
VALUES: Mapping[str, Sequence[Any]] = {
    "tensor": (1, 2, 4),
    "sequence": (False, True),
    "context": (1, 2),
    "expert": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "schedule": (None, *get_args(Schedule)),
    "zero": (0, 1, 2, 3),
    "data": (1, 2, 4, 8),
}
"""Of the layouts of 2 to 8 ranks."""


def possible() -> list[Cell]:
    """All layouts that differ from each other, without recompute."""
    found = list[Cell]()
    for *values, data in itertools.product(*VALUES.values()):
        tensor, sequence, context, expert, pipeline, schedule, zero = values
        ranks, shared = tensor * context * pipeline * data, data * context
        is_layout = 1 < ranks <= 8 and shared % expert == 0 and (pipeline > 1) == (schedule is not None)
        if is_layout and (tensor > 1 or not sequence) and (shared > 1 or not zero):
            found.append(Cell("cpu", ranks, *values))
    return found


def pairs(family: str, cell: Cell) -> set[frozenset[tuple[str, Any]]]:
    values = {"family": family} | {name: getattr(cell, name) for name in (*VALUES, "recompute")}
    return {frozenset(pair) for pair in itertools.combinations(values.items(), 2)}


def pairwise() -> list[tuple[str, Cell]]:
    """Few families and layouts in which every two choices that can meet do: the best of some drawn ones, repeatedly."""
    generator, found = random.Random(3), list[tuple[str, Cell]]()
    cells = [replace(cell, recompute=recompute) for cell in possible() for recompute in get_args(Recompute)]
    missing = set[frozenset[tuple[str, Any]]]().union(*(pairs(family, cell) for family in SPARSE for cell in cells))
    while missing:
        candidates = [(generator.choice([*SPARSE]), generator.choice(cells)) for _ in range(600)]
        best = max(candidates, key=lambda candidate: len(pairs(*candidate) & missing))
        if new := pairs(*best) & missing:
            found.append(best)
            missing -= new
    return found


@pytest.mark.slow
@pytest.mark.sweep(("family", "cell"), pairwise)
def test_any_layout_trains_like_one_process(family: str, cell: Cell, ranks: Any, tmp_path: Path) -> None:
    check(family, cell, {}, ranks, tmp_path)


@pytest.mark.parametrize(("family", "cell", "sections"), named("layouts of experts", "EP 2, PP 2, ZeRO-2"))
def test_layouts_train_alike(family: str, cell: dict[str, Any], sections: Sections, ranks: Any, tmp_path: Path) -> None:
    check(family, Cell("cpu", **cell), sections, ranks, tmp_path)


def check(family: str, cell: Cell, sections: Sections, ranks: Any, tmp_path: Path) -> None:
    """A layout trains like one process, and one process goes on from its checkpoint."""
    # Spread so that it matters which experts are chosen.
    model = {**SIZES, **SPARSE[family], "initializer_range": 0.1, **sections.get("model", {})}
    config = miniature(make_config(**{**sections, "model": model}), [cell], STEPS, has_accelerator=False)
    assert trainable_cells(config, [cell]) == ([cell], [])
    (one := tmp_path / "one").mkdir()
    source = cell_training.train_reference(config, Cell(), one)
    (found, saved), *_ = ranks(cell.ranks).run(
        cell_training.train_cell, config, cell, one, source, tmp_path / "cell", timeout=300.0
    )
    problems = found.problems(Tolerance.of(config), "one process")
    resumed = cell_training.continue_in_one_process(config, Cell(), one, saved)
    assert not [*problems, *resumed.problems(Tolerance.of(config), cell.name)], f"{problems}, {found}"
    losses = cell_training.ReferenceTraining.load(one).losses
    assert max(losses) / min(losses) - 1 > 1e-3, "equal losses of a model that does not move say nothing"
