"""Generation of text by a causal language model, token by token, at any layout.

`generate_tokens` yields tokens, a `TokenSampler` draws each from the logits, and a `_Detokenizer` makes text of them.

Legend, per rank: S tokens read at once, V vocabulary.

A run ends with a sample: a short text that the trained model generates (`log.sample_tokens`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, RunError
from shardwise.base.redaction import redacted
from shardwise.config import Config, ParallelConfig
from shardwise.data.formats.prepared_data import PreparedData
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.layers.units import unit_roots
from shardwise.models.blocks import KeyValueCache, gives_losses
from shardwise.models.causal import CausalLM
from shardwise.pipeline.partition import pipeline_rank_of
from shardwise.pipeline.stages import Stages, relay
from shardwise.train.rank_agreement import agree_to_stop

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are read at once: this bounds the memory of their activations."""


@runtime_checkable
class GenerativeModel(Protocol):
    """A causal language model that generates text; a user's own model needs no other method."""

    def logits(self, ids_SB: Tensor, *x: Tensor) -> Tensor:
        """Token ids `[S, B]` → `[S, B, V]`, on every rank; x is the output of an earlier pipeline stage."""
        ...


def generate_tokens(
    model: GenerativeModel | Stages,
    mesh: Mesh,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: TokenSampler,
    *,
    stop: Collection[int] = (),
    chunk: int = PREFILL_CHUNK,
    parallel: ParallelConfig | None = None,
    reader: TokenReader | None = None,
) -> Iterator[int]:
    """Yield tokens that follow `prompt`: `max_tokens`, or up to the first that is in `stop`, which is included.

    Collective over the tensor- and pipeline-parallel ranks, which all get the same tokens: the first tensor-parallel
    rank of the last stage draws them, that of replica 0 where replicas make their passes in step. The model reads the
    prompt once, `chunk` tokens at a time, and then each new token; a `KeyValueCache` has room for the prompt and
    `max_tokens`. A model of the user's own, which has no cache, reads all tokens again for each new one.

    Args:
        chunk: tokens of the prompt that are read at once.
        parallel: settings by which a model is cut into pipeline stages; None for a whole model.
        reader: the reader of the model, which knows the tokens of earlier calls; None for a new one.
    """
    if max_tokens < 1:
        return
    assert prompt, "there is nothing to continue"
    tokens = list(prompt)
    if reader is None:
        # One less, as the model never reads the last token.
        reader = open_token_reader(model, mesh, len(tokens) + max_tokens - 1, chunk=chunk, parallel=parallel)
    # The pipeline rank of the last stage, which has the logits.
    source = 0 if parallel is None else pipeline_rank_of(parallel, parallel.pipeline * parallel.stages_per_rank - 1)
    for _ in range(max_tokens):
        logits_V = reader.next_logits(tokens)
        token = 0 if logits_V is None else sampler.draw(logits_V)
        if mesh.pp.size * mesh.tp.size > 1 or mesh.passes_in_step:
            drawn = devices.to_device(torch.tensor([token], device="cpu"), mesh.device)
            drawn = collectives.broadcast_(collectives.broadcast_(drawn, mesh.pp, source=source), mesh.tp)
            # Replicas that meet in each pass must not draw texts of other lengths: their logits may differ in a bit.
            token = int(collectives.broadcast_(drawn, mesh.replicas) if mesh.passes_in_step else drawn)
        tokens.append(token)
        yield token
        if token in stop:
            return


class TokenReader(Protocol):
    """Reads tokens by a model that generates text, on each rank."""

    def next_logits(self, tokens: list[int]) -> Tensor | None:
        """Logits `[V]` of the token that follows `tokens`; None on a rank that lacks the last stage."""
        ...


def open_token_reader(
    model: GenerativeModel | Stages,
    mesh: Mesh,
    room: int,
    *,
    chunk: int = PREFILL_CHUNK,
    parallel: ParallelConfig | None = None,
) -> TokenReader:
    """The reader of a model that generates text, with a cache for `room` tokens if possible."""
    module = cast(nn.Module, model)
    if isinstance(unit_roots(module)[0], CausalLM):
        return _Cached(module, mesh, room, chunk, parallel)
    return _Uncached(module, mesh, parallel)


