"""The options of commands that let a model write text."""

from __future__ import annotations

import argparse
import math

from shardwise.base.errors import ConfigError
from shardwise.base.mesh_axes import DIVIDING_KEYS


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int, top_p: float) -> None:
    """Add the options of generated text to a command: those of `TokenSampler`, the numbers of tokens and of ranks."""
    most = f"new tokens at most (default: {max_tokens})"
    parser.add_argument("--max-tokens", metavar="N", type=int, default=max_tokens, help=most)
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    top_p_help = f"draw from the likeliest tokens that together have probability P (default: {top_p:g})"
    parser.add_argument("--top-p", metavar="P", type=float, default=top_p, help=top_p_help)
    parser.add_argument("--seed", metavar="S", type=int, default=1234, help="seed of the random draws (default: 1234)")
    ranks = f"number of local ranks: {' × '.join(DIVIDING_KEYS)}"
    parser.add_argument("--nproc", metavar="N", type=int, help=ranks)


def require_valid_sampling(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError for each option of generated text that has a wrong value."""
    tokens = arguments.max_tokens
    temperature = arguments.temperature
    top_p = arguments.top_p
    seed = arguments.seed
    rules = [
        (tokens >= 1, f"--max-tokens ({tokens}) must be at least 1"),
        (0 <= temperature < math.inf, f"--temperature ({temperature}) must be at least 0; at 0 nothing is random"),
        (0 < top_p <= 1, f"--top-p ({top_p}) must be above 0 and at most 1; at 1 every token may come"),
        (0 <= seed < 2**63, f"--seed ({seed}) must be at least 0 and less than 2^63"),
    ]
    if problems := [problem for is_valid, problem in rules if not is_valid]:
        raise ConfigError(problems)
