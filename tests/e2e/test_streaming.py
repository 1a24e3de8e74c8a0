"""Streams from the command line: stopped, gone on with at another layout, evaluated."""

from pathlib import Path

import pytest

from tests.e2e.command import metrics, shardwise, within
from tests.e2e.page import run_section
from tests.e2e.test_evaluate_and_generate import answer
from tests.e2e.test_megatron import losses

COMMAND = ("gpt-tiny", "data.path=lines", "data.streaming=true", "train.steps=6", "train.eval_every=3")


@pytest.mark.slow
def test_the_page_runs_and_goes_on(tmp_path: Path) -> None:
    """docs/data.md: .jsonl.gz and .parquet are streamed; a run stops, and goes on at another data-parallel degree."""
    _, (first, _) = run_section("Streams", tmp_path)
    assert "data: lines: a stream of 3 files, " in first.out
    run = tmp_path / "runs/lines"
    assert len(metrics(run, "resume")) == 1
    whole = ("model.num_hidden_layers=2", "data.tokenizer=tokenizer", "--run-dir", "runs/whole")
    shardwise("train", *COMMAND, *whole, at=tmp_path).succeeded()
    assert losses(run) == pytest.approx(losses(tmp_path / "runs/whole"), rel=1e-5)
    found = answer(within("evaluate", "runs/lines", "--json", at=tmp_path))
    assert found["part"] == "eval"
    assert found["loss"] == pytest.approx(metrics(run, "eval")[-1]["loss"], rel=0.05)
