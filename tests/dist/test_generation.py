"""Generation at every layout: the cache changes no logits, and the tokens are transformers' own."""

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.config import LlamaConfig, check_layout
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.models.blocks import KeyValueCache
from shardwise.models.build import build_model
from shardwise.models.causal import CausalLM
from shardwise.models.llama import Llama
from shardwise.pipeline.stages import build_stages
from shardwise_use.generation import TokenSampler, _SampleText, draw_sample, generate_tokens, open_token_reader
from tests.dist.checkpoints import make_trainer
from tests.dist.dense import fill, mesh, run
from tests.dist.dense import run as on_ranks
from tests.dist.training import MODELS, cases, make_config, make_data, sizes
from tests.hugging_face import VOCABULARY, described, save
from tests.sweeps import few

CASES = ("llama", "llama-tied", "qwen3", "olmo2", "smollm3", "gemma3", "gpt", "neox", "neox-tied", "olmoe", "glm4_moe")
LENGTH = 8
# How the tokens are cut into passes: all at once, a prompt and single tokens, chunks, one by one.
CUTS = ((LENGTH,), (5, 1, 1, 1), (3, 2, 3), (1,) * LENGTH)
# llama and olmo2 have 2 key/value heads: at TP 4 each is held twice.
CACHED = [*itertools.product(CASES, (1, 2)), ("llama", 4), ("olmo2", 4)]
OFTEN = ("llama", "gemma3", "gpt")
WRITTEN = itertools.product((*OFTEN, "olmo2", "smollm3", "neox", "mixtral"), ((1, False), (2, False), (2, True)))
DEEP = sizes(VOCABULARY, 32, 48, layers=4, heads=4, positions=48, spread=0.3)
PIPELINES = cases("generation")
BYTES = 257
"""A vocabulary of every byte and the end of a document."""


@functools.cache
def folder(case: str) -> tuple[Path, Any]:
    """Saved by transformers, and the model itself."""
    path = Path(tempfile.mkdtemp(prefix="shardwise-test-")) / case
    return path, save(case, path)


def build(path: Path, tensor: int, sequence: bool = False) -> CausalLM[Any]:
    config = make_config(model=described(path).model_dump(mode="json"), parallel={"tensor": tensor})
    model = build_model(config, mesh(tensor).tp, sequence_parallel=sequence, dtype=torch.float32)
    load_hugging_face(model, config.model, mesh(tensor), path)
    assert isinstance(model, CausalLM)
    return model.eval()


