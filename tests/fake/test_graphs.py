"""Graphs that `shardwise compile` captures as one rank are those of every rank that has the unit."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.config import Config, check_layout
from shardwise.train.compile.compiled_units import BLOCK, HEAD
from shardwise.train.compile.graph_facts import planned_graphs
from shardwise.train.compile.worker import _capture_graph
from tests.arch.source import ROOT
from tests.dist.test_compiled_training import GPT_DROPOUT, SIZES
from tests.dist.training import FACTS, FAMILIES, make_config

CPU = torch.device("cpu")
# torch itself does so where it traces an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
TOKENS, HIDDEN, WIDTH, RANKS = 512, 4096, 11008, 8


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Config, str, int], list[str]]]:
    """The code of the graphs of a unit as a rank captures it."""
    found: list[str] = []

    def collecting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(graph.print_readable(print_output=False, include_stride=True))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("shardwise.train.compile.compiled_units.compiler_backend", lambda *_: collecting)
    monkeypatch.setattr("shardwise.train.compile.compiled_units.check_compiler_backend", lambda *_: None)

    def capture(config: Config, unit: str, rank: int) -> list[str]:
        torch._dynamo.reset()
        found.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        layout = check_layout(config, 16)
        dist.init_process_group("fake", rank=rank, world_size=16)
        _capture_graph(config, layout, CPU, unit, training=True, only_capture=False)
        return list(found)

    yield capture
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "keys", "unit"),
    [
        (FAMILIES["llama"], {}, HEAD),
        pytest.param(GPT_DROPOUT, {"dropout_mode": "fast"}, BLOCK, marks=pytest.mark.slow),
        pytest.param(GPT_DROPOUT, {"dropout_mode": "invariant"}, BLOCK, marks=pytest.mark.slow),
        pytest.param(FAMILIES["bert"], {}, HEAD, marks=pytest.mark.slow),
    ],
    ids=["llama's head", "gpt, fast dropout", "gpt, invariant dropout", "bert's head"],
)
def test_ranks_and_layers_share_a_graph(
    model: dict[str, Any], keys: dict[str, Any], unit: str, captured: Callable[[Config, str, int], list[str]]
) -> None:
    """TP 2 × PP 2 × DP 4: the vocabulary is padded on the second of two tensor-parallel ranks."""

    def config(layers: int) -> Config:
        sizes = SIZES | {"num_hidden_layers": layers} | model
        return make_config(
            model=sizes, parallel={"tensor": 2, "sequence": True, "pipeline": 2}, train={"global_batch": 16} | keys
        )

    first = captured(config(2), unit, 0)
    assert len(first) == 1
    assert captured(config(4), unit, 11) == first


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (FAMILIES["llama"], [BLOCK, HEAD]),
        (FAMILIES["gpt"], [BLOCK, HEAD]),
        (FACTS["smollm3"] | {"sliding_window": 3}, [BLOCK, "block without rotary positions with a window", HEAD]),
    ],
    ids=["llama", "gpt", "smollm3"],
)
def test_the_number_of_graphs_is_that_of_kinds(model: dict[str, Any], units: list[str]) -> None:
    for every, modes in ((0, (True,)), (2, (True, False))):
        config = make_config(model=SIZES | model, train={"eval_every": every})
        assert planned_graphs(config.model, config.train) == [(unit, mode) for unit in units for mode in modes]


@pytest.fixture
def block_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("block_rank")
    module.fake_process_group(0, RANKS)
    yield module
    dist.destroy_process_group()


@pytest.mark.parametrize(("recompute", "most"), [("none", 120), ("selective", 130)])
def test_a_block_asks_for_few_operators_and_holds_no_copies(recompute: str, most: int, block_rank: Any) -> None:
    found = block_rank.figures(recompute, torch.device("meta"), TOKENS, RANKS, 1)
    assert found["dispatches"] <= most
    heads, feed = HIDDEN // RANKS, WIDTH // RANKS
    # Gathered inputs of two products, q, k, v, output of attention, gate and up; whole rows of the residual stream.
    per_token = 2 * HIDDEN + 4 * heads + 2 * feed + (feed if recompute == "none" else 0)
    saved = 2 * (per_token * TOKENS + HIDDEN * TOKENS // RANKS)
    statistics = 4 * (2 * TOKENS // RANKS + 32 // RANKS * TOKENS)
    assert saved <= found["saved"] - statistics <= saved + 64
    # The last product: its output or the gradient of that, gathered; the rank's part of it; a tensor of the width.
    work = 2 * (HIDDEN * TOKENS + HIDDEN * TOKENS // RANKS + (feed * TOKENS if recompute == "selective" else 0))
    assert found["live"] <= found["saved"] + work
