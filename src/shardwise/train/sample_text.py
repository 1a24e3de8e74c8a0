"""The sample of a run: a short text that the trained model generates at the end (`log.sample_tokens`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shardwise.base.redaction import redacted
from shardwise.config import Config, ParallelConfig
from shardwise.data.formats.common import PreparedData
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed.mesh import Mesh
from shardwise.models.blocks import Stages
from shardwise.train.generation import Generator, Sampler, generate
from shardwise.train.saving import agree_to_stop

_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class SampleText:
    """The outcome of `draw_sample`.

    Attributes:
        text: a prompt and its continuation; None where there is none, and outside of replica 0.
        stopped_by: name of the request that stopped the run before the text was complete; None without one.
    """

    text: str | None = None
    stopped_by: str | None = None


def draw_sample(
    config: Config, model: nn.Module, mesh: Mesh, data: PreparedData, reason_to_stop: Callable[[], str | None]
) -> SampleText:
    """Let the trained model continue a prompt, until any rank is asked to stop; collective over the mesh.

    There is no text where `log.sample_tokens` is 0, without a tokenizer, and for a model that gives no logits of the
    next token. `reason_to_stop` returns this rank's reason to stop, or None.
    """
    log = config.log
    stopped_by = None
    if data.tokenizer_path is None or not log.sample_tokens:
        return SampleText()
    if not config.model.causal or not isinstance(model, Generator | Stages):
        return SampleText()

    def continues(*, is_complete: bool = False) -> bool:
        nonlocal stopped_by
        # One exchange after each token: a stop of any rank ends the text on all of them.
        stopped_by, is_complete = agree_to_stop(reason_to_stop(), mesh, is_complete)
        return stopped_by is None and not is_complete

    if mesh.dp.rank:  # replica 0 draws; the others only agree on whether to stop
        while continues():
            pass
        return SampleText(None, stopped_by)
    if not continues():
        return SampleText(None, stopped_by)
    tokenizer = Tokenizer.load(data.tokenizer_path)
    model.eval()
    if log.sample_prompt:
        ids = tokenizer.encode(log.sample_prompt).tolist()
    else:
        ids = data.beginning("eval" if data.count("eval") else "train", _PROMPT_TOKENS)
    window = config.train.sequence_length
    seed = config.train.seed
    drawn = continue_text(
        model, mesh, ids, log.sample_tokens, window=window, seed=seed, parallel=config.parallel, continues=continues
    )
    if stopped_by is not None:
        return SampleText(None, stopped_by)
    continues(is_complete=True)
    return SampleText(redacted(tokenizer.decode(ids + drawn)))  # the prompt of the configuration may hold a secret


def continue_text(
    model: Generator | Stages,
    mesh: Mesh,
    prompt: list[int],
    count: int,
    *,
    window: int,
    seed: int,
    temperature: float = 0.7,
    parallel: ParallelConfig | None = None,
    continues: Callable[[], bool] = lambda: True,
) -> list[int]:
    """`count` tokens drawn after `prompt`; collective over the ranks of one replica, which all return the same.

    Args:
        window: tokens that the model reads at most, as in its training; once they are full, it continues from the last
            half of them.
        parallel: how a model in pipeline stages is cut.
        continues: called after each token; once it returns False there are no more.
    """
    sampler = Sampler(temperature, seed=seed)
    tokens = list(prompt)
    context_length = window
    while len(tokens) < len(prompt) + count:
        context = tokens[-context_length:]
        # The model reads no token after the last one that it draws, so one more than the free places fits.
        new_tokens = min(len(prompt) + count - len(tokens), window - len(context) + 1)
        for token in generate(model, mesh, context, new_tokens, sampler, parallel=parallel):
            tokens.append(token)
            if not continues():
                return tokens[len(prompt) :]
        context_length = max(1, window // 2)
    return tokens[len(prompt) :]
