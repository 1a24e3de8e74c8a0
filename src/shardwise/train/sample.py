"""A few generated words, to see what a model has learned."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shardwise import comm
from shardwise.mesh import Mesh


@runtime_checkable
class Generator(Protocol):
    """A causal language model."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        """Token ids `[S, B]` → `[S, B, V]`."""
        ...


@torch.no_grad()
def continue_text(
    model: Generator, mesh: Mesh, prompt: list[int], count: int, *, window: int, seed: int, temperature: float = 0.7
) -> list[int]:
    """`count` tokens drawn after `prompt`; collective over the tensor-parallel ranks, which all return the same.

    Each token runs the last `window` tokens through the model again: fit for a sample, not for serving.
    """
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        context = tokens[-window:]
        filled = -(-len(context) // mesh.tp.size) * mesh.tp.size  # sequence parallelism cuts the length evenly
        ids = torch.zeros(filled, 1, dtype=torch.int64)
        ids[: len(context), 0] = torch.tensor(context)
        logits = model.logits(ids.to(mesh.device))[len(context) - 1, 0].float().cpu()
        drawn = torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator)
        tokens.append(int(_agreed(drawn, mesh)))
    return tokens[len(prompt) :]


def _agreed(token: Tensor, mesh: Mesh) -> Tensor:
    return comm.broadcast_(token.to(mesh.device), mesh.tp)