class _Cached:
    """Reads only tokens that it does not know; each stage of a pipeline keeps the keys and values of its own blocks."""

    def __init__(self, model: nn.Module, mesh: Mesh, room: int, chunk: int, parallel: ParallelConfig | None) -> None:
        self._model = model
        self._mesh = mesh
        self._chunk = chunk
        self._parallel = parallel
        self._caches = {part: KeyValueCache(room) for part in unit_roots(model)}
        self._known: list[int] = []

    def next_logits(self, tokens: list[int]) -> Tensor | None:
        part, cache = next(iter(self._caches.items()))
        assert isinstance(part, CausalLM), "only a causal model continues a text"
        # Some rotations change with the length of the text: the keys in the caches are then of another length.
        is_outdated = part.outdates(len(self._known), len(tokens))
        known = 0 if is_outdated else _common_length(self._known, tokens[:-1])
        if known < len(self._known) and part.forgets(len(self._known)):
            known = 0
        for kept in self._caches.values():
            kept.length = known
        self._known = list(tokens)
        new = devices.to_device(torch.tensor(tokens[cache.length :], device="cpu"), self._mesh.device).unsqueeze(1)
        # Where keys change with the length, all must be computed in one pass.
        chunks = new.split(len(new) if part.outdates(1, len(tokens)) else self._chunk)
        logits_BV: Tensor | None = None

        def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
            nonlocal logits_BV
            assert isinstance(part, CausalLM), "only a causal model continues a text"
            out = part.next_logits(chunks[number], self._caches[part], x)
            if part.part.is_last:
                logits_BV = out
            return out

        with token_by_token(self._model):
            relay(self._model, self._parallel, self._mesh, compute, [(len(ids), 1) for ids in chunks])
        return None if logits_BV is None else logits_BV[0].float()


