"""Draws text from a causal language model, token by token, at any layout.

Legend, per rank: S tokens read at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.config import ParallelConfig
from shardwise.device import to_device
from shardwise.inference.sampling import Sampler
from shardwise.mesh import Mesh
from shardwise.models import CausalLM, Stages
from shardwise.models.cache import KeyValueCache
from shardwise.pipeline import relay
from shardwise.plan.stage import rank_of

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are read at once: it bounds the memory of their activations."""


@runtime_checkable
class Generator(Protocol):
    """A causal language model; of a model of the user's own no more is required."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        """Token ids `[S, B]` → `[S, B, V]`, on every rank."""
        ...


def generate(
    model: Generator | Stages,
    mesh: Mesh,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    *,
    stop: Collection[int] = (),
    chunk: int = PREFILL_CHUNK,
    parallel: ParallelConfig | None = None,
) -> Iterator[int]:
    """Yield tokens that follow `prompt`: `max_tokens`, or up to the first that is in `stop`, which is included.

    Collective over the tensor- and pipeline-parallel ranks, which all get the same tokens: the first tensor-parallel
    rank of the last stage draws them. The model reads the prompt once, `chunk` tokens at a time, and then each new
    token; a `KeyValueCache` has room for the prompt and `max_tokens`. A model of the user's own, which has no cache,
    reads all tokens again for each new one.

    Args:
        chunk: tokens of the prompt that are read at once.
        parallel: how a model in pipeline stages is cut.
    """
    if max_tokens < 1:
        return
    assert prompt, "there is nothing to continue"
    tokens = list(prompt)
    reader: _Cached | _Uncached
    if isinstance(model, CausalLM | Stages):
        room = len(tokens) + max_tokens - 1  # the model never reads the last token
        reader = _Cached(model, mesh, room, chunk, parallel)
    else:
        reader = _Uncached(model, mesh)
    source = 0 if parallel is None else rank_of(parallel, parallel.pipeline * parallel.stages_per_rank - 1)
    for _ in range(max_tokens):
        logits_V = reader.next_logits(tokens)
        token = 0 if logits_V is None else sampler.draw(logits_V)
        if mesh.pp.size * mesh.tp.size > 1:
            drawn = to_device(torch.tensor([token], device="cpu"), mesh.device)
            token = int(comm.broadcast_(comm.broadcast_(drawn, mesh.pp, source=source), mesh.tp))
        tokens.append(token)
        yield token
        if token in stop:
            return


class _Cached:
    """Reads only new tokens; each stage of a pipeline keeps the keys and values of its own blocks."""

    def __init__(
        self, model: CausalLM[Any] | Stages, mesh: Mesh, room: int, chunk: int, parallel: ParallelConfig | None
    ) -> None:
        self._model, self._mesh, self._chunk, self._parallel = model, mesh, chunk, parallel
        parts = model if isinstance(model, Stages) else [model]
        self._caches = {part: KeyValueCache(room) for part in parts}

    def next_logits(self, tokens: list[int]) -> Tensor | None:
        """Logits `[V]` of the token that follows; None on a rank that lacks the last stage."""
        (part, cache), *_ = self._caches.items()
        assert isinstance(part, CausalLM), "only a causal model continues a text"
        if part.outdates(cache.length, len(tokens)):
            for outdated in self._caches.values():
                outdated.length = 0
        new = to_device(torch.tensor(tokens[cache.length :], device="cpu"), self._mesh.device).unsqueeze(1)
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

        with _whole_sequences(self._model):
            relay(self._model, self._parallel, self._mesh, compute, [(len(ids), 1) for ids in chunks])
        return None if logits_BV is None else logits_BV[0].float()


class _Uncached:
    """Reads all tokens again for each new one."""

    def __init__(self, model: Generator, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh

    @torch.no_grad()
    def next_logits(self, tokens: list[int]) -> Tensor:
        """Logits `[V]` of the token that follows."""
        padding = [0] * (-len(tokens) % self._mesh.tp.size)  # sequence parallelism needs equal parts
        ids_S = to_device(torch.tensor(tokens + padding, device="cpu"), self._mesh.device)
        return self._model.logits(ids_S.unsqueeze(1))[len(tokens) - 1, 0].float()


@contextmanager
def _whole_sequences(model: nn.Module) -> Iterator[None]:
    """Switch sequence parallelism off inside: one token cannot be cut. The weights are the same either way."""
    cut: list[Any] = [layer for layer in model.modules() if getattr(layer, "sequence_parallel_enabled", False)]
    try:
        for layer in cut:
            layer.sequence_parallel_enabled = False
        yield
    finally:
        for layer in cut:
            layer.sequence_parallel_enabled = True
