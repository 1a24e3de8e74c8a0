"""A few generated words, to see what a model has learned."""

from __future__ import annotations

from shardwise.config import ParallelConfig
from shardwise.inference import Generator, Sampler, generate
from shardwise.mesh import Mesh
from shardwise.models import Stages

__all__ = ["Generator", "continue_text"]


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
) -> list[int]:
    """`count` tokens drawn after `prompt`; collective over the ranks of one replica, which all return the same.

    The model reads at most `window` tokens, the length that it was trained on: once they are full, it goes on from the
    last half of them. `parallel` says how a model in pipeline stages is cut.
    """
    sampler = Sampler(temperature, seed=seed)
    tokens, kept = list(prompt), window
    while len(tokens) < len(prompt) + count:
        context = tokens[-kept:]
        wanted = min(len(prompt) + count - len(tokens), window - len(context) + 1)
        tokens += generate(model, mesh, context, wanted, sampler, parallel=parallel)
        kept = max(1, window // 2)
    return tokens[len(prompt) :]
