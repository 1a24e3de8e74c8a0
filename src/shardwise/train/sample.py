"""A few generated words, to see what a model has learned."""

from __future__ import annotations

from shardwise.inference import Generator, Sampler, generate
from shardwise.mesh import Mesh

__all__ = ["Generator", "continue_text"]


def continue_text(
    model: Generator, mesh: Mesh, prompt: list[int], count: int, *, window: int, seed: int, temperature: float = 0.7
) -> list[int]:
    """`count` tokens drawn after `prompt`; collective over the tensor-parallel ranks, which all return the same.

    The model reads at most `window` tokens, the length that it was trained on: once they are full, it goes on from the
    last half of them.
    """
    sampler = Sampler(temperature, seed=seed)
    tokens, kept = list(prompt), window
    while len(tokens) < len(prompt) + count:
        context = tokens[-kept:]
        wanted = min(len(prompt) + count - len(tokens), window - len(context) + 1)
        tokens += generate(model, mesh, context, wanted, sampler)
        kept = max(1, window // 2)
    return tokens[len(prompt) :]
