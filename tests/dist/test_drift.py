"""What stops all ranks: copies that drift apart, other software or keys on a rank, numbers that are not finite."""

import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.base.errors import ConfigError, RunError
from shardwise.config import check_layout, load_config
from shardwise.data.formats.prepared_data import random_tokens
from shardwise.distributed import collectives
from shardwise.distributed.collectives import raise_on_all_ranks
from shardwise.distributed.mesh import Group, Mesh
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.models.build import build_model
from shardwise.pipeline.stages import Stages
from shardwise.train import build, rank_agreement, trainer
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import check_replicas
from shardwise.train.observers import build_observers, run_observers
from shardwise.train.step_meters import STRAGGLER_STEPS
from shardwise.train.step_record import SMOOTHED_STEPS, StepRecord
from shardwise.train.trainer import Trainer
from tests.dist.checkpoints import make_trainer
from tests.dist.dense import mesh
from tests.dist.dense import mesh as shared_mesh
from tests.dist.test_checkpoint import config_of
from tests.dist.training import cases, make_config, make_data, sizes
from tests.sweeps import few

NORM = "norm.weight"
QKV = "layers.0.self_attn.qkv.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
DEEP = "model.layers.{}.mlp.down_proj.weight"
"""Of a block of a pipeline's stage."""
CUT = cases("drift")
LAYOUTS: dict[str, dict[str, Any]] = {"TP 2 × DP 2": {"tensor": 2}, "PP 2 × DP 2": {"parallel": {"pipeline": 2}}}
SLOW = 3


def flip(tensor: torch.Tensor, position: int, bit: int) -> None:
    """Change one bit of one element, in place."""
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(integer).view(-1)[position] ^= 1 << bit


def drift(tensor: int, dtype: torch.dtype, changes: dict[int, tuple[str, int, int]]) -> str | None:
    """Flip (parameter, element, bit) on the ranks given; what the check says on this rank."""
    mesh = shared_mesh(tensor)
    model = build_model(make_config(), mesh.tp, sequence_parallel=tensor > 1, device=mesh.device, dtype=dtype)
    check_replicas(model, mesh, 1)
    if mesh.world.rank in changes:
        name, element, bit = changes[mesh.world.rank]
        flip(dict(model.named_parameters())[name], element, bit)
    try:
        check_replicas(model, mesh, 5)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("world", "tensor", "dtype", "change", "wanted"),
    [
        # The lowest bit of a data-parallel copy's last element; an odd rank out among four is named by majority.
        (2, 1, torch.float32, {1: ("embed_tokens.weight", 131 * 64 - 1, 0)}, ("embed_tokens.weight", "[1]", "0")),
        (4, 1, torch.bfloat16, {0: (NORM, 3, 12)}, (NORM, "[0]", "1")),
        # A replicated norm on one tensor-parallel rank: its data-parallel peer differs too.
        (4, 2, torch.float32, {3: ("layers.1.input_layernorm.weight", 5, 7)}, ("input_layernorm.weight", "[3]", "1")),
        # Four ranks share two K/V heads: rank 1 has the copy of rank 0's. Local rows: 16 of Q, 8 of K, 8 of V.
        (4, 4, torch.float32, {1: (QKV, 16 * 64, 3)}, ("self_attn.k_proj.weight", "[1]", "0")),
    ],
)
def test_one_flipped_bit_is_found(
    world: int, tensor: int, dtype: torch.dtype, change: dict[int, Any], wanted: tuple[str, str, str], ranks: Any
) -> None:
    texts = set(ranks(world).run(drift, tensor, dtype, change))
    assert len(texts) == 1, "every rank must stop, with the same text"
    text = texts.pop()
    assert text is not None, "not found"
    name, odd, usual = wanted
    assert text.startswith("step 5: ")
    assert name in text
    assert f"on ranks {odd} differs from rank {usual}" in text


def test_what_is_not_copied_may_differ(ranks: Any) -> None:
    """Q rows, MLP columns and vocabulary rows belong to one tensor-parallel rank each."""
    for name, element in ((QKV, 0), ("layers.0.mlp.down_proj.weight", 5), ("lm_head.weight", 0)):
        assert ranks(4).run(drift, 4, torch.float32, {1: (name, element, 3)}) == [None] * 4


