"""What `cost` computes of a pipeline is what its ranks do: bytes on the wire, bytes of state, and what they receive."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from shardwise import cost
from shardwise.config import Config, check_layout
from shardwise.plan import local_parameter_count, stage_plan
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.test_costs import DROPOUT, EVAL_BATCHES, MODELS, SIZES, Measured, compare, count
from tests.dist.training import make_config, make_data

RANKS = 4

Case = tuple[str, str, int, int, int, str, str]
# (model, schedule, PP, TP, ZeRO, recompute, optimizer), with eight micro-batches a step.
CASES: list[Case] = [
    ("llama", "1f1b", 2, 1, 1, "none", "adamw"),
    ("llama", "interleaved", 4, 1, 0, "full", "adamw"),
    ("llama", "zbv", 2, 2, 0, "none", "lamb"),
    ("shared", "gpipe", 2, 2, 0, "full", "adamw"),
    ("shared", "dualpipev", 2, 1, 1, "none", "adamw"),
    ("gpt", "1f1b", 2, 2, 0, "selective", "adamw"),
    ("gpt", "gpipe", 4, 1, 0, "none", "adamw"),
    ("gpt", "zbv", 2, 1, 1, "full", "adamw"),
    ("gpt", "interleaved", 2, 1, 1, "none", "lamb"),
    ("untied", "interleaved_zero_bubble", 2, 2, 0, "none", "adamw"),
    ("untied", "1f1b", 4, 1, 0, "selective", "lamb"),
    ("neox", "interleaved", 2, 2, 0, "full", "adamw"),
    ("neox", "dualpipev", 2, 2, 0, "none", "adamw"),
    ("bert", "1f1b", 4, 1, 0, "none", "adamw"),
    ("bert", "gpipe", 2, 1, 1, "full", "adamw"),
    ("bert", "interleaved", 2, 2, 0, "none", "adamw"),
    ("bert", "zbv", 2, 1, 0, "selective", "lamb"),
    ("llama", "zbv", 2, 2, 0, "full", "adamw"),
    ("gpt", "interleaved_zero_bubble", 2, 2, 0, "full", "adamw"),
    ("neox", "dualpipev", 2, 2, 0, "full", "adamw"),
    ("olmo2", "zbv", 2, 2, 0, "none", "adamw"),
]

ALWAYS = (0, 2, 4, 6, 8, 10, 18, 20)
"""Rows that every run of the tests has: each schedule, and a backward pass in two parts with norms of q and k."""
UNEQUAL: dict[Case, list[int]] = {("untied", "1f1b", 4, 1, 0, "selective", "lamb"): [3, 1, 2, 2]}
"""Blocks of the stages, where these are named."""


def case_config(case: Case) -> Config:
    model, schedule, pipeline, tensor, zero, recompute, optimizer = case
    sizes = SIZES | {"num_hidden_layers": 8} | MODELS[model]
    return make_config(
        model=sizes | dict.fromkeys(DROPOUT[MODELS[model]["family"]], 0.0),
        parallel={
            "pipeline": pipeline,
            "schedule": schedule,
            "stages": UNEQUAL.get(case),
            "tensor": tensor,
            "sequence": tensor > 1,
            "vocab_multiple": 16 if tensor > 1 else 1,
        },
        train={
            "eval_batches": EVAL_BATCHES,
            "recompute": recompute,
            "micro_batch": 1,
            "global_batch": 8 * RANKS // (pipeline * tensor),
        },
        optimizer={"zero": zero, "name": optimizer, "bucket_mib": 0.02},
    )


def name(case: Case) -> str:
    model, schedule, pipeline, tensor, zero, recompute, optimizer = case
    return f"{model}-{schedule}-pp{pipeline}-tp{tensor}-zero{zero}-{recompute}-{optimizer}"


@dataclass
class MeasuredStage(Measured):
    """With the rank's place, and the elements that its parameters have without a bucket's padding."""

    place: tuple[int, int] = (0, 0)
    elements: int = 0


def measure(config: Config) -> MeasuredStage:
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline)
    data = make_data(config.model.vocab_size, samples=256, pairs="nsp" in config.model.objectives)
    sentences = dict.fromkeys(data.sentences, data.sentences["train"]) if data.sentences else data.sentences
    data = replace(data, eval_tokens=data.train_tokens, sentences=sentences)
    trainer = build_trainer(config, mesh, data)
    trainer.step()
    count(mesh)
    trainer.step()
    step, calls = count(mesh)
    trainer.evaluate()
    evaluation, more_calls = count(mesh)
    buckets, state = trainer.optimizer.buckets, trainer.optimizer.state_bytes()
    return MeasuredStage(
        data_rank=mesh.dp.rank,
        step=step,
        evaluation=evaluation,
        calls=calls + more_calls,
        parameters=sum(bucket.values.nbytes for bucket in buckets),
        gradients=sum(bucket.gradients.nbytes for bucket in buckets),
        optimizer=state["state"] + state["masters"],
        place=(mesh.pp.rank, mesh.tp.rank),
        elements=sum(p.numel() for p in trainer.model.parameters()),
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if i in ALWAYS else pytest.mark.slow, id=name(case)) for i, case in enumerate(CASES)],
)
def test_costs_of_a_pipeline_are_what_happens(case: Case, ranks: Any) -> None:
    config = case_config(case)
    layout = check_layout(config, RANKS)
    memory = cost.memory_by_rank(config, layout)
    assert memory is not None
    everyone: list[MeasuredStage] = ranks(RANKS).run(measure, config)
    for rank, found in enumerate(everyone):
        stage, tensor = found.place
        step = cost.bytes_per_step(config, layout, pipeline_rank=stage, data_rank=found.data_rank, tensor_rank=tensor)
        evaluated = cost.bytes_per_evaluation_batch(config, layout, pipeline_rank=stage)
        assert step is not None
        assert evaluated is not None
        compare(found.step, step, found.calls, f"step, rank {rank}")
        evaluation = {key: EVAL_BATCHES * sent for key, sent in evaluated.items()}
        size = 2 * 8 * len(config.model.objectives)  # sums of losses and numbers of targets, in float64
        for axis, degree in (("dp", layout.data), ("pp", layout.pipeline)):
            if degree > 1:
                key = (axis, "all_reduce")
                evaluation[key] = evaluation.get(key, 0.0) + 2 * size * (degree - 1) / degree
        compare(found.evaluation, evaluation, found.calls, f"evaluation, rank {rank}")
        expected = memory[stage]
        assert (found.parameters, found.gradients) == (expected.parameters, expected.gradients), f"rank {rank}"
        assert found.optimizer == expected.optimizer, f"rank {rank} holds other optimizer state than cost has"
        stages = tuple(one for one in stage_plan(config, layout) if one.rank == stage)
        multiple = config.parallel.vocab_multiple
        elements = local_parameter_count(config.model, layout.tensor, vocab_multiple=multiple, stages=stages)
        assert found.elements == elements
