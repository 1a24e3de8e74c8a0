"""docs/data-formats.md: the commands and programs of each chapter, and what the runs that they leave are good for."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import page_data
from tests.e2e.command import metrics, shardwise, within
from tests.e2e.page import run_section
from tests.e2e.test_evaluate_and_generate import answer
from tests.e2e.test_megatron import losses
from tests.unit.data.hdf5_shards import arrays, write

pytestmark = pytest.mark.slow


def evaluated(run: str, at: Path, *options: str) -> dict[str, Any]:
    return answer(within("evaluate", run, "--json", *options, at=at))


def test_text(tmp_path: Path) -> None:
    _, (trained,) = run_section("Text files", tmp_path, page_data.text_files)
    assert "data: texts: " in trained.out
    assert " 400 documents" in trained.out


def test_hugging_face_datasets(tmp_path: Path) -> None:
    """Text and tokens are trained on; each part of the data is evaluated."""
    _, (text, tokens) = run_section("Hugging Face datasets", tmp_path, page_data.saved_datasets)
    assert " 400 documents, " in text.out
    assert " 400 rows, " in tokens.out
    assert not (tmp_path / "runs/blocks/checkpoints/step-00000004/tokenizer.json").exists()
    for run in ("stories", "blocks"):
        found = evaluated(f"runs/{run}", tmp_path)
        assert (found["part"], found["data"]) == ("eval", run)
        assert 0 < found["loss"] < 8
    said = within("evaluate", "runs/blocks", "data.path=stories", at=tmp_path).failed(2)
    assert "data.path (stories) holds text, which is read with the model's tokenizer: name it by data.tokenizer" in said


def test_token_files(tmp_path: Path) -> None:
    """Rows get the ends that they lack; flat files are evaluated as they lie."""
    _, (rows, flat, inspected) = run_section("Rows and flat files", tmp_path, page_data.token_files)
    assert " 400 rows, " in rows.out
    assert "in 2 files (uint16, as a vocabulary of 512 is" in flat.out
    assert "part-0.npy" not in inspected.err
    assert "2 files" in inspected.out
    assert evaluated("runs/flat", tmp_path, "--part", "test")["loss"] < 8


def test_streams_go_on(tmp_path: Path) -> None:
    """.jsonl.gz and .parquet are streamed; a run stops, and goes on at another data-parallel degree."""
    _, (first, _) = run_section("Streams", tmp_path, page_data.stream)
    assert "data: lines: a stream of 3 files, " in first.out
    run = tmp_path / "runs/lines"
    assert len(metrics(run, "resume")) == 1
    command = ("gpt-tiny", "data.path=lines", "data.streaming=true", "train.steps=6", "train.eval_every=3")
    whole = ("model.num_hidden_layers=2", "data.tokenizer=tokenizer", "--run-dir", "runs/whole")
    shardwise("train", *command, *whole, at=tmp_path).succeeded()
    assert losses(run) == pytest.approx(losses(tmp_path / "runs/whole"), rel=1e-5)
    found = evaluated("runs/lines", tmp_path)
    assert found["part"] == "eval"
    assert found["loss"] == pytest.approx(metrics(run, "eval")[-1]["loss"], rel=0.05)


def test_megatrons_files(tmp_path: Path) -> None:
    written, _ = run_section("Megatron's", tmp_path)
    assert written == "201 [  1   2   3   4   5 511] [2 4]\n"


def test_berts_shards_go_on(tmp_path: Path) -> None:
    """With the same samples: 18 are trained on, so six steps go into a second epoch."""
    run_section("BERT's", tmp_path, page_data.bert_shards)
    at = tmp_path / "own"
    (at / "shards").mkdir(parents=True)
    first = 0
    for number, rows in enumerate((7, 1, 12)):
        shard = arrays(rows, first, length=64, predictions=10, vocab_size=512)
        write(at / "shards" / f"wiki_training_{number}.hdf5", shard)
        first += rows
    small = ("train.steps=6", "train.global_batch=4", "train.eval_every=3", "train.eval_batches=2")
    data = ("data.path=shards", "data.split=90,5,5")
    command = ("train", "bert-tiny", *small, *data, "model.num_hidden_layers=2", "log.tensorboard=false", "--run-dir")
    shardwise(*command, "whole", at=at).succeeded()
    begun = shardwise(*command, "run", "train.stop_after=2", "--nproc", "2", at=at).succeeded()
    assert ", 3 shards, 18 training, 1 evaluation and 1 test samples of 64 tokens" in begun.out.replace("\n", " ")
    shardwise(*command, "run", "--nproc", "2", "parallel.tensor=2", at=at).succeeded()
    assert losses(at / "run") == pytest.approx(losses(at / "whole"), rel=1e-5)
    assert len(metrics(at / "run", "resume")) == 1
    own = metrics(at / "run", "eval")[-1]
    assert own["step"] == 6
    found = evaluated("run", at)
    assert (found["part"], found["sequences"], found["counted"]["nsp"]) == ("eval", 1, 1)
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert evaluated("run", at, "--part", "test")["loss"] != found["loss"]
