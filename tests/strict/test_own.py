"""Programs and models of a user's own on the strict device, as they are; ranks that have nothing to train."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import LAMB, Mesh, ZeroRedundancyOptimizer
from shardwise.config import Config, Precision
from shardwise.distributed.placement import placements
from shardwise.train import build as train_build
from shardwise.train.build import build_optimizer
from shardwise.train.trainer import Trainer
from tests.arch.source import ROOT
from tests.arch.test_docs import SCRIPTS
from tests.dist import test_drift as drift
from tests.dist import test_own_loop as loops
from tests.dist import test_own_training as training
from tests.dist.checkpoints import load, make_trainer, save, step_folder
from tests.dist.own_models import Plain
from tests.dist.training import make_config, named
from tests.e2e.command import Outcome, shardwise
from tests.e2e.test_own_model import SCRIPT, reference
from tests.rank_pool import Pools
from tests.strict import build
from tests.strict.ranks import OnDevice

scaled = loops.test_all_ranks_skip_a_scaled_step_not_finite_on_one
# `env`: in processes of their own, as those kept warm have imported torch without the device.
TORCHRUN = ("/usr/bin/env", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
PLAIN = "dist.init_process_group()"
STAGES = (("model.embed_tokens.", "model.layers.0."), ("model.layers.1.", "model.norm.", "lm_head."))
"""How the names of their parameters start."""
EVERYTHING = ("",)
PIPELINE = {"pipeline": 2, "schedule": "1f1b"}


@pytest.mark.parametrize(
    "test",
    [
        loops.test_frozen_parameters_take_the_first_ranks_values,
        loops.test_other_parameters_on_another_rank_are_refused_with_the_first_difference,
        loops.test_layers_without_a_seed_agree_on_the_first_ranks,
        loops.test_clips_the_whole_models_gradient_by_hand_with_and_without_overlap,
        partial(scaled, True, {}),
        partial(scaled, False, {"optimizer_class": LAMB, "lr": 0.01}),
        loops.test_tensor_parallel_ranks_skip_a_scaled_step_together,
        training.test_plain_dropout_differs_between_replicas_micro_batches_and_steps_and_can_be_repeated,
    ],
    ids=lambda test: getattr(test, "func", test).__name__.removeprefix("test_"),
)
def test_loops_that_name_no_device(test: Callable[[Any], None], strict: Pools) -> None:
    """What tests/dist finds on the CPU, with `torch.set_default_device`."""
    test(lambda size: OnDevice(strict(size)))


def steps(config: Config) -> list[float]:
    trainer = make_trainer(config)
    return [*(trainer.step().loss for _ in range(3)), *trainer.evaluator.held_out()]


def state_after_a_step() -> bool:
    """Whether a step with dropout leaves the device's generator as it was, for what the user draws."""
    trainer = training.trainer("Dropping")
    before = torch.strict.get_rng_state()
    trainer.step()
    return torch.equal(torch.strict.get_rng_state(), before)


def test_a_users_own_random_numbers_are_theirs(strict: Pools) -> None:
    assert strict(1).run(state_after_a_step) == [True]


def test_a_model_whose_layers_have_no_seed(strict: Pools) -> None:
    """With tensor parallelism it is trained and evaluated as in one process on the CPU."""
    model = {"family": "tests.dist.own_models:Sharded", "vocab_size": 131}
    wanted = steps(make_config(model=model))
    for found in strict(2).run(steps, make_config(model=model, parallel={"tensor": 2})):
        assert found == pytest.approx(wanted, rel=1e-6)


def ties() -> list[bool]:
    """Whether modules that share a weight share it as the constructor made them, and after the model has moved."""
    config = make_config(model={"family": "tests.dist.own_models:Plain", "vocab_size": 131})
    model = make_trainer(config).model
    made = Plain(131)
    made.to(torch.accelerator.current_accelerator())
    return [each.head.weight is each.embedding.weight for each in (made, model)]


def test_a_tie_survives_the_move_to_the_device(strict: Pools) -> None:
    """`Module.to` alone would break it there."""
    assert strict(1).run(ties) == [[False, True]]


def test_copies_that_drift_apart_are_found(strict: Pools) -> None:
    """A norm is on both tensor-parallel ranks, and a row of Q on one."""
    assert strict(2).run(drift.drift, 2, torch.float32, {1: (drift.QKV, 0, 3)}) == [None] * 2
    said = strict(2).run(drift.drift, 2, torch.float32, {1: (drift.NORM, 63, 31)})
    text = f"step 5: replicated parameters have drifted apart: model.{drift.NORM} on ranks [1] differs from rank 0"
    assert said == [f"{text} (`shardwise explain drifted-parameters`)"] * 2


def run(script: str, at: Path, **variables: str) -> Outcome:
    done = shardwise(script, at=at, program=TORCHRUN, timeout=60, **build.variables(), **variables)
    assert done.code == 0, done.err
    return done


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("name", "like_cuda", "backends"), named("loops of the README"))
def test_the_readmes_loops(name: str, like_cuda: str, backends: str, tmp_path: Path) -> None:
    assert PLAIN in SCRIPTS[name]
    (tmp_path / name).write_text(SCRIPTS[name].replace(PLAIN, f"{PLAIN[:-1]}{backends})"), encoding="utf-8")
    run(name, tmp_path, STRICT_CUDA_LIKE=like_cuda)


