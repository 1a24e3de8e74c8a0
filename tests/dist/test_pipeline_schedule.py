"""What a pipeline holds, computes once, reduces and measures of itself; a weight that both of its ends have."""

import json
import re
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.errors import RunError
from shardwise.config import Config, ParallelConfig, Schedule, check_layout, load_config
from shardwise.config.layout import LayoutStage
from shardwise.distributed import devices
from shardwise.distributed.placement import placements
from shardwise.estimates.step_peak import PassBytes, step_peak
from shardwise.optim.buckets import Bucket
from shardwise.pipeline.action_order import action_order
from shardwise.pipeline.clock import StepTiming
from shardwise.pipeline.partition import pipeline_rank_of
from shardwise.pipeline.stages import Stages
from shardwise.runs.folder import RunDirectory
from shardwise.train.build import build_trainer
from shardwise.train.profiler_trace import Trace
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data
from tests.sweeps import few


class Kept:
    """Stands for what a stage keeps of a micro-batch: it lives as long as the tensors that a graph has saved."""


@dataclass
class Found:
    """On one rank."""

    timings: list[StepTiming]
    most_held: int
    calls: Counter[tuple[int, int]]
    gradients: list[float]


def parallel_config(schedule: Schedule, degree: int) -> ParallelConfig:
    return ParallelConfig(pipeline=degree, schedule=schedule)


def make_pipeline(schedule: Schedule, degree: int, micro_batches: int) -> tuple[Any, Stages]:
    from shardwise.pipeline.schedule import Pipeline

    parallel, mesh = parallel_config(schedule, degree), shared_mesh(1, degree)
    count = degree * parallel.stages_per_rank
    stages = Stages(4)
    for index in range(count):
        if pipeline_rank_of(parallel, index) == mesh.pp.rank:
            model = nn.Module()
            model.weight = nn.Parameter(torch.ones(4))
            stages.add(LayoutStage(index, mesh.pp.rank, range(index, index + 1), count), model)
    return Pipeline(stages, parallel, mesh, micro_batches, torch.empty(4), losses=1), stages


def run_steps(schedule: Schedule, degree: int, micro_batches: int, steps: int) -> Found:
    pipeline, stages = make_pipeline(schedule, degree, micro_batches)
    stage_of = {id(model): stage for stage, model in stages.pairs()}
    live: weakref.WeakSet[Kept] = weakref.WeakSet()
    found = Found([], 0, Counter(), [])

    def compute(model: nn.Module, x: Tensor | None, number: int) -> Tensor:
        stage, kept = stage_of[id(model)], Kept()
        live.add(kept)
        found.most_held = max(found.most_held, len(live))
        found.calls[stage.index, number] += not found.timings
        weighed = (torch.ones(4) if x is None else x) * model.weight
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved, kept), lambda packed: packed[0]):
            out = weighed * torch.ones(4)  # which is saved, for the backward pass
        return out.sum().reshape(1) if stage.is_last else out

    for _ in range(steps):
        pipeline.step(compute)
        found.timings.append(pipeline.timing())
    found.gradients = [float(model.weight.grad.sum()) for _, model in stages.pairs()]
    return found


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_each_stage_runs_once_and_holds_what_the_schedule_says(schedule: Schedule, degree: int, ranks: Any) -> None:
    """No extra forward pass in the first step; and of 1F1B's first stage at most p micro-batches are held."""
    parallel, micro_batches = parallel_config(schedule, degree), 2 * degree + 2
    if schedule.startswith("interleaved"):
        micro_batches = 2 * degree
    everyone: list[Found] = ranks(degree).run(run_steps, schedule, degree, micro_batches, 2)
    one = dict.fromkeys(range(degree * parallel.stages_per_rank), PassBytes(1, 0, 0, 0, 0, 0, 0))
    calls: Counter[tuple[int, int]] = Counter()
    for rank, found in enumerate(everyone):
        calls += found.calls
        assert found.gradients == [2.0 * 4 * micro_batches] * parallel.stages_per_rank, "two steps' gradients of ones"
        # The last stage's losses stay to the end.
        if pipeline_rank_of(parallel, degree * parallel.stages_per_rank - 1) != rank:
            expected = step_peak(action_order(parallel, micro_batches, rank), one, micro_batches)
            assert found.most_held <= expected.activations
    stages = degree * parallel.stages_per_rank
    assert calls == {(stage, number): 1 for stage in range(stages) for number in range(micro_batches)}
    if schedule == "1f1b":
        assert everyone[0].most_held == degree
    if schedule == "gpipe":
        assert everyone[0].most_held == micro_batches


