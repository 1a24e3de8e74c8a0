"""Checkpoints on the strict device: what is saved has arrived on the host, and a resumed training goes on the same."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config
from shardwise_use.generation import TokenSampler, generate_tokens
from tests.dist.checkpoints import PLACE, canonical_state, load, make_saver, make_trainer, run, save, step_folder
from tests.dist.training import Sections, make_config, named
from tests.rank_pool import Pools
from tests.strict.ranks import default_device

BEFORE, AFTER = 2, 2


@pytest.mark.parametrize(("layout", "precision", "others"), named("resumes", "TP 2 and sequence parallelism"))
def test_a_resumed_training_goes_on_the_same(
    layout: dict[str, object], precision: str, others: list[dict[str, object]], strict: Pools, tmp_path: Path
) -> None:
    """Bit by bit at the same layout, and with the same losses at the others."""
    config = make_config(parallel=layout, precision={"mode": precision}, optimizer={"zero": 1})
    whole, _ = strict(2).run(run, config, BEFORE, AFTER, None, str(tmp_path))
    resumed, _ = strict(2).run(run, config, AFTER, 0, step_folder(tmp_path, BEFORE), None)
    assert resumed.losses == whole.losses[BEFORE:]
    for kind, tensors in whole.at_end.items():
        for name, tensor in tensors.items():
            assert torch.equal(resumed.state[kind][name], tensor), f"{kind} of {name} differs at the end"
    for other in others:
        config = make_config(parallel=other, optimizer={"zero": 1})
        resumed, _ = strict(2).run(run, config, AFTER, 0, step_folder(tmp_path, BEFORE), None)
        assert resumed.losses == pytest.approx(whole.losses[BEFORE:], rel=1e-6), f"at {other or 'DP 2'}"


def train_save_load(config: Config, root: str, default: bool) -> tuple[list[float], list[int]]:
    """Losses of a training that is saved and goes on from there, and tokens drawn, with torch's default device."""
    with default_device(default):
        trainer = make_trainer(config)
        losses = [trainer.step().loss for _ in range(BEFORE)]
        assert save(trainer, root)[0].problem is None
        resumed = make_trainer(config)
        load(resumed, step_folder(root, BEFORE))
        losses += [resumed.step().loss, resumed.evaluator.held_out()[0]]
        canonical_state(trainer)
        sampler = TokenSampler(top_p=0.9)
        written = generate_tokens(trainer.model, trainer.mesh, [5, 3, 8], 3, sampler, parallel=config.parallel)
        return losses, [*written]


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param("adamw", {}, id="alone", marks=pytest.mark.slow),
        pytest.param("lamb", {"pipeline": 2, "schedule": "1f1b"}, id="PP 2"),
    ],
)
def test_a_default_device_alters_nothing(optimizer: str, layout: dict[str, Any], strict: Pools, tmp_path: Path) -> None:
    config = make_config(optimizer={"name": optimizer}, parallel=layout)
    wanted, found = (
        strict(layout.get("pipeline", 1)).run(train_save_load, config, str(tmp_path / str(default)), default)
        for default in (False, True)
    )
    assert found == wanted


def save_behind_steps(config: Config, root: str, waits: bool) -> tuple[str | None, Any, Any]:
    """Save while the training goes on: the problem, the state that was saved, and that which is read again."""
    trainer = make_trainer(config)
    for _ in range(BEFORE):
        trainer.step()
    state = canonical_state(trainer)
    saver = make_saver(trainer, root)
    if not waits:
        trainer.optimizer.overwrite_after = lambda event: None  # type: ignore[method-assign]
    # The thread that writes waits for the copies too, and they would have ended by chance.
    may_write = threading.Event()
    write = saver._write

    def write_later(pending: Any) -> None:
        may_write.wait()
        write(pending)

    saver._write = write_later  # type: ignore[method-assign]
    saver.save(BEFORE, PLACE)
    try:
        for _ in range(AFTER):
            trainer.step()
    finally:
        may_write.set()
        saver.wait()
    resumed = make_trainer(config)
    load(resumed, step_folder(root, BEFORE))
    return saver.finished()[0].problem, state, canonical_state(resumed)


@pytest.mark.parametrize(("world", "sections"), named("copies", "ZeRO-3, mixed"))
def test_copies_run_behind_the_next_step(world: int, sections: Sections, strict: Pools, tmp_path: Path) -> None:
    """The next update waits for them on the device: what is saved is the state of the step that was saved."""
    config = make_config(**sections)
    for problem, state, resumed in strict(world).run(save_behind_steps, config, str(tmp_path), True):
        assert problem is None
        assert state.keys() == resumed.keys()
        for kind, tensors in state.items():
            for name, tensor in tensors.items():
                assert torch.equal(resumed[kind][name], tensor), f"{kind} of {name}"


def test_an_update_that_does_not_wait_for_copies_is_noticed(strict: Pools, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="changed while its copy to the host was under way"):
        strict(1).run(save_behind_steps, make_config(), str(tmp_path), False)
