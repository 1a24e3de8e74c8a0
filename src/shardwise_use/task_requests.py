"""Requests of evaluation tasks, which a model at any layout answers: scores of tokens, and continuations of a prompt.

Rank 0 asks, and all ranks answer together: each data-parallel replica takes a part of the requests.

Shapes: S tokens of the longest request of a batch, B requests of a batch, R requests, H hidden, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from shardwise.base.errors import ConfigError
from shardwise.config import ParallelConfig
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.random_bits import hashed
from shardwise.layers.units import unit_roots
from shardwise.models.blocks import gives_losses
from shardwise.models.causal import CausalLM
from shardwise.pipeline.stages import Stages, relay
from shardwise_use.generation import GenerativeModel, TokenSampler, generate_tokens, token_by_token

_Result = TypeVar("_Result")
_NO_REQUESTS: Sequence[Any] = ()
_SEED = 1234  # seed of the tokens that a task wants to be drawn, with the request's number: a task may repeat a request


@dataclass(frozen=True)
class ScoreRequest:
    """A request of an evaluation task: ids of which the last `targets` are scored; the model reads all but the last."""

    tokens: Sequence[int]
    targets: int


class TokenScore(NamedTuple):
    """The score of a request of an evaluation task: the log-probability of its targets, and if each is likeliest."""

    log_probability: float
    is_likeliest: bool


@dataclass(frozen=True)
class TextRequest:
    """A request of an evaluation task: a prompt to continue, up to the first text of `until` that is complete."""

    prompt: Sequence[int]
    max_tokens: int
    until: Sequence[str]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(eq=False)
class TaskModel:
    """A causal model at any layout, without dropout, that answers requests of evaluation tasks."""

    model: nn.Module  # the whole model or this rank's stages
    mesh: Mesh
    parallel: ParallelConfig
    tokenizer: Tokenizer
    stop: frozenset[int]  # ids that end a continuation
    # Requests that a replica scores at once. It changes no score: padding follows the tokens, and a causal model does
    # not see what follows a token.
    batch: int
    in_step: bool = False  # True if all replicas must make the same passes, which gather their weights

    def __post_init__(self) -> None:
        self.in_step = self.in_step or self.mesh.passes_in_step

    def while_others_answer(self, work: Callable[[], _Result]) -> _Result | None:
        """Do some work on rank 0, whose requests all ranks answer, and return its result there. Collective."""
        world = self.mesh.world
        problems: list[str] = []
        result = None
        if world.rank == 0:
            try:
                result = work()
            except ConfigError as error:
                problems = error.problems
            collectives.broadcast_object(_NO_REQUESTS, world)
        else:
            while requests := collectives.broadcast_object(_NO_REQUESTS, world):
                self._answer(requests)
        collectives.raise_on_all_ranks(problems, world)
        return result

    def scores(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        """The scores of requests, in their order; called on rank 0 within `while_others_answer`."""
        return self._answer(collectives.broadcast_object(requests, self.mesh.world)) if requests else []

    def texts(self, requests: Sequence[TextRequest]) -> list[str]:
        """The continuations of prompts, in their order; called on rank 0 within `while_others_answer`.

        A continuation ends before the first text of `until` that is in it, and has no special tokens.
        """
        return self._answer(collectives.broadcast_object(requests, self.mesh.world)) if requests else []

    def _answer(self, requests: Sequence[Any]) -> list[Any]:
        # Requests have any length, and a compiled graph has one.
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            if isinstance(requests[0], ScoreRequest):
                return self._answer_scores(requests)
            return self._answer_texts(requests)

    def _answer_scores(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        mesh = self.mesh
        # Requests of about one length make a batch with little padding; the longest first, as they need most memory.
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
        batches = [order[first : first + self.batch] for first in range(0, len(order), self.batch)]
        count = len(range(mesh.replicas.rank, len(batches), mesh.replicas.size))
        if self.in_step:
            # A replica that has none of the last batches makes a pass of the first one, whose scores do not count.
            batches += batches[:1] * (-len(batches) % mesh.replicas.size)
        batches = batches[mesh.replicas.rank :: mesh.replicas.size]
        # A rank without the last stage, and without a request, adds 0.
        scores_R2 = torch.zeros(len(requests), 2, dtype=torch.float64, device="cpu")

        def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
            batch = _Batch.of([requests[row] for row in batches[number]], mesh)
            if isinstance(part, CausalLM):
                out = part.hidden(batch.ids_SB, x=x, lengths_B=batch.lengths_B)
                if not part.part.is_last:
                    return out
                log_p_N, likeliest_N = part.lm_head.scores(out[batch.places_N, batch.columns_N], batch.targets_N)
            else:
                assert isinstance(part, GenerativeModel), "the caller has refused other models"
                # A model of the user's own may cut the sequence into equal parts.
                padding = -len(batch.ids_SB) % mesh.tp.size
                out = part.logits(pad(batch.ids_SB, (0, 0, 0, padding)), *([] if x is None else [x]))
                if not gives_losses(part):
                    return out
                out = out[batch.places_N, batch.columns_N].float()
                log_p_N = out.log_softmax(dim=-1).gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
                likeliest_N = out.argmax(dim=-1)
            # One transfer of each kind; the sums are the host's, so that their order is the same on any device.
            columns_N = batch.columns_N.cpu()
            terms_N2 = torch.stack((log_p_N, (likeliest_N != batch.targets_N).float()), dim=1).cpu().double()
            zeros_B2 = torch.zeros(len(batches[number]), 2, dtype=torch.float64, device="cpu")
            if number < count:
                scores_R2[batches[number]] = zeros_B2.index_add(0, columns_N, terms_N2)
            return out

        parts = 1 if isinstance(unit_roots(self.model)[0], CausalLM) else mesh.tp.size
        shapes = [(-(-(len(requests[batch[0]].tokens) - 1) // parts) * parts, len(batch)) for batch in batches]
        with token_by_token(self.model):
            relay(self.model, self.parallel, mesh, compute, shapes)
        sums_R2 = devices.to_device(scores_R2.to(devices.widest_dtype(mesh.device)), mesh.device)
        sums = collectives.all_reduce_(collectives.all_reduce_(sums_R2, mesh.replicas), mesh.pp).tolist()
        return [TokenScore(log_probability, misses == 0) for log_probability, misses in sums]

    def _answer_texts(self, requests: Sequence[TextRequest]) -> list[str]:
        if self.in_step:
            # Continuations have different lengths: each replica draws all of them.
            return [self._continue(request, number) for number, request in enumerate(requests)]
        replicas = self.mesh.replicas
        numbers = range(replicas.rank, len(requests), replicas.size)
        local = [self._continue(requests[number], number) for number in numbers]
        by_replica = collectives.all_gather_objects(local, replicas)
        return [by_replica[number % replicas.size][number // replicas.size] for number in range(len(requests))]

    def _continue(self, request: TextRequest, number: int) -> str:
        assert isinstance(self.model, GenerativeModel | Stages), "the caller has refused other models"
        sampler = TokenSampler(request.temperature, request.top_p, hashed(_SEED, number), top_k=request.top_k)
        tokens: list[int] = []
        for token in generate_tokens(
            self.model, self.mesh, request.prompt, request.max_tokens, sampler, stop=self.stop, parallel=self.parallel
        ):
            tokens.append(token)
            text = self.tokenizer.decode(tokens)
            if any(ending in text for ending in request.until):
                break
        text = self.tokenizer.decode(tokens, skips_special=True)
        for ending in request.until:
            text = text.split(ending)[0]
        return text


@dataclass(frozen=True)
class _Batch:
    """Requests that go through the model together.

    places_N, columns_N: place in the sequence, and column, of each token that a target follows.
    """

    ids_SB: Tensor  # tokens that the model reads, padded at the end
    lengths_B: Tensor  # tokens of each request before its padding
    places_N: Tensor
    columns_N: Tensor
    targets_N: Tensor  # the targets

    @staticmethod
    def of(requests: Sequence[ScoreRequest], mesh: Mesh) -> _Batch:
        texts = [torch.tensor(request.tokens, device="cpu") for request in requests]
        lengths = [len(text) - 1 for text in texts]
        targets = [text[-request.targets :] for text, request in zip(texts, requests, strict=True)]
        places = [torch.arange(end - len(part), end) for end, part in zip(lengths, targets, strict=True)]
        columns = [torch.full((len(part),), column) for column, part in enumerate(targets)]
        host = (
            pad_sequence([text[:-1] for text in texts]),
            torch.tensor(lengths, device="cpu"),
            *(torch.cat(parts) for parts in (places, columns, targets)),
        )
        return _Batch(*(devices.to_device(tensor, mesh.device) for tensor in host))
