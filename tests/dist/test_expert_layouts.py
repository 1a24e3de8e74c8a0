"""Sparse models at every two choices of a layout that can meet, against one process, with their choices counted.

A cell is trained as `shardwise verify` trains it. Where its routers choose other experts than those of one process, as
rounding may decide, it is compared with the choices of one process replayed.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from shardwise.config import Config, Recompute, Schedule
from shardwise.verify import cell_training
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import existing, miniature
from shardwise.verify.tolerance import Differences, Tolerance
from tests.dist.test_experts import CASES, SIZES
from tests.dist.training import make_config

RANKS = 8
STEPS = 4
VALUES: Mapping[str, Sequence[Any]] = {
    "expert": (1, 2, 4),
    "tensor": (1, 2, 4),
    "sequence": (False, True),
    "context": (1, 2),
    "pipeline": (1, 2, 4),
    "schedule": (None, *get_args(Schedule)),
    "data": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "recompute": get_args(Recompute),
}
"""Of each cell of the grid, beside the family; `data` follows from the number of ranks."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@functools.cache
def possible() -> list[Cell]:
    """All layouts of 2 to 8 ranks that differ from each other."""
    found = []
    names = [name for name in VALUES if name != "recompute"]
    for values in itertools.product(*(VALUES[name] for name in names)):
        expert, tensor, sequence, context, pipeline, schedule, data, zero = values
        ranks, shared = tensor * context * pipeline * data, data * context
        is_layout = 1 < ranks <= RANKS and shared % expert == 0 and (pipeline > 1) == (schedule is not None)
        if is_layout and (tensor > 1 or not sequence) and (shared > 1 or not zero):
            found.append(Cell("cpu", ranks, tensor, sequence, context, expert, pipeline, schedule, zero))
    return found


def pairs(family: str, cell: Cell) -> set[Pair]:
    values = {"family": family} | {name: getattr(cell, name) for name in VALUES}
    return set(itertools.combinations(values.items(), 2))


@functools.cache
def possible_pairs() -> set[Pair]:
    by_layout = set().union(*(pairs("", cell) for cell in possible()))
    free = {"family": CASES, "recompute": VALUES["recompute"]}
    found = {pair for pair in by_layout if not {name for name, _ in pair} & {*free}}
    choices = {name: {value for cell in possible() for value in [getattr(cell, name)]} for name in VALUES}
    for (one, ones), (name, values) in itertools.product(free.items(), (choices | free).items()):
        for a, b in itertools.product(ones, values):
            if list(("family", *VALUES)).index(one) < list(("family", *VALUES)).index(name):
                found.add(((one, a), (name, b)))
            elif one != name:
                found.add(((name, b), (one, a)))
    return found


@functools.cache
def grid() -> tuple[tuple[str, Cell], ...]:
    """Few cells in which every two choices that can meet do: the best of some drawn ones, again and again."""
    generator, missing, found = random.Random(3), possible_pairs(), list[tuple[str, Cell]]()
    while missing:
        drawn = [
            (
                generator.choice([*CASES]),
                replace(generator.choice(possible()), recompute=generator.choice(VALUES["recompute"])),
            )
            for _ in range(600)
        ]
        best = max(drawn, key=lambda one: len(pairs(*one) & missing))
        if pairs(*best) & missing:
            found.append(best)
            missing = missing - pairs(*best)
    return tuple(sorted(found, key=lambda one: (one[0], one[1].name)))


QUICK = (("glm4_moe", Cell("cpu", 4, expert=2, pipeline=2, schedule="zbv", zero=2)),)
"""What `make test` runs of the grid."""
ODD = (
    ("qwen3_moe", Cell("cpu", 4, tensor=1, expert=4, zero=3, recompute="full")),
    ("olmoe", Cell("cpu", 8, tensor=2, sequence=True, context=2, expert=4, zero=1)),
    ("mixtral", Cell("cpu", 8, tensor=2, sequence=True, expert=4, zero=2, recompute="selective")),
    ("glm4_moe", Cell("cpu", 8, expert=2, pipeline=2, schedule="interleaved_zero_bubble", zero=3)),
    ("olmoe", Cell("cpu", 8, context=2, expert=2, pipeline=2, schedule="dualpipev", zero=3)),
)
"""Three choices that meet, beside the pairs."""


@functools.cache
def config_of(family: str, cells: tuple[Cell, ...], *changes: tuple[str, str, Any]) -> Config:
    """The miniature of a family in which all these cells can be trained; `changes`: section, key and value."""
    sections: dict[str, dict[str, Any]] = {"model": {"family": family, **SIZES, **CASES[family]}}
    for section, key, value in changes:
        sections.setdefault(section, {})[key] = value
    config = miniature(make_config(**sections), cells, STEPS, has_accelerator=False)
    assert existing(config, cells) == ([*cells], [])
    return config


@dataclass(frozen=True)
class Alone:
    """A training in one process: its folder, and its checkpoint of the middle."""

    folder: Path
    checkpoint: Path


Train = Callable[..., Differences]


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """The differences of a cell from one process, and of one process that goes on from the cell's checkpoint."""

    @functools.cache
    def alone(config_key: tuple[Any, ...]) -> Alone:
        folder = tmp_path_factory.mktemp("reference")
        return Alone(folder, cell_training.train_reference(config_of(*config_key), Cell(), folder))

    def train(family: str, cell: Cell, cells: tuple[Cell, ...], *changes: tuple[str, str, Any]) -> Differences:
        key = (family, cells, *changes)
        one, config = alone(key), config_of(*key)
        target = tmp_path_factory.mktemp("cell")
        (found, saved), *_ = ranks(cell.ranks).run(
            cell_training.measure, config, cell, one.folder, one.checkpoint, target, timeout=300.0
        )
        problems = found.problems(Tolerance.of(config), "one process")
        problems += cell_training.read_back(config, Cell(), one.folder, saved).problems(Tolerance.of(config), cell.name)
        assert not problems, f"{problems}, {found}"
        losses = cell_training.Reference.load(one.folder).losses
        assert abs(losses[-1] / losses[0] - 1) > 1e-3, "equal losses of a model that does not move say nothing"
        return found

    yield train
    for size in (4, RANKS):
        ranks(size).close()  # gloo has a thread for each of many groups


def test_every_two_choices_that_can_meet_do() -> None:
    met = set().union(*(pairs(*one) for one in grid()))
    assert met >= possible_pairs()
    assert len(grid()) <= 45, "the grid has grown: does each new choice need an axis of its own?"
    assert {cell.schedule for _, cell in grid() if cell.expert > 1} >= {*get_args(Schedule)}


@pytest.mark.parametrize(("family", "cell"), QUICK, ids=lambda one: getattr(one, "name", one))
def test_a_layout_trains_like_one_process(family: str, cell: Cell, trained: Train) -> None:
    trained(family, cell, (cell,))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cell"), [*grid(), *ODD], ids=lambda one: getattr(one, "name", one))
def test_any_layout_trains_like_one_process(
    family: str, cell: Cell, trained: Train, record_property: Callable[[str, object], None]
) -> None:
    """What it finds is in the report of `--junitxml`."""
    cells = tuple(one for of, one in (*grid(), *ODD) if of == family)
    found = trained(family, cell, cells)
    record_property("loss", max(found.losses, found.resumed))
    record_property("gradient", found.gradients)
    record_property("choices", found.choices.differing)