def _common_length(known: list[int], tokens: list[int]) -> int:
    # The usual case: one text continues the other.
    if tokens[: len(known)] == known:
        return len(known)
    return next((place for place, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(tokens))


class _Uncached:
    def __init__(self, model: nn.Module, mesh: Mesh, parallel: ParallelConfig | None = None) -> None:
        self._model = model
        self._mesh = mesh
        self._parallel = parallel

    def next_logits(self, tokens: list[int]) -> Tensor | None:
        # Sequence parallelism needs equal parts. A causal model does not see what follows a token.
        padding = [0] * (-len(tokens) % self._mesh.tp.size)
        ids_S = devices.to_device(torch.tensor(tokens + padding, device="cpu"), self._mesh.device)
        logits_SBV: Tensor | None = None

        def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
            nonlocal logits_SBV
            assert isinstance(part, GenerativeModel), "the caller has refused other models"
            out = part.logits(ids_S.unsqueeze(1), *([] if x is None else [x]))
            logits_SBV = out if gives_losses(part) else None
            return out

        length = len(ids_S) // (self._mesh.tp.size if self._parallel and self._parallel.sequence else 1)
        # Each length would be compiled for one token.
        with torch.compiler.set_stance("force_eager"):
            relay(self._model, self._parallel, self._mesh, compute, [(length, 1)])
        return None if logits_SBV is None else logits_SBV[len(tokens) - 1, 0].float()


@contextmanager
def token_by_token(model: nn.Module) -> Iterator[None]:
    """Generate text with a trained model inside, token by token: sequence and context parallelism cannot cut one."""
    switches = [
        (module, name)
        for module in model.modules()
        for name in ("sequence_parallel_enabled", "shares_samples")
        if getattr(module, name, False)
    ]
    try:
        for module, name in switches:
            setattr(module, name, False)
        yield
    finally:
        for module, name in switches:
            setattr(module, name, True)


class TokenSampler:
    """Draws tokens from `softmax(logits / temperature)`, cut to the likeliest.

    A draw is `argmax(log p + g)`, where g has one number from a Gumbel distribution for each token of the vocabulary
    (Maddison et al. 2014, arXiv:1411.0030, section 2). Two layouts whose logits differ in the last bits draw the same
    token unless the two largest sums differ by as little. In a draw by cumulated probabilities the rounding errors of
    all tokens would add up.

    Args:
        temperature: at 0 the likeliest token is taken, and no number is drawn.
        top_p: only the likeliest tokens are kept: the fewest whose probabilities reach this sum (nucleus sampling,
            arXiv:1904.09751).
        top_k: only this many of the likeliest tokens are kept, before `top_p`; 0: all.
        seed: tokens are a function of (seed, logits so far), on any device.

    Raises:
        ConfigError: a temperature below 0, or a top_p outside of (0, 1].
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, *, top_k: int = 0) -> None:
        problems = []
        if not 0 <= temperature < math.inf:
            problems.append(f"the temperature ({temperature}) must be at least 0 and finite; at 0 nothing is random")
        if not 0 < top_p <= 1:
            problems.append(f"top-p ({top_p}) must be above 0 and at most 1; at 1 every token may come")
        if problems:
            raise ConfigError(problems)
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logits_V: Tensor) -> int:
        """The next token's id; RunError: some logits are NaN."""
        # The one wait for the device. On the CPU a seed gives the same numbers for a model on any device.
        logits_V = logits_V.detach().cpu()
        if torch.isnan(logits_V).any():
            raise RunError("the logits of the next token must be numbers, and some are NaN: the weights are damaged")
        if self.temperature == 0:
            return int(logits_V.argmax())
        scaled_V = logits_V.double() / self.temperature
        if 0 < self.top_k < len(scaled_V):
            scaled_V = scaled_V.masked_fill(scaled_V < scaled_V.topk(self.top_k).values[-1], float("-inf"))
        log_p_V = torch.log_softmax(scaled_V, dim=0)
        if self.top_p < 1:
            log_p_V = self._likeliest(log_p_V)
        # -log(-log(u)) has a Gumbel distribution where u is uniform.
        uniform_V = torch.rand(len(log_p_V), generator=self._generator, dtype=torch.float64, device="cpu")
        return int((log_p_V - torch.log(-torch.log(uniform_V))).argmax())

    def _likeliest(self, log_p_V: Tensor) -> Tensor:
        """Log probabilities in which all but the fewest likeliest tokens that reach `top_p` are minus infinity."""
        sorted_V, order_V = log_p_V.sort(descending=True, stable=True)
        before_V = sorted_V.exp().cumsum(0) - sorted_V.exp()
        left_out_V = before_V >= self.top_p
        # The likeliest token stays, also where a tiny `top_p` is below the rounding of the sum before it.
        left_out_V[0] = False
        return log_p_V.index_fill(0, order_V[left_out_V], float("-inf"))


_UNFINISHED = "\ufffd"  # the character that a tokenizer writes in place of bytes that are no whole character
_CONTEXT = 8  # tokens that are decoded together: a character of UTF-8 has at most 4 bytes, so at most 4 tokens


class _Detokenizer:
    """The text that tokens add to a prompt, piece by piece.

    A character whose bytes lie in several tokens is shown with the last of them. The text of a token may depend on the
    one before (a leading space): so the last few tokens are decoded together, and a piece is what their text gained.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """The text that is complete with one more token; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_UNFINISHED) or len(text) <= len(self._shown):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """The text that was not shown yet, complete or not."""
        return self._show(self._tokenizer.decode(self._ids))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._ids = self._ids[-_CONTEXT:]
        self._shown = self._tokenizer.decode(self._ids)
        return piece


