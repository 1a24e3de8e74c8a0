"""A new optimizer, and a new schedule, is its class and one record: nothing else needs to know its name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config, load_config
from shardwise.config.optimizer_specs import OPTIMIZERS, OptimizerSpec
from shardwise.config.pipeline_schedule_specs import SCHEDULES, ScheduleSpec
from shardwise.pipeline import action_order as orders
from shardwise.pipeline.action_order import Action, action_order
from shardwise.pipeline.timeline import StageTimes, timeline
from shardwise.verify.cell_training import make_trainer, train_cell, train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import LayoutDifferences, Tolerance
from shardwise_plan.makespan import makespan
from tests.command_line import CommandLine
from tests.dist.training import make_config, train

RECIPE = "llama2-tiny"
CHOICE = "optimizer.name=momentum"
NAME = "two_phases"


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum: m ← β₁ m + g, w ← w − lr · (m + λ w)."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.mul_(group["betas"][0]).add_(p.grad.to(p.dtype))
                p.sub_(moment + group["weight_decay"] * p, alpha=float(group["lr"]))


RECORD = OptimizerSpec(
    name="momentum",
    path=f"{__name__}:Momentum",
    keys=("lr", "betas"),
    states=("moment",),
    update_values=13,
    eps=1e-8,
    miniature_lr=1e-2,
    summary="momentum",
)


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, `optimizer.name=momentum` is known in this process."""
    OPTIMIZERS[RECORD.name] = RECORD
    try:
        yield
    finally:
        del OPTIMIZERS[RECORD.name]


def train_and_resume(config: Config, cell: Cell, folder: Path, source: Path) -> tuple[LayoutDifferences, list[str]]:
    """Train on this rank, save, resume from `source`; return differences from one process, and names of the state."""
    with recorded():
        differences, _ = train_cell(config, cell, folder, source, folder / "two-ranks")
        trainer = make_trainer(config, cell)
        trainer.step()
        (state,) = {tuple(state) for state in trainer.optimizer.inner.state.values()}
        trainer.feed.close()
    return differences, list(state)


def test_a_dry_run_names_it_and_a_plan_lists_layouts_for_it(cli: CommandLine) -> None:
    with recorded():
        assert "\n# optimizer      momentum\n" in cli("train", RECIPE, CHOICE, "--dry-run").out
        assert cli.facts("plan", RECIPE, CHOICE, "--device", "cpu:2")["plans"]


def test_two_ranks_with_zero_train_and_resume_like_one_process(tmp_path: Path, ranks: Any) -> None:
    cell = Cell(ranks=2, zero=1)
    with recorded():
        config = miniature(load_config(RECIPE, [CHOICE]), [cell], 4, has_accelerator=False)
        source = train_reference(config, Cell(), tmp_path)
    for differences, state in ranks(2).run(train_and_resume, config, cell, tmp_path, source):
        assert differences.problems(Tolerance.of(config), "one process") == []
        assert state == ["moment"]


class TwoPhases:
    """The order of GPipe, written down without its record."""

    def actions(self, p: int, v: int, m: int, r: int) -> tuple[Action, ...]:
        forward = [Action("forward", r, k) for k in range(m)]
        return (*forward, *(Action("backward", r, k) for k in range(m)))


@contextmanager
def added() -> Iterator[None]:
    """Add the schedule, and remove it at the end."""
    from torch.distributed.pipelining import schedules  # here, as it imports torch's compiler, which is slow

    from shardwise.pipeline.schedule import TORCH_SCHEDULES

    spec = ScheduleSpec(NAME, 1, lambda p, m: None if m >= p else f"at least {p}", holds_all_micro_batches=True)
    tables: tuple[tuple[dict[str, Any], Any], ...] = (
        (SCHEDULES, spec),
        (orders.ORDERS, TwoPhases()),
        (TORCH_SCHEDULES, schedules.ScheduleGPipe),
    )
    for table, entry in tables:
        table[NAME] = entry
    try:
        yield
    finally:
        for table, _ in tables:
            del table[NAME]


def with_schedule(config: Config, name: str, degree: int = 2) -> Config:
    """The names in recipes are a fixed list, so the name is set past their check."""
    parallel = config.parallel.model_copy(update={"schedule": name, "pipeline": degree})
    return config.model_copy(update={"parallel": parallel})


def test_its_order_is_simulated() -> None:
    known, new = (with_schedule(load_config("gpt3-tiny"), name, 3).parallel for name in ("gpipe", NAME))
    stages = (StageTimes(1.0, 2.5, 1.0), StageTimes(1.5, 2.0, 1.0), StageTimes(1.0, 2.0, 1.0))
    with added():
        for rank in range(3):
            assert action_order(new, 4, rank) == action_order(known, 4, rank)
        assert timeline(new, 4, stages, 0.1, "none") == timeline(known, 4, stages, 0.1, "none")
        assert makespan(new, 4, stages, 0.1, "none") == pytest.approx(makespan(known, 4, stages, 0.1, "none"))


def trained(config: Config) -> list[float]:
    with added():
        return train(config, steps=2).losses


def test_it_trains_as_the_one_that_it_repeats(ranks: Any) -> None:
    config = make_config(parallel={"pipeline": 2, "schedule": "gpipe"})
    new = ranks(2).run(trained, with_schedule(config, NAME))
    assert new == ranks(2).run(trained, config)
    assert len(new[0]) == 2
