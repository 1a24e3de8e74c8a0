"""The evaluations of a training: of the held-out part, of further texts, and on tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.base.errors import ConfigError
from shardwise.base.registered import provided
from shardwise.data import Tokenizer
from shardwise.data.samples.batch import Batches
from shardwise.train.evaluation_losses import EvaluationLosses, evaluate_rounds
from shardwise.train.mean_loss import perplexity
from shardwise.train.reporter import Reporter
from shardwise.train.training import Training


@dataclass(eq=False, repr=False)
class Evaluator:
    """Evaluates the model of a training on its texts and tasks. All methods are collective."""

    training: Training
    reporter: Reporter | None = None
    tokenizer_path: Path | None = None

    def held_out(self) -> tuple[float, float]:
        """Mean loss and perplexity over the first `eval_batches` global batches of the evaluation part, on every rank.

        The loss is the sum over the objectives; the perplexity is that of the first, which predicts tokens.
        """
        batches = self.training.feed.evaluation_batches
        assert batches is not None, "where train.eval_every asks for evaluations, data without them are refused"
        self._begin("evaluation")
        result = self._evaluate(batches)
        if self.reporter is not None:
            self.reporter.evaluation(self.training.progress.step, result)
        return result.loss, perplexity(result.losses[batches.objectives[0]])

    def texts(self) -> None:
        """Evaluate the held-out part, and each of `evaluation.sets`."""
        if self.training.config.evaluates_held_out:
            self.held_out()
        self._begin("evaluation")
        sets = self.training.feed.sets
        for name, batches in sets.batches.items():
            result = self._evaluate(batches, sets.bytes_V)
            if self.reporter is not None:
                self.reporter.evaluation(self.training.progress.step, result, name)

    def before_steps(self) -> None:
        """Evaluate the texts before the first step."""
        if self.reporter is not None:
            self.reporter.before_steps("evaluation before the first step")
        self.texts()
        if self.reporter is not None:
            self.reporter.before_steps("first step under way")

    def tasks(self) -> None:
        """Score `evaluation.tasks`."""
        assert self.tokenizer_path is not None, "tasks without a tokenizer are refused before a run starts"
        self._begin("evaluation on tasks")
        training = self.training
        optimizer = training.optimizer
        tokenizer = Tokenizer.load(self.tokenizer_path)
        stop = frozenset(() if tokenizer.end_of_document_id is None else (tokenizer.end_of_document_id,))
        model = training.model.eval()
        results = None
        with optimizer.gathered(all_units=False):
            try:
                results = provided("evaluate_tasks")(
                    training.config, model, training.mesh, tokenizer, stop, in_step=optimizer.gathers_in_passes
                )
            except ConfigError as error:
                # A document that cannot be scored must not end a training.
                if self.reporter is not None:
                    self.reporter.warning(f"evaluation.tasks have no scores at step {training.progress.step}: {error}")
        model.train()
        if results is not None and self.reporter is not None:
            self.reporter.tasks(training.progress.step, results["results"])

    def _begin(self, phase: str) -> None:
        self.training.progress.phase = phase
        # New parameters may still be under way.
        self.training.optimizer.gathers.wait()

    def _evaluate(self, batches: Batches, bytes_V: npt.NDArray[np.int64] | None = None) -> EvaluationLosses:
        training = self.training
        config = training.config
        rounds = training.feed.evaluation(batches, training.layout.accumulation(config.train))
        with training.optimizer.gathered(all_units=False):
            result = evaluate_rounds(
                training.model, rounds, batches.objectives, training.mesh, config.parallel, bytes_V=bytes_V
            )
        training.model.train()
        return result
