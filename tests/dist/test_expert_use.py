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
from shardwise.train.build import build_trainer
from shardwise.train.evaluation_losses import evaluate
from shardwise.train.model_checks import check_replicas
from shardwise_use.generation import TokenSampler, generate_tokens
from shardwise_use.task_requests import ScoreRequest, TaskModel, TextRequest
from tests.dist.dense import run
from tests.dist.test_expert_files import written
from tests.dist.test_experts import SIZES, V
from tests.dist.training import make_config, make_data
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
    assert batches is not None
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


# ---- batches that leave ranks and experts without a token

FEW: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one token a rank": (2, {"train": {"sequence_length": 1, "micro_batch": 1, "global_batch": 2}}),
    "one token a rank, ZeRO-3": (
        2,
        {
            "train": {"sequence_length": 1, "micro_batch": 1, "global_batch": 2, "recompute": "full"},
            "optimizer": {"zero": 3},
        },
    ),
    "one expert for all tokens": (4, {"train": {"sequence_length": 4, "micro_batch": 1, "global_batch": 4}}),
}


def losses(sections: dict[str, dict[str, Any]], expert: int) -> list[float]:
    """The losses of 3 steps with one expert a token, which is the first one for all tokens of the first step."""
    model = {"family": "olmoe", **SIZES, "vocab_size": 131, "num_experts": 4, "num_experts_per_tok": 1}
    config = make_config(**{**sections, "model": model, "parallel": {"expert": expert}})
    mesh = Mesh(**config.parallel.degrees, device="cpu")
    trainer = build_trainer(config, mesh, make_data(131))
    with torch.no_grad(), trainer.optimizer.gathered():
        for name, parameter in trainer.model.named_parameters():
            if "router" in name and parameter.numel():
                parameter.zero_()
    found = [trainer.step().loss for _ in range(3)]
    check_replicas(trainer.model, mesh, trainer.progress.step, trainer.optimizer)
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "ZeRO" in n else ()) for n in FEW])
def test_ranks_and_experts_without_a_token_train_as_one_process_does(name: str, ranks: Any) -> None:
    world, sections = FEW[name]
    wanted = losses(sections, 1)
    for found in run(ranks, world, losses, sections, world):
        assert found == pytest.approx(wanted, rel=1e-5)
