"""Parameters, memory and messages of pipeline ranks, against sums made by hand and against models' stages.

The bytes that they send, and the parameters and state that they hold, are measured by tests/dist/test_cells.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.config.layout import LayoutStage
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import placements
from shardwise.estimates.memory import MemoryEstimate, checkpoint_bytes, expected_memory, memory_by_rank
from shardwise.estimates.step_peak import PassBytes, step_peak
from shardwise.models.blocks import ModelPart
from shardwise.models.build import build_model
from shardwise.models.parameter_counts import local_parameter_count, local_parameters
from shardwise.pipeline.action_order import action_order, with_whole_backward_passes
from shardwise.pipeline.partition import stage_plan
from tests.unit.estimates.families import MODELS, family, make_config, section

S, B, H, LAYERS, M = 16, 1, 32, 4, 8
X = 4 * S * B * H
"""Bytes of what goes from stage to stage, in float32."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")


def config(name: str = "gpt", p: float = 0.0, *, schedule: str = "1f1b", pipeline: int = 2, **sections: Any) -> Config:
    """Of 4 blocks, with 8 micro-batches of one sequence on each rank of one replica."""
    train = {"micro_batch": 1, "global_batch": M} | sections.pop("train", {})
    parallel = {"pipeline": pipeline, "schedule": schedule} | sections.pop("parallel", {})
    return make_config(section(name, p, num_hidden_layers=LAYERS), train=train, parallel=parallel, **sections)


def memory(chosen: Config, world: int | None = None) -> list[MemoryEstimate]:
    return memory_by_rank(chosen, check_layout(chosen, world or chosen.parallel.pipeline))


def as_stored(name: str, tensor: int, stages: list[LayoutStage], whole: bool) -> list[tuple[int, bool]]:
    """What the model's stages of one rank store, each parameter once: elements, and whether it is a matrix."""
    chosen = config(name)
    group = Group(dist.new_group(list(range(tensor)))) if tensor > 1 else Group()
    ends = Group() if whole else Group(dist.new_group([0, 1]))
    stored, seen, embeddings = [], set[int](), dict[str, Any]()
    for stage in stages:
        part = ModelPart(stage.layers, stage.is_first, stage.is_last, ends, embeddings)
        model = build_model(chosen, group, sequence_parallel=False, device="meta", part=part)
        for _, parameter, record in placements(model):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                stored.append((parameter.numel(), len(record.pieces[0].shape) > 1))
    return stored


