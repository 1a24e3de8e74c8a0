"""Tasks of EleutherAI's `lm_eval`, scored by a model at any layout.

Contexts, continuations and windows are cut as `lm_eval --model hf` cuts them, so that scores are equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance  # type: ignore[import-untyped]
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED  # type: ignore[import-untyped]
from lm_eval.evaluator import evaluate  # type: ignore[import-untyped]
from lm_eval.models.utils import has_bos_prefix  # type: ignore[import-untyped]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.config import Config
from shardwise.data.evaluation_tasks import ContinuationSettings, find_tasks, longest_task_input, quiet_lm_eval
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed.mesh import Mesh
from shardwise.pipeline.stages import Stages
from shardwise_use.generation import GenerativeModel
from shardwise_use.task_requests import ScoreRequest, TaskModel, TextRequest

BOOTSTRAPS = 100_000
"""The number of resamples of `lm_eval`."""


class _ShardedLM(TemplateLM):  # type: ignore[misc]
    """A model as `lm_eval` calls it, on rank 0."""

    def __init__(self, model: TaskModel, longest: int) -> None:
        super().__init__()
        self._model = model
        self._longest = longest
        self._tokenizer = model.tokenizer

    @property
    def eot_token_id(self) -> int | None:
        return self._tokenizer.end_of_document_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the begin of a text, else the end of the one before."""
        begin = self._tokenizer.begin_of_document
        prefix = self.eot_token_id if begin is None else self._tokenizer.token_id(begin)
        if prefix is None:
            raise ConfigError(
                "the tokenizer must have a token that begins or ends a text, which a text without context is scored "
                "after, and it has none: name one as bos_token or eos_token in its tokenizer_config.json"
            )
        return prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        if add_special_tokens is None:
            # A text that begins with the token already gets no second one.
            add_special_tokens = not has_bos_prefix(string, self._tokenizer.token_of(self.prefix_token_id))
        return self._tokenizer.encode_prompt(string) if add_special_tokens else self._tokenizer.encode(string).tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for request in requests:
            if not any(request.args):
                self._require_scorable(request.args, [], [])
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: object) -> list[Any]:
        for texts, context, targets in requests:
            self._require_scorable(texts, context, targets)
        return self._model.scores([self._request(context, targets) for _, context, targets in requests])

    def _require_scorable(self, texts: tuple[str, str], context: list[int], targets: list[int]) -> None:
        """Refuse what `--model hf` refuses: its score would be that of other tokens."""
        if context and 0 < len(targets) <= self._longest:
            return
        raise ConfigError(
            f"a continuation in evaluation.tasks ({len(targets)} tokens: {texts[1][:40]!r}) must have at least 1 token "
            f"and at most as many as the model reads ({self._longest:,}), after at least 1 token ({len(context)} "
            f"tokens: {texts[0][-40:]!r}): leave its document or its task out"
        )

    def _request(self, context: list[int], targets: list[int]) -> ScoreRequest:
        # What the model cannot read is cut off at the left; the last token is only predicted.
        return ScoreRequest((context + targets)[-(self._longest + 1) :], len(targets))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows that predict each token once."""
        counts = []
        windows: list[ScoreRequest] = []
        for request in requests:
            (text,) = request.args
            pairs = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self._longest, context_len=1
                )
            ]
            counts.append(len(pairs))
            windows += [self._request(*pair) for pair in pairs]
        scores = iter(self._model.scores(windows))
        return [sum(next(scores).log_probability for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._model.texts([self._text_request(*request.args) for request in requests])

    def _text_request(self, context: str, generation_kwargs: dict[str, Any]) -> TextRequest:
        settings = ContinuationSettings.of(generation_kwargs)
        # The prompt leaves room for all new tokens.
        prompt = self.tok_encode(context)[-(self._longest - settings.max_tokens) :] or [self.prefix_token_id]
        sampling = (settings.temperature, settings.top_p, settings.top_k)
        return TextRequest(prompt, settings.max_tokens, settings.until, *sampling)


def evaluate_tasks(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    tokenizer: Tokenizer,
    stop: frozenset[int],
    *,
    bootstraps: int = 0,
    in_step: bool = False,
) -> dict[str, Any] | None:
    """Score a model without dropout (`eval`) on `evaluation.tasks`. Collective.

    Args:
        in_step: True if all replicas of the model must make the same passes (`TaskModel`).
        bootstraps: resamples for the standard errors of metrics that have no formula for it; 0: no standard errors.

    Returns:
        The results, as `lm_eval` returns them; None on all ranks but 0.

    Raises:
        ConfigError: the model does not predict the next token; a task cannot be found, or needs something else.
    """
    family = config.model
    if not family.causal or not isinstance(model, GenerativeModel | Stages):
        raise ConfigError(
            f"model.family ({family.family}) must be a causal language model with evaluation.tasks, which need logits "
            "of the next token"
        )
    batch = config.train.micro_batch
    answering = TaskModel(model, mesh, config.parallel, tokenizer, stop, batch, in_step=in_step)
    settings = config.evaluation

    def score() -> dict[str, Any]:
        with _own_random_numbers(), quiet_lm_eval():
            tasks = find_tasks(settings).load(list(settings.tasks))
            for task in tasks["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            results: dict[str, Any] = evaluate(
                _ShardedLM(answering, longest_task_input(config.model, config.train)),
                tasks,
                limit=settings.limit,
                bootstrap_iters=bootstraps,
                log_samples=False,
            )
        return results

    return answering.while_others_answer(score)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Give tasks the seeds that `lm_eval` gives them, and this process its random numbers back."""
    python = random.getstate()
    arrays = np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(DEFAULT_OTHER_SEED)
        yield
    random.setstate(python)
    np.random.set_state(arrays)
