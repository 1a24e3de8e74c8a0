"""Scores of evaluation tasks at any layout and batch are those of `lm_eval --model hf` on the same folder."""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.config import check_layout
from shardwise.data.evaluation_tasks import longest_task_input
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.pipeline.stages import build_stages
from shardwise.train.build import build_optimizer
from shardwise_use.task_requests import ScoreRequest, TaskModel
from tests.dist.dense import mesh, run
from tests.dist.own_models import Dropping
from tests.dist.training import Sections, build_trainer, cases, make_config, make_data
from tests.hugging_face import described
from tests.sweeps import few
from tests.task_files import TASKS, VOCABULARY, write_model, write_tasks


class Own(Dropping):
    """A model that nobody knows, with the one method that tasks need."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        logits_SBV: Tensor = self.head(self.dropout(self.embedding(ids_SB)))
        return logits_SBV


METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


@dataclass
class Scored:
    """What a model answered to each kind of request, in their order, and the metrics of each task."""

    answers: dict[str, list[Any]]
    metrics: Sections


@functools.cache
def folders(case: str) -> tuple[Path, Path]:
    """The folder of a model, and that of the tasks."""
    root = Path(tempfile.mkdtemp(prefix="shardwise-test-"))
    family, _, mark = case.partition(" ")
    return write_model(family, root / "model", marks_begin=bool(mark)), write_tasks(root / "tasks")


def recorded(model: type[Any], answers: dict[str, list[Any]]) -> type[Any]:
    """A class that keeps the answers of a class of `lm_eval`."""

    def method(name: str) -> Any:
        def call(self: Any, requests: list[Any], *args: Any, **options: Any) -> Any:
            result = getattr(model, name)(self, requests, *args, **options)
            answers.setdefault(name, []).extend(result)
            return result

        return call

    return type("Recorded", (model,), {name: method(name) for name in METHODS})


@functools.cache
def theirs(case: str) -> Scored:
    """The answers of `lm_eval --model hf`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tasks = folders(case)
    answers: dict[str, list[Any]] = {}
    scoring = recorded(HFLM, answers)(pretrained=str(model), device="cpu", dtype="float32", batch_size=1)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    results = simple_evaluate(scoring, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    return Scored(answers, results["results"])


def ours(model: Path, tasks: Path, parallel: dict[str, Any], batch: int, limit: int | None) -> Scored | None:
    """The answers at a layout; None on all ranks but 0."""
    from shardwise_use import task_evaluation  # and lm_eval, which takes a second of each worker that collects tests

    config = make_config(
        model=described(model).model_dump(mode="json"),
        parallel={key: degree for key, degree in parallel.items() if key != "zero"},
        optimizer={"zero": parallel.get("zero", 1)},
        train={"micro_batch": batch, "global_batch": 8 * batch},
        evaluation={"tasks": list(TASKS), "tasks_path": str(tasks), "limit": limit},
    )
    ranks = mesh(config.parallel.tensor, config.parallel.pipeline)
    stages = build_stages(config, check_layout(config, ranks.world.size), ranks)
    optimizer = build_optimizer(config, config.precision.resolved(False), stages, ranks)
    load_hugging_face(stages, config.model, ranks, model, optimizer)
    tokenizer = Tokenizer.load(model)
    stop = frozenset(() if tokenizer.end_of_document_id is None else (tokenizer.end_of_document_id,))
    answers: dict[str, list[Any]] = {}
    recording = mock.patch.object(task_evaluation, "_ShardedLM", recorded(task_evaluation._ShardedLM, answers))
    with recording, optimizer.gathered(all_units=False):
        in_step = optimizer.gathers_in_passes
        results = task_evaluation.evaluate_tasks(config, stages.eval(), ranks, tokenizer, stop, in_step=in_step)
    return None if results is None else Scored(answers, results["results"])


LAYOUTS = cases("tasks")


CASES = [
    *(("llama", layout) for layout in LAYOUTS if layout != "ZeRO-3"),
    ("gpt", "ZeRO-3"),
    ("neox with a first token", "TP 2 with SP"),
]


@pytest.mark.parametrize(("case", "layout"), few(CASES, ("llama", "TP 2 with SP")))
def test_scores_are_those_of_lm_eval(case: str, layout: str, ranks: Any) -> None:
    world, parallel, batch = LAYOUTS[layout]
    wanted = theirs(case)
    first, *others = run(ranks, world, ours, *folders(case), parallel, batch, None)
    assert others == [None] * (world - 1)
    for name in METHODS[:2]:
        assert len(first.answers[name]) == len(wanted.answers[name]) > 5
    for (log_p, is_likeliest), (their_log_p, theirs_is) in zip(
        first.answers["loglikelihood"], wanted.answers["loglikelihood"], strict=True
    ):
        assert log_p == pytest.approx(their_log_p, rel=1e-5)
        assert is_likeliest == theirs_is
    assert first.answers["loglikelihood_rolling"] == pytest.approx(wanted.answers["loglikelihood_rolling"], rel=1e-5)
    assert first.answers["generate_until"] == wanted.answers["generate_until"]
    assert any(first.answers["generate_until"])
    for task in TASKS:
        for name, value in wanted.metrics[task].items():
            if name.startswith(("acc", "exact_match")):
                assert first.metrics[task][name] == value


def answers(model: Path, parallel: dict[str, Any], ask: Callable[[Any], Any]) -> Any:
    """What a model at a layout answers to `ask`; None on all ranks but 0."""
    from shardwise_use import task_evaluation

    config = make_config(model=described(model).model_dump(mode="json"), parallel=parallel)
    ranks = mesh(config.parallel.tensor, config.parallel.pipeline)
    stages = build_stages(config, check_layout(config, ranks.world.size), ranks)
    load_hugging_face(stages, config.model, ranks, model)
    answering = TaskModel(stages.eval(), ranks, config.parallel, Tokenizer.load(model), frozenset(), 1)
    lm = task_evaluation._ShardedLM(answering, longest_task_input(config.model, config.train))
    return answering.while_others_answer(lambda: ask(lm))


def draws(count: int, lm: Any, **settings: Any) -> list[str]:
    """Continuations of one prompt, as a task that repeats a request wants them."""
    from lm_eval.api.instance import Instance

    arguments = ("The ring of", {"do_sample": True, "until": [], **settings})
    return list(lm.generate_until([Instance("generate_until", {}, arguments, row) for row in range(count)]))


@pytest.mark.parametrize(("world", "parallel"), [(2, {}), (2, {"tensor": 2})])
def test_each_repeat_of_a_request_has_own_draws_everywhere(world: int, parallel: dict[str, Any], ranks: Any) -> None:
    model, _ = folders("llama")
    ask = functools.partial(draws, 6, temperature=0.7, max_gen_toks=8)
    found = run(ranks, world, answers, model, parallel, ask)[0]
    assert len(set(found)) == 6
    assert found == answers(model, {}, ask)


def test_a_training_goes_on_without_scores(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    rows = tasks / "rows.jsonl"
    rows.write_text(rows.read_text(encoding="utf-8").replace('" keys"', f'"{" keys" * 999}"'), encoding="utf-8")
    config = make_config(
        model={"max_position_embeddings": 48},
        evaluation={"tasks": ["choice"], "tasks_path": str(tasks), "tasks_every": 1},
    )
    trainer = build_trainer(config, mesh(1), make_data(config.model.vocab_size))
    told: list[str] = []
    trainer.evaluator.reporter = SimpleNamespace(warning=told.append)  # type: ignore[assignment]
    trainer.evaluator.tokenizer_path = folders("llama")[0]
    trainer.evaluator.tasks()
    (text,) = told
    assert text.startswith("evaluation.tasks have no scores at step 0: a continuation in evaluation.tasks (")
    assert trainer.model.training


@torch.no_grad()
def test_a_model_of_ones_own_scores_by_its_logits() -> None:
    model = Own(VOCABULARY).eval()
    config = make_config()
    tokenizer = Tokenizer.load(folders("llama")[0])
    texts = [[7, 3, 9, 4], [1, 2], [5, 5, 5, 8, 6, 2, 300]]
    requests = [ScoreRequest(text, len(text) // 2) for text in texts]
    wanted = []
    for request in requests:
        ids = torch.tensor(request.tokens)
        log_p_SV = model.logits(ids[:-1].unsqueeze(1))[:, 0].log_softmax(dim=-1)[-request.targets :]
        wanted.append(float(log_p_SV.gather(1, ids[-request.targets :].unsqueeze(1)).sum()))
    for batch in (1, 3):
        scores = TaskModel(model, mesh(1), config.parallel, tokenizer, frozenset(), batch).scores(requests)
        assert [score.log_probability for score in scores] == pytest.approx(wanted, rel=1e-6)
