"""GPT-3's layouts on 256 and 128 ranks, one at a time: every pipeline rank builds its stages and makes a step.

Fake tensors have shapes and no numbers, and the fake process group delivers nothing. What a rank sends is compared with
`cost`. Widths, vocabulary and layout are the recipes' own, with as few micro-batches as each schedule takes. One role,
in which one block of each stage stands for all, always runs; all of them, with all blocks, are slow.
"""

import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.config import Config, Layout, Schedule, check_layout, load_config
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.data.formats.prepared_data import PreparedText
from shardwise.distributed.mesh import Mesh
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.models.blocks import gives_losses
from shardwise.pipeline.partition import stage_plan
from shardwise.train.build import build_trainer
from tests.dist.cells import check_sent, sent
from tests.sweeps import few

WORLD = {"gpt3-175b": 256, "gpt3-23b": 128}
DEGREES = {"gpt3-175b": (32, 8, 1), "gpt3-23b": (8, 4, 4)}
MOST_BYTES = 8 * 2**30

ROLES = [
    (recipe, schedule, rank)
    for recipe in WORLD
    for schedule in get_args(Schedule)
    for rank in range(DEGREES[recipe][1])
]
OFTEN = (("gpt3-23b", "zbv", 0, False),)


def skip_pipeline_warm_up(schedule: Any, stages: Iterable[Any]) -> None:
    """Let a pipeline schedule's first step skip the messages that open its connections.

    This is for a process group that delivers nothing. In torch 2.13 the stages exchange whether they know their shapes,
    and read the answer; here every stage does. Releases before it send numbers that nobody reads. torch 2.15 knows this
    process group.
    """
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining._utils import InferenceMode

        def answered(stages: Iterable[Any], *_: Any) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = answered
        return
    for stage in stages:
        if hasattr(stage, "_get_init_p2p_neighbors_ops"):
            stage._get_init_p2p_neighbors_ops = list


def config_of(recipe: str, schedule: Schedule, whole: bool) -> tuple[Config, Layout]:
    _, pipeline, data = DEGREES[recipe]
    micro_batches = 2 * pipeline if schedule == "dualpipev" else pipeline
    stages = pipeline * SCHEDULES[schedule].stages_per_rank
    overrides = {"parallel.schedule": schedule, "train.global_batch": micro_batches * data}
    if not whole:
        overrides["model.num_hidden_layers"] = stages
    elif (recipe, stages) == ("gpt3-23b", 8):  # its 28 blocks are no equal stages
        overrides["parallel.stages"] = [4, 3] * 4
    config = load_config(recipe, [f"{key}={value}" for key, value in overrides.items()])
    layout = check_layout(config, WORLD[recipe])
    assert (layout.tensor, layout.pipeline, layout.data) == DEGREES[recipe]
    return config, layout


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out what reads numbers or addresses of tensors that have none, and drawing weights."""
    monkeypatch.setattr("shardwise.distributed.placement.initialize_", lambda *_: None)
    monkeypatch.setattr("shardwise.optim.wrapped_class.require_elementwise", lambda *_: None)
    monkeypatch.setattr("shardwise.layers.embedding.ParallelEmbedding._check", lambda *_: None)
    monkeypatch.setattr("shardwise.layers.loss.VocabularyShard.check", lambda *_, **__: None)
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: [1.0] * self.numel())
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: self.storage_offset() * self.element_size())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("recipe", "schedule", "rank", "whole"), few([*OFTEN, *((*role, True) for role in ROLES)], *OFTEN)
)
@pytest.mark.usefixtures("nothing_is_read")
def test_every_role_makes_a_step(recipe: str, schedule: Schedule, rank: int, whole: bool) -> None:
    config, layout = config_of(recipe, schedule, whole)
    dist.init_process_group("fake", rank=rank * layout.tensor * layout.data, world_size=layout.world)
    mesh = Mesh(tensor=layout.tensor, pipeline=layout.pipeline, device="cpu")
    assert mesh.pp.rank == rank
    row = np.zeros(config.train.sequence_length * config.train.global_batch + 1, dtype=np.uint16)
    data = PreparedText(
        Path(), "zeros", "zeros", {"train": row, "eval": row[:0], "test": row[:0]}, config.model.vocab_size
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = build_trainer(config, mesh, data)
        skip_pipeline_warm_up(trainer.pipeline.schedule, trainer.pipeline.stages)
        forward = _counting(trainer)
        sent(mesh)
        trainer.step()
        micro_batches = layout.accumulation(config.train)
        plan = [each for each in stage_plan(config, layout) if each.rank == rank]
        assert forward == {(each.index, number): 1 for each in plan for number in range(micro_batches)}, (
            "each stage runs once for each micro-batch, in the first step as in any"
        )
    found, calls = sent(mesh)
    expected = wire_bytes(step_transfers(config, layout, pipeline_rank=rank))
    check_sent(found, expected, calls, f"{recipe}, {schedule}, pipeline rank {rank}")
    losses = [gives_losses(part) for part in trainer.model]
    assert any(losses) == any(each.is_last for each in plan)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MOST_BYTES


def _counting(trainer: Any) -> dict[tuple[int, int], int]:
    """How often each stage works on each micro-batch, from now on."""
    found: dict[tuple[int, int], int] = {}
    pipeline, plain = trainer.pipeline, trainer.pipeline.step
    index = {id(model): stage.index for stage, model in trainer.model.pairs()}

    def step(compute: Any, *rest: Any) -> None:
        def counted(part: torch.nn.Module, x: Any, number: int) -> Any:
            key = index[id(part)], number
            found[key] = found.get(key, 0) + 1
            return compute(part, x, number)

        plain(counted, *rest)

    pipeline.step = step
    return found
