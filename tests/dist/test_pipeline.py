"""A weight that both ends of a pipeline have; `test_cells.py` has the layouts."""

from typing import Any

import pytest
import torch

from shardwise.config import Config, load_config
from shardwise.distributed.placement import placements
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data

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
def test_a_weight_tied_across_a_pipeline_stays_one(
    schedule: str, stages: list[int], ends: dict[int, int], ranks: Any
) -> None:
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