def test_a_run_compares_every_few_steps_and_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(trainer, "check_replicas", lambda _model, _mesh, step, _optimizer: compared.append(step))
    config = make_config(log={"drift_every": 2}, train={"stop_after": 5, "eval_every": 0})
    run(build.build_trainer(config, shared_mesh(1), make_data()))
    assert compared == [0, 2, 4, 5]


def run(trained: Trainer) -> None:
    """A run that records and saves nothing."""
    reporter: Any = SimpleNamespace(step=lambda _: None)
    unsaved: Any = SimpleNamespace(flags=None, stopped_by=None, state_hashes=None, after_step=lambda *_: None)
    observers = build_observers(trained, reporter, unsaved, None)
    trained.run(partial(run_observers, observers), unsaved, lambda _: nullcontext())


def drifted_start(step: int) -> str | None:
    """Train after `step` steps where the last of four ranks has another bit in the part that rank 1 owns too."""
    config = make_config(parallel={"replicate": 2}, optimizer={"zero": 3}, log={"drift_every": 0})
    trained = build.build_trainer(config, shared_mesh(1), make_data())
    trained.progress.step = step
    if trained.mesh.world.rank == 3:
        flip(next(bucket for bucket in trained.optimizer.buckets if bucket.frees_values).shard, 0, 0)
    try:
        run(trained)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.parametrize("step", [0, 7])
def test_ranks_that_begin_with_other_weights_take_no_step(step: int, ranks: Any) -> None:
    """Copies of parts that ZeRO-3 keeps, also where a run makes no other comparison."""
    (text,) = set(ranks(4).run(drifted_start, step))
    assert text.startswith(f"step {step}: ")
    assert "on ranks [3] differs from rank 1" in text


def compared(overrides: dict[int, list[str]], torches: dict[int, str]) -> list[str]:
    rank = Group.world().rank
    config = load_config("llama2-tiny", overrides.get(rank, []))
    found = {**rank_agreement.package_versions(), **({"torch": torches[rank]} if rank in torches else {})}
    with mock.patch.object(rank_agreement, "package_versions", return_value=found):
        try:
            rank_agreement.require_same_on_ranks(config.model_dump(mode="json"), Mesh())
        except ConfigError as error:
            return error.problems
    return []


def test_what_differs_is_told_on_every_rank_with_the_ranks(ranks: Any) -> None:
    found = ranks(4).run(compared, {3: ["train.seed=7"]}, {2: "9.9", 3: "9.9"})
    (torch_, seed) = found[0]
    assert torch_.startswith("torch must be the same on all ranks: 2.")
    assert torch_.endswith(" on rank 0, and 9.9 on ranks 2 and 3")
    assert seed == "train.seed must be the same on all ranks: 1234 on rank 0, and 7 on rank 3"
    assert all(of_rank == found[0] for of_rank in found)
    assert ranks(2).run(compared, {}, {}) == [[], []]


def of_folders(*folders: str | None) -> tuple[list[str], list[str]]:
    """What a rank says of its run's folder, and of the argument `run_dir`."""
    given = folders[Group.world().rank]
    folder = None if given is None else Path(given)
    settings = load_config("llama2-tiny").model_dump(mode="json")
    said: list[list[str]] = []
    for ask in (
        lambda: rank_agreement.require_same_on_ranks(settings, Mesh(), folder),
        lambda: rank_agreement.require_same_run_dir(folder, 60.0),
    ):
        try:
            ask()
        except ConfigError as error:
            said.append(error.problems)
        else:
            said.append([])
    return said[0], said[1]


def test_ranks_share_one_folder(ranks: Any) -> None:
    """Else the rank that finds a finished run returns, and the others wait for it."""
    here = [str(Path(name).absolute()) for name in ("runs/a", "runs/b")]
    ((folder, run_dir), other) = ranks(2).run(of_folders, "runs/a", "runs/b")
    assert other == (folder, run_dir)
    assert folder == ["the run's folder must be the same on all ranks: runs/a on rank 0, and runs/b on rank 1"]
    assert run_dir == [f"run_dir must be the same on all ranks: {here[0]} on rank 0, and {here[1]} on rank 1"]
    assert ranks(2).run(of_folders, "runs/a", here[0]) == [([], [])] * 2
    ((_, run_dir), _) = ranks(2).run(of_folders, "runs/a", None)
    assert run_dir == [f"run_dir must be the same on all ranks: {here[0]} on rank 0, and None on rank 1"]


