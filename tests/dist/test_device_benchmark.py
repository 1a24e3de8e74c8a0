"""`make bench ARGS=device` with a model that trains in a moment: the same code, on any device."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch

from tests.arch.source import ROOT
from tests.dist import dense

TINY = (
    "model.num_hidden_layers=2", "model.hidden_size=32", "model.intermediate_size=48", "model.vocab_size=131",
    "model.num_attention_heads=4", "model.num_key_value_heads=4", "model.max_position_embeddings=16",
    "train.sequence_length=16",
)  # fmt: skip


def module() -> Any:
    """benchmarks/device.py, whose modules import each other by their bare names."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("device")
    finally:
        sys.path.remove(folder)


def train(tensor: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    device = "cpu" if os.environ.get("TEST_DEVICE", "cpu") == "cpu" else None
    found: dict[str, Any] = module().train(tensor, 1, TINY, device)
    return found


@pytest.mark.slow
def test_reports_speed_memory_and_communication_of_each_layout(ranks: Any, tmp_path: Any) -> None:
    benchmark = module()
    found = {name: dense.run(ranks, tensor * data, train, tensor) for name, (tensor, data) in benchmark.LAYOUTS.items()}
    report = benchmark.report(found)
    alone, data, tensor = (report.figures[name] for name in benchmark.LAYOUTS)
    assert tensor["loss"] == pytest.approx(alone["loss"], rel=1e-2), "the same batch in bfloat16"
    assert (alone["collective_seconds"], alone["hidden_share"], alone["mfu"]) == (0, None, None)
    assert data["tokens_per_second"] > 0
    if data["device"] == "cpu":
        assert data["collective_seconds"] > 0, "the profiler names gloo's collectives otherwise than before"
        assert 0 <= data["hidden_share"] <= 1
    assert [row[:2] for row in report.tables[0].rows] == [[name, "2"] for name in benchmark.LAYOUTS]
    assert "peak unknown" in report.tables[0].markdown()
