"""Token after token from a causal language model, whatever its layout.

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
from shardwise.inference.passes import Passes
from shardwise.inference.sampling import Sampler
from shardwise.mesh import Mesh
from shardwise.models import CausalLM, Stages
from shardwise.models.cache import KeyValueCache
from shardwise.plan.stage import rank_of

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are read at once: what their activations take is bounded by it."""


@runtime_checkable
class Generator(Protocol):
    """A causal language model; one of the user's own may be no more than this."""

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
    """Tokens that follow `prompt`, as they are drawn: `max_tokens`, or up to the first of `stop`, which is given too.

    Collective over the tensor- and pipeline-parallel ranks, which all get the same tokens: the first tensor-parallel
    rank of the last stage decides. The model reads the prompt once, `chunk` tokens at a time, and then one token for
    each; what it knows of them takes the memory of `KeyValueCache` with room for prompt and `max_tokens`. A model
    without one reads everything again for each token. `parallel` says how a model in pipeline stages is cut.
    """
    if max_tokens < 1:
        return
    assert prompt, "there is nothing to continue"
    tokens = list(prompt)
    # The last token is drawn, and never read.
    room = len(tokens) + max_tokens - 1
    reader: _Cached | _Anew
    if isinstance(model, CausalLM | Stages):
        reader = _Cached(model, mesh, room, chunk, parallel)
    else:
        reader = _Anew(model, mesh)
    source = 0 if parallel is None else rank_of(parallel, parallel.pipeline * parallel.stages_per_rank - 1)
    for _ in range(max_tokens):
        logits_V = reader.next_logits(tokens)
        drawn = torch.tensor([0 if logits_V is None else sampler.draw(logits_V)]).to(mesh.device)
        token = int(comm.broadcast_(comm.broadcast_(drawn, mesh.pp, source=source), mesh.tp))
        tokens.append(token)
        yield token
        if token in stop:
            return


class _Cached:
    """Reads the new tokens of a growing row; each stage of a pipeline keeps its own layers' keys and values."""

    def __init__(
        self, model: CausalLM[Any] | Stages, mesh: Mesh, room: int, chunk: int, parallel: ParallelConfig | None
    ) -> None:
        self._model, self._mesh, self._chunk = model, mesh, chunk
        self._passes = Passes(model, parallel, mesh)
        self._caches = {part: KeyValueCache(room) for part in self._passes.parts}

    def next_logits(self, tokens: list[int]) -> Tensor | None:
        """Logits `[V]` of the token after all of `tokens`; None where this rank has not the last stage."""
        (part, cache), *_ = self._caches.items()
        assert isinstance(part, CausalLM), "only a causal model continues a text"
        if part.outdates(cache.length, len(tokens)):
            for each in self._caches.values():
                each.length = 0
        new = torch.tensor(tokens[cache.length :], device=self._mesh.device).unsqueeze(1)
        # Keys that change with the length are right only when all are made at once.
        at_once = len(new) if part.outdates(1, len(tokens)) else self._chunk
        chunks = new.split(at_once)
        found: list[Tensor] = []

        def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
            assert isinstance(part, CausalLM), "only a causal model continues a text"
            out = part.next_logits(chunks[number], self._caches[part], x)
            if part.part.is_last:
                found[:] = [out]
            return out

        with _whole_sequences(self._model):
            self._passes.run(compute, [(len(ids), 1) for ids in chunks])
        return found[0][0].float() if found else None


class _Anew:
    """Reads all tokens again for each new one."""

    def __init__(self, model: Generator, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh

    @torch.no_grad()
    def next_logits(self, tokens: list[int]) -> Tensor:
        """Logits `[V]` of the token after all of `tokens`."""
        filled = -(-len(tokens) // self._mesh.tp.size) * self._mesh.tp.size  # sequence parallelism cuts it evenly
        ids_S1 = torch.zeros(filled, 1, dtype=torch.int64)
        ids_S1[: len(tokens), 0] = torch.tensor(tokens)
        return self._model.logits(ids_S1.to(self._mesh.device))[len(tokens) - 1, 0].float()


@contextmanager
def _whole_sequences(model: nn.Module) -> Iterator[None]:
    """Without sequence parallelism inside: one token cannot be cut. The weights are the same either way."""
    cut: list[Any] = [layer for layer in model.modules() if getattr(layer, "sequence_parallel_enabled", False)]
    try:
        for layer in cut:
            layer.sequence_parallel_enabled = False
        yield
    finally:
        for layer in cut:
            layer.sequence_parallel_enabled = True
