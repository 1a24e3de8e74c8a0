"""What is drawn: the likeliest at temperature 0, else in proportion, of the nucleus alone."""

import math
from collections import Counter

import pytest
import torch

from shardwise.base.errors import ConfigError, RunError
from shardwise_use.generation import TokenSampler
from tests.sweeps import few

P = torch.tensor([0.1, 0.5, 0.15, 0.25])
DRAWS = 1000


def shares(sampler: TokenSampler) -> list[float]:
    counted = Counter(sampler.draw(P.log()) for _ in range(DRAWS))
    return [counted[token] / DRAWS for token in range(len(P))]


def test_temperature_0_takes_the_likeliest() -> None:
    assert {TokenSampler(0.0, seed=seed).draw(P.log()) for seed in range(20)} == {1}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_shares_are_the_probabilities(temperature: float) -> None:
    wanted = torch.softmax(P.log() / temperature, dim=0).tolist()
    for found, share in zip(shares(TokenSampler(temperature)), wanted, strict=True):
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / DRAWS)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {1}), (0.51, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p: float, kept: set[int]) -> None:
    found = shares(TokenSampler(1.0, top_p))
    assert {token for token, share in enumerate(found) if share} == kept
    total = sum(float(P[token]) for token in kept)
    for token in kept:
        assert abs(found[token] - float(P[token]) / total) < 0.05


@pytest.mark.parametrize("top_k", few([1, 7, 50, 60], 7))
def test_the_kept_tokens_are_those_of_transformers(top_k: int) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    text = torch.zeros(1, 1, dtype=torch.long)
    for seed in range(10):
        logits = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
        theirs = TopPLogitsWarper(0.7)(text, TopKLogitsWarper(top_k)(text, logits[None]))[0]
        sampler = TokenSampler(1.0, 0.7, seed, top_k=top_k)
        kept = set((~torch.isinf(theirs)).nonzero().flatten().tolist())
        assert {sampler.draw(logits) for _ in range(200)} <= kept
        ours = TokenSampler(1.0, 0.7)._likeliest(torch.log_softmax(logits, dim=0))
        assert top_k < 50 or torch.equal(torch.isinf(ours), torch.isinf(theirs))


def test_draws_are_a_function_of_the_seed() -> None:
    def row(seed: int) -> list[int]:
        sampler = TokenSampler(seed=seed)
        return [sampler.draw(P.log()) for _ in range(30)]

    torch.manual_seed(5)
    first = row(1)
    torch.manual_seed(6)
    assert row(1) == first
    assert row(2) != first


def test_a_rounding_error_changes_no_draw() -> None:
    """What two layouts differ by: a draw by cumulated probabilities would cross a boundary now and then."""
    generator = torch.Generator().manual_seed(0)
    one, other = TokenSampler(seed=3), TokenSampler(seed=3)
    for _ in range(300):
        logits = torch.randn(2000, generator=generator)
        off = logits + 1e-6 * torch.randn(2000, generator=generator)
        assert one.draw(logits) == other.draw(off)


@pytest.mark.parametrize(
    ("temperature", "top_p", "told"),
    [
        (-0.1, 1.0, r"temperature \(-0.1\) must be at least 0"),
        (math.inf, 1.0, "temperature"),
        (1.0, 0.0, r"top-p \(0.0\) must be above 0 and at most 1"),
    ],
)
def test_what_is_no_distribution_is_refused(temperature: float, top_p: float, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TokenSampler(temperature, top_p)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(
            RunError, match="logits of the next token must be numbers, and some are NaN: the weights are damaged"
        ):
            TokenSampler(temperature).draw(torch.tensor([1.0, math.nan]))