GONE = "[third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


class OtherRankError(Exception):
    """Of the rank without the last stage, which would wait for ever."""


def failing_step(schedule: Schedule, where: str, error: Exception) -> Exception:
    """What a step raises on this rank; on that of the last stage it is the error."""
    pipeline, stages = make_pipeline(schedule, 2, 4)
    last = {id(model) for stage, model in stages.pairs() if stage.is_last}
    fails = None if last else id(stages[-1])

    def compute(model: nn.Module, x: Tensor | None, number: int) -> Tensor:
        if number == 1 and id(model) == fails:
            raise OtherRankError
        out = (torch.ones(4) if x is None else x) * model.weight
        if id(model) not in last:
            return out
        if where == "forward":
            raise error from MemoryError("no room")
        failing: Tensor = Failing.apply(out, error)
        return failing.sum().reshape(1)

    with pytest.raises((type(error), OtherRankError)) as caught:
        pipeline.step(compute)
    assert where == "backward" or not last or isinstance(caught.value.__cause__, MemoryError), "the cause is lost"
    return caught.value


@pytest.mark.parametrize("schedule", few(["1f1b", "interleaved_zero_bubble", "zbv"], "1f1b"))
def test_what_a_stage_raises_is_heard_as_it_is(schedule: Schedule, ranks: Any) -> None:
    """torch wraps it in a text of its own, which would hide that memory ran out, or that a rank was lost."""
    for where, error, is_it in (
        ("forward", RunError("no room for the masks"), lambda heard: str(heard) == "no room for the masks"),
        ("backward", torch.OutOfMemoryError("CUDA out of memory"), devices.is_out_of_memory),
        ("backward", RuntimeError(GONE), devices.is_lost_connection),
    ):
        heard = ranks(2).run(failing_step, schedule, where, error)
        ranks(2).close()  # what was sent is under way
        assert sum(type(each) is type(error) and is_it(each) for each in heard) == 1, f"{where}: {heard}"
        assert sum(isinstance(each, OtherRankError) for each in heard) == 1, f"{where}: {heard}"


def traced(schedule: Schedule, degree: int, micro_batches: int, folder: Path) -> str:
    pipeline, stages = make_pipeline(schedule, degree, micro_batches)
    last = {id(model): stage.is_last for stage, model in stages.pairs()}

    def compute(model: nn.Module, x: Tensor | None, number: int) -> Tensor:
        out = (torch.ones(4) if x is None else x) * model.weight
        return out.sum().reshape(1) if last[id(model)] else out

    mesh = shared_mesh(1, degree)
    run = RunDirectory(Path(folder))
    run.trace(0).parent.mkdir(exist_ok=True)
    trace = Trace(make_config(log={"profile": "2:4"}).log, mesh, run)
    for step in range(1, 6):
        with trace.step(step):
            pipeline.step(compute)
    trace.close()
    return run.trace(mesh.world.rank).read_text()


def test_a_trace_names_the_work_and_the_messages(ranks: Any, tmp_path: Path) -> None:
    schedule: Schedule = "zbv"
    degree, micro_batches = 2, 4
    parallel = parallel_config(schedule, degree)
    for rank, text in enumerate(ranks(degree).run(traced, schedule, degree, micro_batches, tmp_path)):
        names = Counter(event["name"] for event in json.loads(text)["traceEvents"] if event.get("ph") == "X")
        assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}
        kinds = {"forward", "backward of the input", "backward of the weights"}
        mine = [s for s in range(degree * parallel.stages_per_rank) if pipeline_rank_of(parallel, s) == rank]
        for kind in kinds:
            for stage in mine:
                for number in range(micro_batches):
                    assert names[f"{kind}, stage {stage}, micro-batch {number}"] == 2, kind
        messages = {re.sub(r", stage.*", "", name) for name in names if re.match(r"(send|receive)\b.*, stage", name)}
        assert messages == {"send", "receive", "send of the gradient", "receive of the gradient"}


