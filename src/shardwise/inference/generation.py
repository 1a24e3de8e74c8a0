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
from shardwise.inference.sampling import Sampler
from shardwise.mesh import Mesh
from shardwise.models import CausalLM
from shardwise.models.cache import KeyValueCache

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are read at once: what their activations take is bounded by it."""


@runtime_checkable
class Generator(Protocol):
    """A causal language model; one of the user's own may be no more than this."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        """Token ids `[S, B]` → `[S, B, V]`, on every rank."""
        ...


def generate(
    model: Generator,
    mesh: Mesh,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: Sampler,
    *,
    stop: Collection[int] = (),
    chunk: int = PREFILL_CHUNK,
) -> Iterator[int]:
    """Tokens that follow `prompt`, as they are drawn: `max_tokens`, or up to the first of `stop`, which is given too.

    Collective over the tensor-parallel ranks, which all get the same tokens: the group's first rank decides. The model
    reads the prompt once, `chunk` tokens at a time, and then one token for each; what it knows of them takes the memory
    of `KeyValueCache` with room for prompt and `max_tokens`. A model without one reads everything again for each token.
    """
    if max_tokens < 1:
        return
    assert prompt, "there is nothing to continue"
    tokens = list(prompt)
    # The last token is drawn, and never read.
    room = len(tokens) + max_tokens - 1
    reader: _Cached | _Anew = _Cached(model, mesh, room, chunk) if isinstance(model, CausalLM) else _Anew(model, mesh)
    for _ in range(max_tokens):
        drawn = torch.tensor([sampler.draw(reader.next_logits(tokens))])
        token = int(comm.broadcast_(drawn.to(mesh.device), mesh.tp))
        tokens.append(token)
        yield token
        if token in stop:
            return


class _Cached:
    """Reads what is new of a growing row of tokens."""

    def __init__(self, model: CausalLM[Any], mesh: Mesh, room: int, chunk: int) -> None:
        self._model, self._mesh, self._chunk = model, mesh, chunk
        self._cache = KeyValueCache(room)

    @torch.no_grad()
    def next_logits(self, tokens: list[int]) -> Tensor:
        """Logits `[V]` of the token after all of `tokens`."""
        model, cache = self._model, self._cache
        if model.outdates(cache.length, len(tokens)):
            cache.length = 0
        new = torch.tensor(tokens[cache.length :], device=self._mesh.device).unsqueeze(1)
        # Keys that change with the length are right only when all are made at once.
        at_once = len(new) if model.outdates(1, len(tokens)) else self._chunk
        with _whole_sequences(model):
            *_, logits_BV = (model.next_logits(part, cache) for part in new.split(at_once))
        return logits_BV[0].float()


class _Anew:
    """Reads all tokens each time."""

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
