"""Every schedule trains like one process, with tensor parallelism, ZeRO-1 and tied embeddings."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.config import Config, load_config
from shardwise.testing import gradient_errors
from tests.dist.training import Outcome, make_config, train, whole

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
MODELS = ("gpt tied", "gpt untied", "llama tied", "llama untied", "bert")
RECIPES = {"gpt": "gpt-tiny", "llama": "llama2-tiny", "bert": "bert-tiny"}

# Each pair of two of these: schedule, PP, TP, ZeRO stage, family, tied or not; the other cells are slow.
PAIRWISE = {
    ("gpipe", 2, 1, 0, "llama tied"),
    ("gpipe", 2, 2, 0, "gpt untied"),
    ("gpipe", 4, 1, 1, "bert"),
    ("1f1b", 2, 1, 1, "llama untied"),
    ("1f1b", 2, 2, 0, "bert"),
    ("1f1b", 4, 1, 0, "gpt tied"),
    ("interleaved", 2, 1, 0, "llama untied"),
    ("interleaved", 2, 1, 1, "gpt tied"),
    ("interleaved", 4, 2, 0, "bert"),
    ("interleaved_zero_bubble", 2, 1, 0, "gpt untied"),
    ("interleaved_zero_bubble", 2, 1, 1, "bert"),
    ("interleaved_zero_bubble", 4, 2, 0, "llama untied"),
    ("zbv", 2, 1, 0, "bert"),
    ("zbv", 2, 2, 0, "gpt tied"),
    ("zbv", 4, 1, 1, "llama untied"),
    ("dualpipev", 2, 1, 0, "bert"),
    ("dualpipev", 2, 2, 1, "llama tied"),
    ("dualpipev", 4, 1, 0, "gpt untied"),
}
CELLS = [
    pytest.param(
        *cell,
        id=f"{cell[0]}-pp{cell[1]}-{'tp2-sp' if cell[2] == 2 else 'tp1'}-zero{cell[3]}-{cell[4].replace(' ', '-')}",
        marks=() if cell in PAIRWISE else pytest.mark.slow,
    )
    for cell in (
        (schedule, pipeline, tensor, zero, model)
        for schedule in SCHEDULES
        for pipeline in (2, 4)
        for tensor in (1, 2)
        for zero in (0, 1)
        for model in MODELS
    )
    if cell[1] * cell[2] * (cell[3] + 1) <= 8
]


def configuration(model: str, global_batch: int = 8, **sections: dict[str, Any]) -> Config:
    """A recipe in miniature."""
    family, _, tied = model.partition(" ")
    sizes = load_config(RECIPES[family], []).model.model_dump(mode="json")
    if tied:
        sizes["tie_word_embeddings"] = tied == "tied"
    train_ = {"global_batch": global_batch, "micro_batch": 8, "sequence_length": 16}
    sections["train"] = train_ | sections.get("train", {})
    return make_config(model=sizes, **sections)


@functools.cache
def reference(model: str, global_batch: int) -> Outcome:
    torch.set_num_threads(1)
    return train(configuration(model, global_batch))


@pytest.mark.parametrize(("schedule", "pipeline", "tensor", "zero", "model"), CELLS)
def test_a_pipeline_trains_like_one_process(
    schedule: str, pipeline: int, tensor: int, zero: int, model: str, ranks: Any
) -> None:
    parallel = {"pipeline": pipeline, "schedule": schedule, "tensor": tensor, "sequence": tensor > 1}
    global_batch = 16 if (schedule, pipeline, zero) == ("dualpipev", 4, 1) else 8  # it takes 8 micro-batches on a rank
    train_ = {"micro_batch": 1}
    config = configuration(model, global_batch, parallel=parallel, train=train_, optimizer={"zero": zero})
    outcomes = ranks(pipeline * tensor * (zero + 1)).run(train, config)
    compare(whole(outcomes), reference(model, global_batch))
    assert len({tuple(each.losses) for each in outcomes}) == 1, "ranks of one step have different losses"


def compare(found: Outcome, wanted: Outcome) -> None:
    """What two layouts may differ in is rounding."""
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
