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
from tests.dist.training import SPARSE, make_config
from tests.sweeps import few

STEPS = 4
SPREAD = {"initializer_range": 0.1}
"""So that it matters which experts are chosen."""
DOCUMENTS = tuple(("data", key, True) for key in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"))
LAYOUTS: dict[str, tuple[str, Cell, tuple[tuple[str, str, Any], ...]]] = {
    "EP 2, PP 2, ZeRO-2": ("glm4_moe", Cell("cpu", 4, expert=2, pipeline=2, schedule="zbv", zero=2), ()),
    "EP 4, ZeRO-3": ("qwen3_moe", Cell("cpu", 4, expert=4, zero=3, recompute="full"), ()),
    "EP 4, TP 2, ZeRO-2": (
        "mixtral", Cell("cpu", 8, tensor=2, sequence=True, expert=4, zero=2, recompute="selective"), ()
    ),
    "EP 4, TP 2, CP 2": ("olmoe", Cell("cpu", 8, tensor=2, sequence=True, context=2, expert=4, zero=1), ()),
    "EP 2, PP 2, CP 2": (
        "olmoe", Cell("cpu", 8, context=2, expert=2, pipeline=2, schedule="dualpipev", zero=3), ()
    ),
    "offload": ("glm4_moe", Cell("cpu", 4, expert=2, zero=3), (("optimizer", "offload", True),)),
    "documents and a window": (
        "mixtral", Cell("cpu", 4, context=2, expert=2),
        (*DOCUMENTS, ("data", "eod_token", 3), ("model", "sliding_window", 5)),
    ),
    "keys by a ring": (
        "qwen3_moe", Cell("cpu", 4, context=2, expert=2, pipeline=2, schedule="interleaved_zero_bubble"),
        (("parallel", "context_keys", "ring"),),
    ),
    "dropout": (
        "qwen3_moe", Cell("cpu", 4, expert=2, pipeline=2, schedule="zbv", recompute="full"),
        (("model", "attention_dropout", 0.1),),
    ),
    "overlap": (
        "glm4_moe", Cell("cpu", 4, tensor=2, sequence=True, expert=2, zero=1),
        (("parallel", "tensor_overlap", "pieces"), ("model", "n_shared_experts", 2)),
    ),
}  # fmt: skip
"""The family, the layout, and further keys: section, key and value."""


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
    check(family, cell, (), ranks, tmp_path)


@pytest.mark.parametrize("name", few(LAYOUTS, "EP 2, PP 2, ZeRO-2"))
def test_a_layout_trains_like_one_process(name: str, ranks: Any, tmp_path: Path) -> None:
    check(*LAYOUTS[name], ranks, tmp_path)


def check(family: str, cell: Cell, changes: Sequence[tuple[str, str, Any]], ranks: Any, tmp_path: Path) -> None:
    """A layout trains like one process, and one process goes on from its checkpoint."""
    sections: dict[str, dict[str, Any]] = {"model": {**SIZES, **SPARSE[family], **SPREAD}}
    for section, key, value in changes:
        sections.setdefault(section, {})[key] = value
    config = miniature(make_config(**sections), [cell], STEPS, has_accelerator=False)
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