def last_loss(script: str) -> float:
    """The last loss of a script, in a process whose groups are there already."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
            exec(script, names)
    finally:
        torch.set_default_device(None)
    return float(names["loss"])


@pytest.mark.parametrize("name", ["layers.py", pytest.param("zero1.py", marks=pytest.mark.slow)])
def test_the_readmes_loops_with_the_devices_backend_named(name: str, strict: Pools) -> None:
    """As after `init_process_group("nccl")`: ranks of the tests have no group that takes tensors of the CPU."""
    wanted = strict(2).run(last_loss, SCRIPTS[name])
    assert strict(2, like="other").run(last_loss, SCRIPTS[name]) == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("strict")
def test_the_examples(tmp_path: Path) -> None:
    said = run(str(SCRIPT), tmp_path).out
    assert float(said.split()[-1]) == pytest.approx(reference()[1], rel=1e-5)
    run(str(ROOT / "examples/own_model/verify.py"), tmp_path)


def trainer_of(config: Config, frozen: tuple[str, ...]) -> Trainer:
    """A trainer of a model in which the parameters whose names start so are frozen."""

    def make_optimizer(config: Config, precision: Precision, model: nn.Module, mesh: Mesh) -> ZeroRedundancyOptimizer:
        for _, p, record in placements(model):
            p.requires_grad_(not record.pieces[0].name.startswith(frozen))
        return build_optimizer(config, precision, model, mesh)

    with mock.patch.object(train_build, "build_optimizer", make_optimizer):
        return make_trainer(config)


def train(config: Config, frozen: tuple[str, ...], root: str | None) -> list[tuple[float, float]]:
    """Losses and gradient norms of a training; with `root` it goes on from its first checkpoint."""
    trainer = trainer_of(config, frozen)
    records = [trainer.step()]
    if root is not None:
        assert save(trainer, root)[0].problem is None
        trainer = trainer_of(config, frozen)
        load(trainer, step_folder(root, 1))
    records += [trainer.step(), trainer.step()]
    return [(record.loss, record.grad_norm) for record in records]


@pytest.mark.parametrize(("optimizer", "stage"), [pytest.param("adamw", 0, marks=pytest.mark.slow), ("lamb", 1)])
def test_a_frozen_stage(optimizer: str, stage: int, strict: Pools, tmp_path: Path) -> None:
    """As one process trains the same model."""
    method, frozen = {"name": optimizer, "max_norm": 0.1}, STAGES[stage]
    wanted = train(make_config(optimizer=method), frozen, None)
    found = strict(2).run(train, make_config(optimizer=method, parallel=PIPELINE), frozen, str(tmp_path))
    assert found == [[pytest.approx(step, rel=1e-6) for step in wanted]] * 2


def update_nothing(config: Config, root: str) -> tuple[float, int]:
    """The gradient norm of a model that is frozen as a whole, and the step of its checkpoint."""
    first, second = trainer_of(config, EVERYTHING), trainer_of(config, EVERYTHING)
    norm = first.optimizer.clip_grad_norm_(1.0).item()
    first.optimizer.step()
    first.progress.step = 1
    assert save(first, root)[0].problem is None
    load(second, step_folder(root, 1))
    return norm, second.progress.step


@pytest.mark.parametrize("parallel", [{}, PIPELINE], ids=["DP 2", "PP 2"])
def test_all_is_frozen(parallel: dict[str, Any], strict: Pools, tmp_path: Path) -> None:
    assert strict(2).run(update_nothing, make_config(parallel=parallel), str(tmp_path)) == [(0.0, 1)] * 2


def own_loop(frozen: tuple[int, ...], options: dict[str, Any]) -> tuple[float, float, int]:
    """Norms of gradient and weights, and the updates, in a loop that gives its optimizer what is trained alone."""
    mesh = Mesh(pipeline=2)
    model = nn.Linear(4, 1, device=mesh.device)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    trained = [] if mesh.pp.rank in frozen else [*model.parameters()]
    optimizer = ZeroRedundancyOptimizer([{"params": trained}], torch.optim.AdamW, mesh=mesh, **options)
    model(torch.zeros(2, 4, device=mesh.device)).sum().backward()
    gradient_norm, parameter_norm = (norm.item() for norm in optimizer.norms())
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return gradient_norm, parameter_norm, optimizer.steps


@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "optimizer_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize(
    ("frozen", "wanted"), [((1,), (2.0, 2.0, 1)), ((0, 1), (0.0, 0.0, 1))], ids=["one rank", "all ranks"]
)
def test_a_loop_whose_optimizer_has_no_parameters(
    frozen: tuple[int, ...], wanted: tuple[float, float, int], options: dict[str, Any], strict: Pools
) -> None:
    assert strict(2).run(own_loop, frozen, options) == [wanted] * 2
