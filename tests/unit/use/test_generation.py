"""Texts that a model continues: which tokens are drawn, and models without a cache. At every layout: tests/dist."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, RunError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import LlamaConfig, config_from_sections, load_config
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh
from shardwise.models.llama import Llama
from shardwise_use.generation import Prompt, TokenSampler, _continue_text, _Uncached
from shardwise_use.inference_jobs import _load_model, run_generation
from tests.sweeps import few

P = torch.tensor([0.1, 0.5, 0.15, 0.25])
DRAWS = 1000


def shares(sampler: TokenSampler) -> list[float]:
    counted = Counter(sampler.draw(P.log()) for _ in range(DRAWS))
    return [counted[token] / DRAWS for token in range(len(P))]


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
    assert {TokenSampler(0.0, seed=seed).draw(P.log()) for seed in range(20)} == {1}
    # What two layouts differ by: a draw by cumulated probabilities would cross a boundary now and then.
    generator = torch.Generator().manual_seed(0)
    one, other = TokenSampler(seed=3), TokenSampler(seed=3)
    for _ in range(300):
        logits = torch.randn(2000, generator=generator)
        off = logits + 1e-6 * torch.randn(2000, generator=generator)
        assert one.draw(logits) == other.draw(off)


def test_what_is_no_distribution_is_refused() -> None:
    for temperature, top_p, told in (
        (-0.1, 1.0, r"temperature \(-0.1\) must be at least 0"),
        (math.inf, 1.0, "temperature"),
        (1.0, 0.0, r"top-p \(0.0\) must be above 0 and at most 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            TokenSampler(temperature, top_p)
    for temperature in (0.0, 1.0):
        told = "logits of the next token must be numbers, and some are NaN: the weights are damaged"
        with pytest.raises(RunError, match=told):
            TokenSampler(temperature).draw(torch.tensor([1.0, math.nan]))


@pytest.fixture(scope="module")
def model() -> Llama:
    """A small model with large weights, so that the context decides."""
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return Llama(LlamaConfig(family="llama", **sizes, num_attention_heads=4, initializer_range=0.8), seed=3)


def drawn(model: Llama, prompt: list[int], count: int = 10, **options: Any) -> list[int]:
    return _continue_text(model, Mesh(device="cpu"), prompt, count, **({"window": 32, "seed": 1} | options))


def test_a_sample_depends_on_seed_and_window_alone(model: Llama) -> None:
    first = drawn(model, [1, 2, 3])
    torch.manual_seed(99)
    assert drawn(model, [1, 2, 3]) == first, "the global generator has a say"
    assert drawn(model, [1, 2, 3], seed=2) != first
    assert drawn(model, [3, 2, 1]) != first
    assert drawn(model, [1, 2, 3], 4) == first[:4], "more tokens must not change the first ones"
    long = [9, 8, 7, 6, 5, 4, 3, 2]
    assert drawn(model, long, window=4) == drawn(model, long[-4:], window=4)
    assert drawn(model, long, window=8) != drawn(model, long[-4:], window=8), "a window of 8 reads no more than 4"
    tokens = [1, 2, 3]
    for _ in range(5):
        with torch.no_grad():
            tokens.append(int(model.logits(torch.tensor(tokens).unsqueeze(1))[-1, 0].argmax()))
    assert drawn(model, [1, 2, 3], 5, temperature=1e-4) == tokens[3:]
    # It may take minutes, and all of the training is saved by then.
    answers = iter([True, True, False])
    assert drawn(model, [1, 2, 3], continues=lambda: next(answers)) == drawn(model, [1, 2, 3], 3)


class Places:
    """Its logits say at which place they were made."""

    def logits(self, ids_SB: Tensor) -> Tensor:
        return torch.arange(len(ids_SB)).view(-1, 1, 1).expand(-1, 1, 5)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_the_text_goes_on_after_its_last_token(length: int) -> None:
    """And not after what fills it up, so that sequence parallelism can cut it evenly."""
    mesh: Any = SimpleNamespace(tp=SimpleNamespace(size=4), device=torch.device("cpu"))
    assert _Uncached(Places(), mesh).next_logits(list(range(length))).tolist() == [float(length - 1)] * 5


def test_no_length_is_compiled_for_one_token() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    class Compiled(Places):
        logits = torch.compile(Places.logits, backend=backend, dynamic=False)

    mesh: Any = SimpleNamespace(tp=SimpleNamespace(size=1), device=torch.device("cpu"))
    assert _Uncached(Compiled(), mesh).next_logits([1, 2]).tolist() == [1.0] * 5
    assert not compiled
    assert Compiled().logits(torch.ones(2, 1)).shape == (2, 1, 5)
    assert compiled


class Silent(nn.Module):
    """A model of the user's own without logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return self.weight.sum() * ids_SB.numel() * targets_SB.numel()


def test_a_model_without_logits_continues_no_text(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    family = f"{__name__}:Silent"
    values = load_config("llama2-tiny").model_dump() | {"model": {"family": family, "vocab_size": 300}}
    tokenizer = train_tokenizer(["a b"], 257, "text")
    prompt = Prompt((1,), 1, frozenset(), 0.0, 1.0, 1)
    with pytest.raises(ConfigError, match=r"Silent\) has no logits\(ids\): it cannot continue a text"):
        run_generation(config_from_sections(values), Root.of(tmp_path), tokenizer, prompt, lambda _: None)


def test_ranks_that_find_several_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each node has a disk of its own, and one of them holds a newer step."""
    monkeypatch.setattr(collectives, "all_gather_objects", lambda mine, _: [mine, "/other/step-00000200"])
    here = tmp_path / "step-00000100"
    with pytest.raises(ConfigError) as caught:
        _load_model(load_config("gpt-tiny"), Root.of(here), Mesh(device="cpu"))
    folders = ", ".join(sorted(["/other/step-00000200", str(here)]))
    assert caught.value.problems == [f"the ranks found several checkpoints ({folders}): name one of them"]