def agreed(problems: dict[int, list[str]]) -> list[str]:
    world = Mesh().world
    try:
        raise_on_all_ranks(problems.get(world.rank, []), world)
    except ConfigError as error:
        return error.problems
    return []


def test_a_problem_of_one_rank_is_raised_on_all(ranks: Any) -> None:
    assert ranks(2).run(agreed, {1: ["the disk is full"]}) == [["the disk is full"]] * 2


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


def measured(layout: dict[str, Any], steps: int, slow: bool) -> tuple[list[StepRecord], float]:
    """The records of this rank, and the sum of its pauses.

    With `slow` rank 3 pauses before each forward pass, so that its own work takes several times what it does without,
    however busy the machine is. Between the steps the ranks wait for rank 3, as in an evaluation.
    """
    trainer = make_trainer(config_of(**layout))
    paused, seconds = 0.0, 0.02
    if slow and trainer.mesh.world.rank == SLOW:

        def pause(*_: object) -> None:
            nonlocal paused
            start = time.perf_counter()
            time.sleep(seconds)
            paused += time.perf_counter() - start

        parts = trainer.model.children() if trainer.pipeline is not None else [trainer.model]
        for part in parts:
            part.register_forward_pre_hook(pause)
    records = []
    for _ in range(steps):
        before = paused
        records.append(trainer.step(list))
        if trainer.mesh.world.rank == SLOW:
            time.sleep(0.02)
        collectives.all_reduce_(torch.ones(1000), trainer.mesh.world)
        seconds = max(0.02, 3 * ((records[-1].work_seconds or 0.0) - (paused - before)))
    return records, paused


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_rank_is_named_and_not_those_that_wait_for_it(layout: str, ranks: Any) -> None:
    results = ranks(4).run(measured, LAYOUTS[layout], STRAGGLER_STEPS + 4, True)
    for rank, (records, paused) in enumerate(results):
        for record in records:
            assert sum(record.split.values()) == pytest.approx(record.seconds, rel=1e-6), f"rank {rank}: {record.split}"
            assert min(record.split.values()) >= 0.0, record.split
            assert (record.work_seconds or 0.0) > 0.0, "waits between the steps are no part of them"
        sent = [record.communication_bytes for record in records]
        assert sent[1:] == sent[:-1], "each step sends the same, whatever is sent between"
        assert sum(sent[0].values()) > 0
        chosen = config_of(**LAYOUTS[layout])
        place = rank // 2 if chosen.parallel.pipeline > 1 else 0
        expected = wire_bytes(step_transfers(chosen, check_layout(chosen, 4), pipeline_rank=place)) or {}
        messages = expected.get(("pp", "send"), 0.0)
        assert (messages > 0) == (chosen.parallel.pipeline > 1)
        assert 0 <= sent[0].get("pp", 0) - messages < 1000, "messages between stages, and a few numbers of the step"
        own = sum(record.work_seconds or 0.0 for record in records)
        assert (paused > 0) == (rank == SLOW)
        assert own > paused, "its pauses are its own work"
    named = [records[-1].straggler for records, _ in results]
    assert all(one == named[0] for one in named)
    assert named[0].rank == SLOW
    assert named[0].relative > 1.5


def test_a_stage_of_other_data_is_no_loss_spike() -> None:
    begin = SMOOTHED_STEPS + 2
    data = {"mixture": {"web": {"dataset": "tiny", "weight": 1.0}}, "stages": [{"at": begin, "weights": {"web": 2.0}}]}
    config = make_config(
        model=sizes(131, 16, 16, layers=1, heads=2) | {"family": "gpt"},
        train={"steps": 2 * begin + 1, "eval_every": 0, "micro_batch": 8},
        data=data,
        optimizer={"lr": 1e-5},
    )
    trainer = build_trainer(config, mesh(1), random_tokens(config.model.vocab_size))
    records = [trainer.step() for _ in range(begin)]
    assert [record.step for record in records if record.loss_spike is not None] == [begin - 1, begin]
    # As if the stage before had been easier.
    trainer.progress.losses.extend([loss / 2 for loss in trainer.progress.losses])
    records = [trainer.step() for _ in range(begin)]
    assert records[0].mean_loss == pytest.approx(records[0].loss)
    assert [record.step for record in records if record.loss_spike is not None] == [2 * begin - 1, 2 * begin]
    assert max(abs(record.loss_spike or 0.0) for record in records) < 6
