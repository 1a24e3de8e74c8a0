"""A new optimizer is its class and one record: dry run, plan, training with ZeRO-1, resume and verify then know it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.config import Config, load_config
from shardwise.config.optimizer_specs import OPTIMIZERS, OptimizerSpec
from shardwise.verify.cell_training import make_trainer, train_cell, train_reference
from shardwise.verify.layouts import Cell
from shardwise.verify.miniature import miniature
from shardwise.verify.tolerance import LayoutDifferences, Tolerance
from tests.command_line import CommandLine

RECIPE = "llama2-tiny"
CHOICE = "optimizer.name=momentum"


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
