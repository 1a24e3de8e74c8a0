"""A loss or gradient that is not finite stops every rank before the update; step, rank and parameter are named."""

import math
from typing import Any

import pytest
import torch

from shardwise.base.errors import RunError
from shardwise.pipeline.stages import Stages
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data
from tests.sweeps import few

GATE = "model.layers.1.mlp.gate_proj.weight"
DEEP = "model.layers.{}.mlp.down_proj.weight"
"""Of a block of a pipeline's stage."""


def stop(sections: dict[str, Any], where: str, poisoned: int) -> tuple[str, bool]:
    """A good step, then poison on one rank; what the second step says, and whether it left the weights alone."""
    config = make_config(**sections)
    mesh = shared_mesh(config.parallel.tensor)
    trainer = build_trainer(config, mesh, make_data())
    trainer.step()
    if mesh.world.rank == poisoned:
        layer = trainer.model.layers[1]
        if where == "weight":
            with torch.no_grad():
                layer.mlp.gate_up.weight[3, 3] = math.nan
        else:  # the loss stays finite: only the gradient that passes here is not
            layer.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g * math.inf) and None)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    try:
        trainer.step()
    except RunError as error:
        same = all(
            torch.equal(p.nan_to_num(), b.nan_to_num()) for p, b in zip(trainer.model.parameters(), before, strict=True)
        )
        return str(error), same and trainer.progress.step == 1
    return "no error", False


CUT: dict[str, dict[str, Any]] = {
    "dp2-zero0": {"optimizer": {"zero": 0}},
    "dp2-accumulation4": {"optimizer": {"zero": 1}, "train": {"micro_batch": 1}},
    "tp2": {"parallel": {"tensor": 2}},
    "tp2-sp": {"parallel": {"tensor": 2, "sequence": True}},
}


@pytest.mark.parametrize("cut", few(CUT, "dp2-accumulation4", "tp2-sp"))
@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_all_ranks_stop_before_the_update(where: str, cut: str, ranks: Any) -> None:
    outcomes = ranks(2).run(stop, CUT[cut], where, 1)
    texts = {text for text, _ in outcomes}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith("step 2: the loss (")
    assert "No update was made" in text
    assert all(unchanged for _, unchanged in outcomes)
    if where == "weight":
        assert f"on rank 1, {GATE}" in text
    else:
        assert "the loss (nan)" not in text
        assert "model.layers.1.mlp.down_proj.weight is the first parameter" in text
        # Under sequence parallelism the gradient is gathered before it meets a weight: both ranks see it at once.
        assert f"on rank {0 if cut == 'tp2-sp' else 1}, " in text


def stop_pipeline(schedule: str, where: str, poisoned: tuple[int, ...]) -> str:
    """What a step says after these blocks were poisoned, each on the rank that has it."""
    config = make_config(
        model={"num_hidden_layers": 8},
        parallel={"pipeline": 2, "schedule": schedule},
        train={"micro_batch": 1, "global_batch": 4},
    )
    mesh = shared_mesh(1, 2)
    trainer = build_trainer(config, mesh, make_data())
    assert isinstance(trainer.model, Stages)
    for stage, part in trainer.model.pairs():
        for number, block in zip(stage.layers, part.layers, strict=True):
            if number in poisoned and where == "weight":
                block.mlp.down_proj.weight.data[3, 3] = math.nan
            elif number in poisoned:
                block.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g * math.inf) and None)
    try:
        trainer.step()
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("schedule", few(["zbv", "1f1b", "interleaved"], "zbv"))
def test_a_pipeline_names_the_first_fault_of_all_stages(schedule: str, ranks: Any) -> None:
    """A later stage's gradient spoils those of all earlier stages."""
    for where, poisoned, named in (("weight", (3, 6), 3), ("weight", (5,), 5), ("gradient", (2, 5), 5)):
        said = ranks(2).run(stop_pipeline, schedule, where, poisoned)
        assert len(set(said)) == 1, said
        assert f", {DEEP.format(named)} is the first parameter" in said[0], f"{where} of blocks {poisoned}: {said[0]}"
