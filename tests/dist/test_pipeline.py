"""The whole matrix of schedules and layouts against one process, up to 8 ranks; and weights tied across a pipeline.

`test_cells.py` has an array of it in every run of the tests.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.config import Config, load_config
from shardwise.distributed.placement import placements
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights, gradient_errors
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import Outcome, make_config, make_data, train, whole

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
MODELS = ("gpt tied", "gpt untied", "llama tied", "llama untied", "bert")
RECIPES = {"gpt": "gpt-tiny", "llama": "llama2-tiny", "bert": "bert-tiny"}

ALL = [
    (schedule, pipeline, tensor, zero, model)
    for schedule in SCHEDULES
    for pipeline in (2, 4)
    for tensor in (1, 2)
    for zero in (0, 1)
    for model in MODELS
    if pipeline * tensor * (zero + 1) <= 8
]
NAMES = ("schedule", "pipeline", "tensor", "zero", "model")


def name(cell: tuple[str, int, int, int, str]) -> str:
    schedule, pipeline, tensor, zero, model = cell
    return f"{schedule}-pp{pipeline}-{'tp2-sp' if tensor == 2 else 'tp1'}-zero{zero}-{model.replace(' ', '-')}"


def configuration(model: str, global_batch: int = 8, layers: int = 8, **sections: dict[str, Any]) -> Config:
    """A recipe in miniature, whose own number of layers is 8."""
    family, _, tied = model.partition(" ")
    sizes = load_config(RECIPES[family], []).model.model_dump(mode="json") | {"num_hidden_layers": layers}
    if tied:
        sizes["tie_word_embeddings"] = tied == "tied"
    train_ = {
        "global_batch": global_batch,
        "micro_batch": min(8, global_batch),
        "sequence_length": 16,
        "eval_batches": 1,
    }
    sections["train"] = train_ | sections.get("train", {})
    return make_config(model=sizes, **sections)


@functools.cache
def reference(model: str, global_batch: int, layers: int) -> Outcome:
    torch.set_num_threads(1)
    return train(configuration(model, global_batch, layers))


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, [pytest.param(*cell, id=name(cell)) for cell in ALL])
def test_a_pipeline_trains_like_one_process(
    schedule: str,
    pipeline: int,
    tensor: int,
    zero: int,
    model: str,
    ranks: Any,
    record_property: Callable[[str, object], None],
) -> None:
    """What it finds is in the report of `--junitxml`, for the table in benchmarks/results."""
    for what, error in check(ranks, schedule, pipeline, tensor, zero, model, layers=8).items():
        record_property(what, error)


def check(
    ranks: Any, schedule: str, pipeline: int, tensor: int, zero: int, model: str, layers: int
) -> dict[str, float]:
    """The largest differences from one process, which are small."""
    parallel = {"pipeline": pipeline, "schedule": schedule, "tensor": tensor, "sequence": tensor > 1}
    # On each rank as many micro-batches as any schedule takes, and more on the smallest layouts of four stages or more.
    micro_batches = 8 if pipeline == 4 and (schedule == "dualpipev" or tensor * (zero + 1) == 1) else 4
    global_batch = micro_batches * (zero + 1)
    train_ = {"micro_batch": 1}
    config = configuration(model, global_batch, layers, parallel=parallel, train=train_, optimizer={"zero": zero})
    outcomes = ranks(pipeline * tensor * (zero + 1)).run(train, config)
    errors = compare(whole(outcomes), reference(model, global_batch, layers))
    assert len({tuple(each.losses) for each in outcomes}) == 1, "ranks of one step have different losses"
    return errors


EMBEDDING = "transformer.wte.weight"


def trained_embedding(config: Config, steps: int) -> dict[str, Any]:
    """What this rank's stages hold of the tied embedding after some steps, and how many parameters that is."""
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    for _ in range(steps):
        trainer.step()
    held = [p for _, p, record in placements(trainer.model) if record.pieces[0].name == EMBEDDING]
    return {"parameters": len(held), "weight": canonical_weights(trainer.model).get(EMBEDDING)}


@pytest.mark.parametrize(
    ("schedule", "stages", "ends"), [("1f1b", [7, 1], {0: 1, 1: 1}), ("zbv", [2, 2, 2, 2], {0: 1, 1: 0})]
)
def test_a_weight_tied_across_a_pipeline_stays_one(
    schedule: str, stages: list[int], ends: dict[int, int], ranks: Any
) -> None:
    """Fault 13 of the reference, which cannot tie weights under a pipeline.

    In unequal stages with large buckets and many rows, its owners would be others where it shared a bucket.
    """
    parallel = {"pipeline": 2, "schedule": schedule, "stages": stages, "vocab_multiple": 1024}
    config = configuration("gpt tied", parallel=parallel, train={"micro_batch": 1}, optimizer={"bucket_mib": None})
    found = ranks(4).run(trained_embedding, config, 5)  # pipeline rank 0 is ranks 0 and 1
    assert {rank // 2: each["parameters"] for rank, each in enumerate(found)} == ends
    alone = trained_embedding(configuration("gpt tied"), 5)["weight"]
    for rank, each in enumerate(found):
        if ends[rank // 2]:
            assert torch.equal(each["weight"], found[0]["weight"]), f"rank {rank} has another embedding than rank 0"
            torch.testing.assert_close(each["weight"], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def compare(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """What two layouts may differ in is rounding; how much they do."""
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(found.weights[name], weight), f"{name} differs at step 0"
    errors = gradient_errors(found.gradients, wanted.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e} of its norm"
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5, err_msg="losses of 20 steps")
    np.testing.assert_allclose(found.norms, wanted.norms, rtol=1e-4, err_msg="gradient norms of 20 steps")
    np.testing.assert_allclose(found.evaluation, wanted.evaluation, rtol=1e-5, err_msg="evaluation")
    assert wanted.losses[-1] < 0.99 * wanted.losses[0], "the reference does not learn, so the curve shows nothing"
    curves = zip(found.losses, wanted.losses, strict=True)
    return {"loss": max(abs(a / b - 1) for a, b in curves), "gradient": errors[worst]}
