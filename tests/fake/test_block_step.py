"""Operators and bytes of one rank's block, as benchmarks/block_step.py counts them without the ranks."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.arch.source import ROOT

TOKENS, HIDDEN, WIDTH, RANKS = 512, 4096, 11008, 8


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
