"""Sparse models at layouts, against one process, with their choices counted.

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
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.config import Config, Recompute, Schedule
from shardwise.config.routing import Routing
from shardwise.layers.experts import Experts, choose
from shardwise.train.trainer import Trainer
from shardwise.verify import cell_training, router_choices
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature, trainable_cells
from shardwise.verify.tolerance import LayoutDifferences, Tolerance
from tests.dist.test_experts import CASES, SIZES
from tests.dist.training import make_config

RANKS = 8
STEPS = 4
SPREAD = {"initializer_range": 0.1}
"""So that it matters which experts are chosen."""
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
"""Of a cell, beside the family; `data` follows from the number of ranks."""


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


@functools.cache
def drawn(count: int = 40) -> tuple[tuple[str, Cell], ...]:
    """Layouts, each of a drawn family and with a drawn recompute."""
    generator = random.Random(3)
    return tuple(
        (
            generator.choice([*CASES]),
            replace(generator.choice(possible()), recompute=generator.choice(VALUES["recompute"])),
        )
        for _ in range(count)
    )


@functools.cache
def config_of(family: str, cells: tuple[Cell, ...], *changes: tuple[str, str, Any], steps: int = STEPS) -> Config:
    """The miniature of a family in which all these cells can be trained; `changes`: section, key and value."""
    sections: dict[str, dict[str, Any]] = {"model": {"family": family, **SIZES, **CASES[family], **SPREAD}}
    for section, key, value in changes:
        sections.setdefault(section, {})[key] = value
    config = miniature(make_config(**sections), cells, steps, has_accelerator=False)
    assert trainable_cells(config, cells) == ([*cells], [])
    return config


@dataclass(frozen=True)
class Alone:
    """A training in one process: its folder, and its checkpoint of the middle."""

    folder: Path
    checkpoint: Path


Train = Callable[[Config, Cell], LayoutDifferences]


@pytest.fixture(scope="module")
def trained(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """The differences of a cell from one process, and of one process that goes on from the cell's checkpoint."""

    references: dict[str, Alone] = {}

    def train(config: Config, cell: Cell) -> LayoutDifferences:
        key = repr(config)
        if key not in references:
            folder = tmp_path_factory.mktemp("reference")
            references[key] = Alone(folder, cell_training.train_reference(config, Cell(), folder))
        one = references[key]
        target = tmp_path_factory.mktemp("cell")
        (found, saved), *_ = ranks(cell.ranks).run(
            cell_training.train_cell, config, cell, one.folder, one.checkpoint, target, timeout=300.0
        )
        problems = found.problems(Tolerance.of(config), "one process")
        problems += cell_training.continue_in_one_process(config, Cell(), one.folder, saved).problems(
            Tolerance.of(config), cell.name
        )
        assert not problems, f"{problems}, {found}"
        losses = cell_training.ReferenceTraining.load(one.folder).losses
        assert abs(losses[-1] / losses[0] - 1) > 1e-3, "equal losses of a model that does not move say nothing"
        return found

    yield train
    for size in (4, RANKS):
        ranks(size).close()  # gloo has a thread for each of many groups


def test_a_layout_trains_like_one_process(trained: Train) -> None:
    cell = Cell("cpu", 4, expert=2, pipeline=2, schedule="zbv", zero=2)
    trained(config_of("glm4_moe", (cell,), steps=2), cell)


@pytest.mark.slow
@pytest.mark.sweep(("family", "cell"), drawn)
def test_any_layout_trains_like_one_process(
    family: str, cell: Cell, trained: Train, record_property: Callable[[str, object], None]
) -> None:
    """What it finds is in the report of `--junitxml`."""
    cells = tuple(one for of, one in drawn() if of == family)
    found = trained(config_of(family, cells), cell)
    record_property("loss", max(found.losses, found.resumed))
    record_property("gradient", found.gradients)
    record_property("choices", found.choices.differing)


DOCUMENTS = tuple(("data", key, True) for key in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"))
KEYS: dict[str, tuple[str, Cell, tuple[tuple[str, str, Any], ...]]] = {
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


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_a_layout_with_another_key_trains_like_one_process(name: str, trained: Train) -> None:
    family, cell, changes = KEYS[name]
    trained(config_of(family, (cell,), *changes), cell)


def with_ties(build: Callable[..., Trainer], *arguments: Any) -> Trainer:
    """A trainer of a model in which two experts of each block have one score for every token."""
    trainer = build(*arguments)
    with torch.no_grad():
        for module in trainer.model.modules():
            if isinstance(module, Experts):
                module.router.weight[1] = module.router.weight[0]
    return trainer


def last(routing: Routing, scores: Tensor) -> Tensor:
    """Of equal scores, the experts with the larger numbers."""
    return (routing.experts - 1 - choose(routing, scores.flip(-1))).flip(-1)


def measure_ties(config: Config, cell: Cell, alone: Alone, target: Path) -> tuple[float, LayoutDifferences]:
    """The first loss with choices of the cell's own, and the differences that are judged."""
    build = functools.partial(with_ties, cell_training.build_trainer)
    with mock.patch.object(cell_training, "build_trainer", build), mock.patch.object(router_choices, "choose", last):
        own = router_choices.RouterChoices(cell_training.ReferenceTraining.load(alone.folder).choices)
        loss = cell_training.make_trainer(config, cell, own).step().loss
        return loss, cell_training.train_cell(config, cell, alone.folder, alone.checkpoint, target)[0]


@pytest.mark.slow
def test_a_layout_with_other_choices_is_compared_with_those_of_one_process(ranks: Any, tmp_path: Path) -> None:
    cell = Cell("cpu", 4, expert=2, pipeline=2, schedule="zbv", zero=1)
    config = config_of("olmoe", (cell,), steps=2)
    with mock.patch.object(cell_training, "build_trainer", functools.partial(with_ties, cell_training.build_trainer)):
        alone = Alone(tmp_path, cell_training.train_reference(config, Cell(), tmp_path))
    reference = cell_training.ReferenceTraining.load(tmp_path)
    for loss, found in ranks(cell.ranks).run(measure_ties, config, cell, alone, tmp_path / "cell"):
        assert abs(loss / reference.losses[0] - 1) > 1e-5, "the choices that differ change nothing"
        assert found.problems(Tolerance.of(config), "one process") == []
        # Of one token in several, experts 0 and 1 are neither both chosen nor both left out.
        first = [(name, sample) for name, sample in reference.choices if sample < config.train.global_batch]
        chosen = torch.stack([reference.choices[key] for key in first])
        split = ((chosen == 0).any(-1) & ~(chosen == 1).any(-1)).sum()
        assert found.choices.differing >= split > 0
