"""A sample's tokens: a function of seed, prompt and window."""

from typing import Any

import pytest
import torch

from shardwise.config import LlamaConfig
from shardwise.distributed.mesh import Mesh
from shardwise.models.llama import Llama
from shardwise_use.generation import _continue_text

MODEL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "initializer_range": 0.8,  # large, so that the context decides
}


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(LlamaConfig.model_validate(MODEL), seed=3)


def drawn(model: Llama, prompt: list[int], count: int = 10, **options: Any) -> list[int]:
    return _continue_text(model, Mesh(device="cpu"), prompt, count, **({"window": 32, "seed": 1} | options))


def test_it_depends_on_seed_and_prompt_alone(model: Llama) -> None:
    first = drawn(model, [1, 2, 3])
    torch.manual_seed(99)
    assert drawn(model, [1, 2, 3]) == first, "the global generator has a say"
    assert drawn(model, [1, 2, 3], seed=2) != first
    assert drawn(model, [3, 2, 1]) != first
    assert drawn(model, [1, 2, 3], 4) == first[:4], "more tokens must not change the first ones"


def test_the_last_window_tokens_are_all_that_counts(model: Llama) -> None:
    long = [9, 8, 7, 6, 5, 4, 3, 2]
    assert drawn(model, long, window=4) == drawn(model, long[-4:], window=4)
    assert drawn(model, long, window=8) != drawn(model, long[-4:], window=8), "a window of 8 reads no more than 4"


def test_nearly_no_temperature_takes_the_likeliest(model: Llama) -> None:
    tokens = [1, 2, 3]
    for _ in range(5):
        with torch.no_grad():
            tokens.append(int(model.logits(torch.tensor(tokens).unsqueeze(1))[-1, 0].argmax()))
    assert drawn(model, [1, 2, 3], 5, temperature=1e-4) == tokens[3:]


def test_it_ends_when_the_run_is_asked_to_stop(model: Llama) -> None:
    """It may take minutes, and all of the training is saved by then."""
    answers = iter([True, True, False])
    assert drawn(model, [1, 2, 3], continues=lambda: next(answers)) == drawn(model, [1, 2, 3], 3)