def ids(length: int = LENGTH, batch: int = 2) -> torch.Tensor:
    return torch.randint(VOCABULARY, (length, batch), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def cached_error(path: Path, tensor: int) -> tuple[float, int]:
    """The largest difference that the cache makes, at any cut, and what it holds."""
    model = build(path, tensor)
    wanted = model.logits(ids())
    worst = 0.0
    for cuts in CUTS:
        cache = KeyValueCache(LENGTH)
        found = torch.cat([model.logits(part, cache) for part in ids().split(cuts)])
        worst = max(worst, float((found - wanted).abs().max()))
    return worst, cache.bytes


@pytest.mark.parametrize(("case", "tp"), few(CACHED, ("llama-tied", 2), ("gemma3", 2), ("neox", 2), ("llama", 4)))
def test_the_cache_changes_no_logits(case: str, tp: int, ranks: Any) -> None:
    path, _ = folder(case)
    config = described(path)
    heads = max(1, config.num_key_value_heads // tp)
    for rank, (error, size) in enumerate(run(ranks, tp, cached_error, path, tp)):
        assert error <= 1e-5, f"rank {rank} of TP {tp}: with the cache logits are off by {error:.1e}"
        rows = sum(config.window(layer) or LENGTH for layer in range(config.num_hidden_layers))
        assert size == 2 * rows * 2 * heads * config.head_dim * 4


def greedy(path: Path, tensor: int, sequence: bool, prompt: list[int], count: int, end: int) -> list[list[int]]:
    """With the prompt read at once, in chunks, and in chunks up to the end token."""
    model = build(path, tensor, sequence)
    return [
        list(generate_tokens(model, mesh(tensor), prompt, count, TokenSampler(0.0), stop=stop, chunk=chunk))
        for chunk, stop in ((99, []), (3, []), (3, [end]))
    ]


def theirs(case: str, prompt: list[int], count: int, stop: list[int]) -> list[int]:
    """What `transformers` generates."""
    _, model = folder(case)
    found = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=stop or None, pad_token_id=0
    )
    return [int(token) for token in found[0, len(prompt) :]]


@pytest.mark.parametrize(
    ("case", "tp", "sequence"), few(((case, *cut) for case, cut in WRITTEN), *((case, 2, True) for case in OFTEN))
)
def test_greedy_is_transformers_own(case: str, tp: int, sequence: bool, ranks: Any) -> None:
    """To the longest sequence, and up to an end token, which is given too."""
    path, _ = folder(case)
    prompt = ids(8, 1)[:, 0].tolist()
    wanted = theirs(case, prompt, 16, [])
    assert len(set(wanted)) > 2, "a text of one token shows nothing"
    end = next(token for token in wanted[2:] if token != wanted[0])
    stopped = theirs(case, prompt, 16, [end])
    assert len(stopped) < 16
    for found in run(ranks, tp, greedy, path, tp, sequence, prompt, 16, end):
        assert found == [wanted, wanted, stopped]


def drawn(path: Path, tensor: int, seed: int) -> list[int]:
    return list(generate_tokens(build(path, tensor), mesh(tensor), [5, 3, 8], 12, TokenSampler(0.9, 0.95, seed)))


@pytest.mark.parametrize("case", few(("llama", "gpt", "neox"), "llama"))
def test_a_seed_gives_one_text_at_any_layout(case: str, ranks: Any) -> None:
    path, _ = folder(case)
    wanted = drawn(path, 1, 7)
    assert wanted == drawn(path, 1, 7)
    assert wanted != drawn(path, 1, 8), "the seed has no say"
    for tp in (2, 4):
        assert run(ranks, tp, drawn, path, tp, 7) == [wanted] * tp


def continued(model: dict[str, Any], parallel: dict[str, Any], chunk: int) -> list[list[int]]:
    """After prompts that are shorter and longer than a chunk, and that make several rounds of chunks."""
    config = make_config(model=DEEP | model, parallel=parallel, train={"micro_batch": 1})
    ranks = mesh(config.parallel.tensor, config.parallel.pipeline)
    stages: Any = build_stages(config, check_layout(config, ranks.world.size), ranks, dtype=torch.float32).eval()
    return [
        list(generate_tokens(stages, ranks, prompt, 8, sampler, chunk=chunk, parallel=config.parallel))
        for prompt in ([5], list(range(3, 33)))
        for sampler in (TokenSampler(0.0), TokenSampler(0.9, 0.95, 7))
    ]


@pytest.mark.parametrize(
    ("case", "layout"), few(itertools.product(("gpt", "llama", "neox", "dynamic"), PIPELINES), ("gpt", "zbv-tp2"))
)
def test_a_pipeline_writes_the_same(case: str, layout: str, ranks: Any) -> None:
    """With one key/value cache for each stage; on every rank, of whatever stage."""
    model: dict[str, Any] = {
        "gpt": {"family": "gpt"},
        "llama": {"family": "llama", "num_key_value_heads": 2},
        "neox": {"family": "gpt_neox", "tie_word_embeddings": True},
        "dynamic": {"family": "llama", "max_position_embeddings": 20, "rope_scaling": MODELS["scalings"]["dynamic"]},
    }[case]
    world, parallel = PIPELINES[layout]
    wanted = continued(model, {}, 99)
    assert all(len(set(drawn)) > 2 for drawn in wanted[1::2]), "a text of one token shows nothing"
    for rank, found in enumerate(run(ranks, world, continued, model, parallel, 4)):
        assert found == wanted, f"rank {rank} of {layout}"


@pytest.mark.parametrize("chunk", [3, pytest.param(99, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS["scalings"])
def test_scaled_positions_go_on_beyond_the_longest(kind: str, chunk: int) -> None:
    """Angles that change with the length change all keys: the tokens are still those that no cache gives."""
    config = LlamaConfig(
        family="llama", **sizes(VOCABULARY, 32, 48, positions=12), rope_scaling=MODELS["scalings"][kind]
    )
    model = Llama(config, seed=1).eval()
    fill(model, scale=0.3)
    # Kept over the texts: the last one is the beginning of one whose keys had the angles of a greater length.
    reader = open_token_reader(model, mesh(1), 34, chunk=chunk)
    for prompt in ([4, 2], list(range(14)), list(range(8))):
        tokens = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                tokens.append(int(model.logits(torch.tensor(tokens).unsqueeze(1))[-1, 0].argmax()))
        found = list(generate_tokens(model, mesh(1), prompt, 20, TokenSampler(0.0), reader=reader))
        assert found == tokens[len(prompt) :]


def test_a_text_that_leaves_another_is_read_again_where_the_window_forgot_it() -> None:
    """The windowed block has the keys of the last three tokens alone."""
    model = build(folder("gemma3")[0], 1)
    reader = open_token_reader(model, mesh(1), 24)
    for prompt in ([4, 2, 7, 9, 11, 3], [4, 2, 7], [4, 2, 7, 30, 31, 32, 33, 34]):
        wanted = list(generate_tokens(model, mesh(1), prompt, 6, TokenSampler(0.0)))
        assert list(generate_tokens(model, mesh(1), prompt, 6, TokenSampler(0.0), reader=reader)) == wanted


def sample(tokenizer: Path, tensor: int, zero: int, asked: bool) -> _SampleText:
    """Of an untrained model; `asked`: the last rank alone is asked to stop, once 2 of the 6 tokens are drawn."""
    config = make_config(
        model={"vocab_size": BYTES}, parallel={"tensor": tensor}, optimizer={"zero": zero}, log={"sample_tokens": 6}
    )
    trainer = make_trainer(config)
    world = trainer.mesh.world
    answers = iter([None, None, None, "SIGUSR1"] if asked and world.rank == world.size - 1 else [])
    data = replace(make_data(), tokenizer_path=tokenizer)
    optimizer = trainer.optimizer
    with optimizer.gathered(all_units=False):
        return draw_sample(
            config, trainer.model, trainer.mesh, data, lambda: next(answers, None), in_step=optimizer.gathers_in_passes
        )


@pytest.mark.parametrize(("tensor", "zero"), [(1, 1), (2, 1), (1, 3)], ids=["DP 2", "TP 2", "DP 2 with ZeRO-3"])
def test_a_stop_is_obeyed_while_the_sample_is_drawn(tensor: int, zero: int, ranks: Any, tmp_path: Path) -> None:
    train_tokenizer(["a b"], BYTES, "bytes").save(tmp_path)
    stopped = on_ranks(ranks, 2, sample, tmp_path, tensor, zero, True)
    assert stopped == [_SampleText(None, "SIGUSR1")] * 2
    drawn = on_ranks(ranks, 2, sample, tmp_path, tensor, zero, False)
    texts = [each.text is not None for each in drawn]
    assert texts == [True, tensor == 2], "replica 0 draws"
    assert [each.stopped_by for each in drawn] == [None, None]
