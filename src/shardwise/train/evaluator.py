"""The evaluations of a training: of the held-out part, of further texts, and on tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout
from shardwise.data.samples.batch import Batches
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed.mesh import Mesh
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.evaluation import Evaluation, evaluate_rounds
from shardwise.train.feed import Feed
from shardwise.train.loss import perplexity
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import Progress


class Evaluator:
    """Evaluates the model of a training on its texts and tasks. All methods are collective.

    Args:
        feed: micro-batches of the texts.
        tokenizer_path: folder of the data's tokenizer, which tasks need; None if it is not known.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: Mesh,
        model: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        feed: Feed,
        progress: Progress,
        reporter: Reporter | None,
        tokenizer_path: Path | None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        self._feed = feed
        self._progress = progress
        self._reporter = reporter
        self._tokenizer_path = tokenizer_path

    def held_out(self) -> tuple[float, float]:
        """Mean loss and perplexity over the first `eval_batches` global batches of the evaluation part, on every rank.

        The loss is the sum over the objectives; the perplexity is that of the first, which predicts tokens.
        """
        batches = self._feed.evaluation_batches
        assert batches is not None, "where train.eval_every asks for evaluations, data without them are refused"
        self._begin("evaluation")
        result = self._evaluate(batches)
        token_perplexity = perplexity(result.losses[batches.objectives[0]])
        if self._reporter is not None:
            losses = result.losses if len(result.losses) > 1 else {}
            self._reporter.evaluation(self._progress.step, result.loss, token_perplexity, losses)
        return result.loss, token_perplexity

    def texts(self, *_: object) -> None:
        """Evaluate the held-out part, and each of `evaluation.sets`."""
        if self._config.evaluates_held_out:
            self.held_out()
        self._begin("evaluation")
        sets = self._feed.sets
        for name, batches in sets.batches.items():
            result = self._evaluate(batches, sets.bytes_V)
            if self._reporter is not None:
                self._reporter.evaluation_set(self._progress.step, name, result)

    def before_steps(self) -> None:
        """Evaluate the texts before the first step."""
        if self._reporter is not None:
            self._reporter.before_steps("evaluation before the first step")
        self.texts()
        if self._reporter is not None:
            self._reporter.before_steps("first step under way")

    def tasks(self, *_: object) -> None:
        """Score `evaluation.tasks`."""
        # It imports lm_eval, an extra.
        from shardwise.train.task_evaluation import evaluate_tasks

        assert self._tokenizer_path is not None, "tasks without a tokenizer are refused before a run starts"
        self._begin("evaluation on tasks")
        tokenizer = Tokenizer.load(self._tokenizer_path)
        stop = frozenset(() if tokenizer.end_of_document_id is None else (tokenizer.end_of_document_id,))
        optimizer = self._optimizer
        results = None
        with optimizer.gathered(all_units=False):
            try:
                results = evaluate_tasks(
                    self._config, self._model.eval(), self._mesh, tokenizer, stop, in_step=optimizer.gathers_in_passes
                )
            except ConfigError as error:
                # A document that cannot be scored must not end a training.
                if self._reporter is not None:
                    self._reporter.warning(f"evaluation.tasks have no scores at step {self._progress.step}: {error}")
        self._model.train()
        if results is not None and self._reporter is not None:
            self._reporter.tasks(self._progress.step, results["results"])

    def _begin(self, phase: str) -> None:
        self._progress.phase = phase
        # New parameters may still be under way.
        self._optimizer.gathers.wait()

    def _evaluate(self, batches: Batches, bytes_V: npt.NDArray[np.int64] | None = None) -> Evaluation:
        """Evaluate the first `eval_batches` global batches of a text."""
        rounds = self._feed.evaluation(batches, self._layout.accumulation(self._config.train))
        with self._optimizer.gathered(all_units=False):
            result = evaluate_rounds(
                self._model, rounds, batches.objectives, self._mesh, self._config.parallel, bytes_V=bytes_V
            )
        self._model.train()
        return result
