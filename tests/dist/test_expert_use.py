"""A sparse model in use at layouts whose ranks divide its experts: text, scores of tasks and evaluations."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.config import check_layout, config_from_sections
from shardwise.data.formats.prepared_data import make_evaluation_batches
from shardwise.data.samples.batch import Batches
from shardwise.distributed.mesh import Mesh
from shardwise.pipeline.stages import build_stages
from shardwise.train.evaluation_losses import evaluate
from shardwise_use.generation import TokenSampler, generate_tokens
from shardwise_use.task_requests import ScoreRequest, TaskModel, TextRequest
from tests.dist.dense import run
from tests.dist.test_expert_files import written
from tests.dist.test_experts import V
from tests.dist.training import make_data
from tests.hugging_face import described

PROMPT = [5, 9, 2, 40, 11]
REQUESTS = [ScoreRequest([1, 2, 3, 4, 5, 6, 7][: 3 + number % 5], 1 + number % 2) for number in range(5)]
TEXTS = [TextRequest([7, number], 2 + 3 * number, ["END"], temperature=0.8) for number in range(3)]


class Numbers:
    """A tokenizer whose text of a token is its number."""

    def decode(self, tokens: list[int], *, skips_special: bool = False) -> str:
        return " ".join(map(str, tokens))


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="shardwise-test-"))
    written("glm4_moe", path, fused=True, num_hidden_layers=4)
    return path


def use(path: Path, parallel: dict[str, int]) -> tuple[list[int], list[int], list[Any], list[str], float]:
    """Tokens, likeliest and drawn; scores and texts of requests, on rank 0; the loss of a text."""
    replicas = parallel.get("expert", 1)
    config = config_from_sections(
        {
            "model": described(path).model_dump(),
            "parallel": parallel,
            "train": {"steps": 1, "global_batch": 4 * replicas, "micro_batch": 2, "sequence_length": 16},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = Mesh(**config.parallel.degrees, device="cpu")
    model = build_stages(config, check_layout(config, mesh.world.size), mesh, dtype=torch.float32)
    load_hugging_face(model, config.model, mesh, path)
    model.eval()
    likeliest, drawn = (
        list(generate_tokens(model, mesh, PROMPT, 6, TokenSampler(heat, seed=4), chunk=3, parallel=config.parallel))
        for heat in (0.0, 1.0)
    )
    tasks = TaskModel(model, mesh, config.parallel, Numbers(), frozenset(), 2)  # type: ignore[arg-type]
    answers = tasks.while_others_answer(lambda: (tasks.scores(REQUESTS), tasks.texts(TEXTS)))
    scores, texts = answers or ([], [])
    data = make_data(V, 5)  # the last portion is filled up
    batches: Batches | None = make_evaluation_batches(config, data, "train")
    loss = evaluate(model, batches, mesh, 2, parallel=config.parallel).loss
    return likeliest, drawn, scores, texts, loss


LAYOUTS = [
    pytest.param(2, {"expert": 2}, id="EP 2"),
    pytest.param(4, {"expert": 2, "tensor": 2}, id="EP 2, TP 2", marks=pytest.mark.slow),
    pytest.param(4, {"expert": 2, "pipeline": 2}, id="EP 2, PP 2", marks=pytest.mark.slow),
    pytest.param(4, {"expert": 2}, id="DP 4, EP 2", marks=pytest.mark.slow),
]


@functools.cache
def alone() -> tuple[list[int], list[int], list[Any], list[str], float]:
    return use(folder(), {})


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
def test_a_model_in_use_is_that_of_one_process(world: int, parallel: dict[str, int], ranks: Any) -> None:
    likeliest, drawn, scores, texts, loss = alone()
    answers = run(ranks, world, use, folder(), parallel)
    for found_likeliest, found_drawn, _, _, found_loss in answers:
        assert (found_likeliest, found_drawn) == (likeliest, drawn)
        assert found_loss == pytest.approx(loss, rel=1e-6)
    _, _, found_scores, found_texts, _ = answers[0]
    assert found_texts == texts
    assert [score.is_likeliest for score in found_scores] == [score.is_likeliest for score in scores]
    assert [s.log_probability for s in found_scores] == pytest.approx([s.log_probability for s in scores], abs=1e-4)