@dataclass(frozen=True)
class Prompt:
    """A text to continue, with the settings of the continuation."""

    ids: Sequence[int]
    max_tokens: int
    stop: Collection[int]
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt."""

    text: str  # the new text, without the token that ends it
    tokens: tuple[int, ...]  # all new ids, with the one that ends the text
    # `eos` if an id of `Prompt.stop` ended the text, `stopped` if somebody did, else `max_tokens`.
    end: Literal["eos", "stopped", "max_tokens"]
    prefill_seconds: float
    decode_seconds: float


def answer_prompt(
    model: GenerativeModel | Stages,
    mesh: Mesh,
    prompt: Prompt,
    tokenizer: Tokenizer,
    write: Callable[[str], None],
    *,
    parallel: ParallelConfig | None = None,
    reader: TokenReader | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Continuation:
    """Continue a prompt as `generate_tokens` does; `write` gets each piece of text at once.

    is_stopped: called after each token, on all ranks; True ends the continuation.
    """
    sampler = TokenSampler(prompt.temperature, prompt.top_p, prompt.seed)
    detokenizer = _Detokenizer(tokenizer, prompt.ids)
    pieces: list[str] = []
    tokens: list[int] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        write(piece)

    end: Literal["eos", "stopped", "max_tokens"] = "max_tokens"
    start = time.perf_counter()
    first = start
    drawn = generate_tokens(
        model, mesh, prompt.ids, prompt.max_tokens, sampler, stop=prompt.stop, parallel=parallel, reader=reader
    )
    for token in drawn:
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        if token in prompt.stop:
            end = "eos"
            break
        show(detokenizer.push(token))
        if is_stopped():
            end = "stopped"
            break
    decode_seconds = time.perf_counter() - first
    show(detokenizer.finish())
    return Continuation("".join(pieces), tuple(tokens), end, first - start, decode_seconds)


_PROMPT_TOKENS = 16  # tokens of the data that a sample continues, where no prompt is given


@dataclass(frozen=True)
class _SampleText:
    """The outcome of `draw_sample`.

    `stopped_by`: name of the request that stopped the run before the text was complete; None without one.
    """

    text: str | None = None  # a prompt and its continuation; None where there is none, and outside of replica 0
    stopped_by: str | None = None


def draw_sample(
    config: Config,
    model: nn.Module,
    mesh: Mesh,
    data: PreparedData,
    reason_to_stop: Callable[[], str | None],
    *,
    in_step: bool = False,
) -> _SampleText:
    """Generate a sample text from a prompt in a training, until any rank is asked to stop; collective over the mesh.

    There is no text where `log.sample_tokens` is 0, without a tokenizer, and for a model that gives no logits of the
    next token. `reason_to_stop` returns this rank's reason to stop, or None. `in_step`: all replicas must make the same
    passes, so that all draw the text, which replica 0 returns.
    """
    log = config.log
    stopped_by = None
    if data.tokenizer_path is None or not log.sample_tokens:
        return _SampleText()
    if not config.model.causal or not isinstance(model, GenerativeModel | Stages):
        return _SampleText()

    def continues(*, is_complete: bool = False) -> bool:
        nonlocal stopped_by
        # One exchange after each token: a stop of any rank ends the text on all of them.
        stopped_by, is_complete = agree_to_stop(reason_to_stop(), mesh, is_complete)
        return stopped_by is None and not is_complete

    # Replica 0 draws. The others only agree with it on when to stop, as often as it asks: once a token.
    if mesh.replicas.rank and not in_step:
        while continues():
            pass
        return _SampleText(None, stopped_by)
    if not continues():
        return _SampleText(None, stopped_by)
    tokenizer = Tokenizer.load(data.tokenizer_path)
    model.eval()
    if log.sample_prompt:
        ids = tokenizer.encode(log.sample_prompt).tolist()
    else:
        ids = data.beginning("eval" if data.count("eval") else "train", _PROMPT_TOKENS)
    window = config.train.sequence_length
    seed = config.train.seed
    drawn = _continue_text(
        model, mesh, ids, log.sample_tokens, window=window, seed=seed, parallel=config.parallel, continues=continues
    )
    if stopped_by is not None:
        return _SampleText(None, stopped_by)
    # The other replicas wait for this last answer.
    continues(is_complete=True)
    # The prompt of the configuration may hold a secret.
    return _SampleText(None if mesh.replicas.rank else redacted(tokenizer.decode(ids + drawn)))


def _continue_text(
    model: GenerativeModel | Stages,
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

    The model reads at most `window` tokens, as in its training: once they are full, it continues from the last half of
    them. `continues` is called after each token; once it returns False there are no more.
    """
    sampler = TokenSampler(temperature, seed=seed)
    tokens = list(prompt)
    context_length = window
    while len(tokens) < len(prompt) + count:
        context = tokens[-context_length:]
        # The model reads no token after the last one that it draws, so one more than the free places fits.
        new_tokens = min(len(prompt) + count - len(tokens), window - len(context) + 1)
        for token in generate_tokens(model, mesh, context, new_tokens, sampler, parallel=parallel):
            tokens.append(token)
            if not continues():
                return tokens[len(prompt) :]
        context_length = max(1, window // 2)
    return tokens[len(prompt) :]