STAGES = {
    "last": [LayoutStage(3, 3, range(3, 4), 4)],
    "first and middle": [LayoutStage(0, 0, range(1), 4), LayoutStage(2, 0, range(2, 3), 4)],
    "first and last": [LayoutStage(0, 0, range(1), 4), LayoutStage(3, 0, range(3, 4), 4)],
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_a_ranks_parameters_are_its_stages(name: str, stages: str, tensor: int) -> None:
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        stored = as_stored(name, tensor, STAGES[stages], whole=stages == "first and last")
    finally:
        dist.destroy_process_group()
    found = list(local_parameters(family(config(name)), tensor, stages=STAGES[stages]))
    assert [(one.elements, one.matrix) for one in found] == stored
    assert local_parameter_count(config(name).model, tensor, stages=STAGES[stages]) == sum(n for n, _ in stored)


def test_the_175b_layout_the_ranks_that_need_most_and_a_walk_through_an_order() -> None:
    chosen = config("llama", parallel={"vocab_multiple": 16})
    rows = {multiple: local_parameter_count(chosen.model, 2, vocab_multiple=multiple) for multiple in (1, 16, 64)}
    assert rows[16] - rows[1] == 2 * (32 - 25) * H  # type: ignore[operator]
    assert rows[64] - rows[1] == 2 * (64 - 25) * H  # type: ignore[operator]
    assert checkpoint_bytes(chosen) == checkpoint_bytes(config("llama"))
    # Each rank has a 32nd of an eighth of the blocks; the ends have the padded vocabulary too.
    recipe = load_config("gpt3-175b")
    layout = check_layout(recipe, 256)
    plan = stage_plan(recipe, layout)
    held = [local_parameter_count(recipe.model, 32, vocab_multiple=128, stages=[stage]) for stage in plan]
    hidden = 12288
    block = (12 * hidden**2 + 3 * hidden + 4 * hidden) // 32 + 6 * hidden
    assert held[1:-1] == [12 * block] * 6
    assert held[0] == 12 * block + (1664 + 2048) * hidden
    assert held[-1] == 12 * block + (1664 + 2) * hidden
    chosen = config(pipeline=1, schedule="gpipe")
    (found,) = memory(chosen)
    assert found.pipeline == 0
    assert found == expected_memory(config(pipeline=1, train={"global_batch": 1}), Layout(1))
    assert "pipeline" not in dict(found.rows())
    for schedule, last in (("1f1b", 3), ("zbv", 0)):
        found = memory(config(schedule=schedule, pipeline=4 if schedule == "1f1b" else 2))
        assert [one.loss > 0 for one in found] == [rank == last for rank in range(len(found))]
    # The loss makes them in its forward pass, [V, H] in float32 each.
    gpipe, alternating = (memory(config(schedule=schedule))[1] for schedule in ("gpipe", "1f1b"))
    assert gpipe.loss - alternating.loss == (M - 1) * (4 * 50 * H + X)
    chosen = config(pipeline=4)
    layout, by_rank = check_layout(chosen, 4), memory(chosen)
    assert expected_memory(chosen, layout) == max(by_rank, key=lambda one: one.total)
    assert [expected_memory(chosen, layout, pipeline_rank=rank) for rank in range(4)] == by_rank
    # Two stages of a rank: 10 and 1 bytes a pass, and 100 while the second makes its loss, of which 5 stay.
    passes = {
        0: PassBytes(kept=10, loss=0, loss_kept=0, backward=12, last=0, waiting=0, reduction=0),
        3: PassBytes(kept=1, loss=100, loss_kept=5, backward=2, last=0, waiting=7, reduction=30),
    }
    parallel = config(schedule="zbv").parallel
    found = step_peak(action_order(parallel, 4, 0), passes, 4)
    assert found.in_flight == 4
    assert found.activations == 4 * 10
    assert found.forward == found.whole == 3 * 10 + 1 + 100
    gradients = passes | {3: replace(passes[3], loss_kept=100)}  # of which a backward pass in two parts makes copies
    assert step_peak(action_order(parallel, 4, 0), gradients, 4).whole == 3 * 10 + 1 + 100 + 100
    in_one_part = with_whole_backward_passes(action_order(parallel, 4, 0))
    assert step_peak(in_one_part, gradients, 4).whole == 3 * 10 + 1 + 100
    passes[3] = replace(passes[3], reduction=200)  # behind its last micro-batch two of the first stage are in flight
    assert step_peak(action_order(parallel, 4, 0), passes, 4).whole == 2 * 10 + 200


@pytest.mark.parametrize(("schedule", "flying"), [("gpipe", [M, M, M, M]), ("1f1b", [4, 3, 2, 1])])
def test_activations_of_the_micro_batches_in_flight(schedule: str, flying: list[int]) -> None:
    """A stage keeps what its block saves, with its input, and its output; the last one, what its norm saves."""
    found = memory(config(schedule=schedule, pipeline=4))
    block = expected_memory(config(pipeline=1), Layout(1))
    norm = 4 * S * (H + 2)
    each = (block.activations - norm - X) // LAYERS
    assert [one.activations for one in found[:3]] == [number * (each + X) for number in flying[:3]]
    assert found[3].activations == flying[3] * (each + norm + X)


@pytest.mark.parametrize("frees", [False, True], ids=["torch 2.14", "torch 2.15"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_have_memory_of_their_own(schedule: str, frees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message is under way. With several stages on a rank, what is sent stays: x and its gradient of each boundary.

    torch 2.15 lets x go with its backward pass. The step's peak comes before all is sent.
    """
    monkeypatch.setattr("shardwise.estimates.memory._frees_onwards", lambda: frees)
    sends = {"interleaved": (3, 3), "interleaved_zero_bubble": (3, 3), "zbv": (2, 2), "dualpipev": (2, 2)}
    for rank, messages in zip(memory(config(schedule=schedule)), sends.get(schedule, (0, 0)), strict=True):
        sent = rank.pipeline - X
        assert sent % X == 0
        least, most = (1, 3) if frees else (2, 4)
        assert least * M * messages // 4 * X <= sent <= most * M * messages // 4 * X