PATIENCE = 30.0
"""Seconds that the first stage's last backward pass waits for the last stage's reductions."""


def step(config: Config, folder: Path) -> tuple[int, int, bool]:
    """The buckets of a rank and their reductions in a step.

    And if all of the last stage's began before the first stage's last backward pass ended, on the first stage.
    """
    mesh = shared_mesh(1, 2)
    trainer = build_trainer(config, mesh, make_data())
    buckets, reductions, overlapped = len(trainer.optimizer.buckets), 0, mesh.pp.rank == 1
    left = check_layout(config, mesh.world.size).accumulation(config.train)

    def hold_last(_gradient: Tensor) -> None:
        nonlocal left, overlapped
        left -= 1
        deadline = time.monotonic() + PATIENCE
        while left == 0 and not overlapped and time.monotonic() < deadline:
            overlapped = len(list(folder.iterdir())) == 2
            time.sleep(0.005)

    def hook(_module: nn.Module, _arguments: tuple[Any, ...], out: Tensor) -> None:
        if torch.is_grad_enabled():
            out.register_hook(hold_last)

    if mesh.pp.rank == 0:
        next(iter(trainer.model.children())).register_forward_hook(hook)
    start_reduction = Bucket.start_reduction

    def start(bucket: Bucket) -> None:
        nonlocal reductions
        start_reduction(bucket)
        reductions += 1
        if mesh.pp.rank == 1 and reductions == buckets:
            (folder / str(mesh.world.rank)).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "start_reduction", start)
        trainer.step()
    return buckets, reductions, overlapped


def test_the_last_stage_reduces_while_the_first_still_works(ranks: Any, tmp_path: Path) -> None:
    parallel = {"pipeline": 2, "schedule": "1f1b"}
    model, train, optimizer = {"num_hidden_layers": 4}, {"micro_batch": 1}, {"bucket_mib": 0.02}
    config = make_config(model=model, parallel=parallel, train=train, optimizer=optimizer)
    for buckets, reductions, overlapped in ranks(4).run(step, config, tmp_path):
        assert buckets >= 3
        assert reductions == buckets, "each bucket is reduced once a step"
        assert overlapped, "the last stage waits with its reductions until the first stage is done"


STEPS = 3
EMBEDDING = "transformer.wte.weight"
MODEL = load_config("gpt-tiny").model.model_dump(mode="json") | {"num_hidden_layers": 8, "tie_word_embeddings": True}


def trained_embedding(config: Config, steps: int) -> dict[str, Any]:
    """What this rank's stages hold of the tied embedding after some steps, and how many parameters that is."""
    trainer = build_trainer(config, shared_mesh(1, config.parallel.pipeline), make_data(config.model.vocab_size))
    for _ in range(steps):
        trainer.step()
    held = [p for _, p, record in placements(trainer.model) if record.pieces[0].name == EMBEDDING]
    return {"parameters": len(held), "weight": canonical_weights(trainer.model).get(EMBEDDING)}


@pytest.mark.parametrize(
    ("schedule", "stages", "ends"), [("1f1b", [7, 1], {0: 1, 1: 1}), ("zbv", [2, 2, 2, 2], {0: 1, 1: 0})]
)
def test_a_tied_weight_at_both_ends_is_one(schedule: str, stages: list[int], ends: dict[int, int], ranks: Any) -> None:
    """Fault 13 of the reference, which cannot tie weights under a pipeline.

    In unequal stages with large buckets and many rows, its owners would be others where it shared a bucket.
    """
    parallel = {"pipeline": 2, "schedule": schedule, "stages": stages, "vocab_multiple": 1024}
    cut = make_config(model=MODEL, parallel=parallel, train={"micro_batch": 1}, optimizer={"bucket_mib": None})
    found = ranks(4).run(trained_embedding, cut, STEPS)  # pipeline rank 0 is ranks 0 and 1
    assert {rank // 2: each["parameters"] for rank, each in enumerate(found)} == ends
    alone = trained_embedding(make_config(model=MODEL, train={"micro_batch": 8}), STEPS)["weight"]
    for rank, each in enumerate(found):
        if ends[rank // 2]:
            assert torch.equal(each["weight"], found[0]["weight"]), f"rank {rank} has another embedding than rank 0"
            torch.testing.assert_close(each["weight"], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
