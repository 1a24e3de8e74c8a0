"""BERT's HDF5 shards from the command line: trained on, gone on with, evaluated; what is wrong is one sentence."""

from pathlib import Path

import pytest

from tests.e2e.command import metrics, shardwise, within
from tests.e2e.page import run_section
from tests.e2e.test_evaluate_and_generate import answer
from tests.e2e.test_megatron import losses
from tests.unit.data.hdf5_shards import arrays, write

COMMAND = (
    "bert-tiny",
    "train.steps=6",
    "train.global_batch=4",
    "train.eval_every=3",
    "train.eval_batches=2",
    "model.num_hidden_layers=2",
    "log.tensorboard=false",
    "data.path=shards",
    "data.split=90,5,5",
)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards of 7, 1 and 12 rows: 18 samples are trained on, so six steps go into a second epoch."""
    at = tmp_path_factory.mktemp("hdf5")
    (at / "shards").mkdir()
    first = 0
    for number, rows in enumerate((7, 1, 12)):
        found = arrays(rows, first, length=64, predictions=10, vocab_size=512)
        write(at / "shards" / f"wiki_training_{number}.hdf5", found)
        first += rows
    return at


@pytest.mark.slow
def test_a_run_goes_on_at_another_layout_with_the_same_samples(at: Path) -> None:
    shardwise("train", *COMMAND, "--run-dir", "whole", at=at).succeeded()
    command = ("train", *COMMAND, "--run-dir", "run")
    begun = shardwise(*command, "train.stop_after=2", "--nproc", "2", at=at).succeeded()
    assert ", 3 shards, 18 training, 1 evaluation and 1 test samples of 64 tokens" in begun.out.replace("\n", " ")
    shardwise(*command, "--nproc", "2", "parallel.tensor=2", at=at).succeeded()
    assert losses(at / "run") == pytest.approx(losses(at / "whole"), rel=1e-5)
    assert len(metrics(at / "run", "resume")) == 1
    own = metrics(at / "run", "eval")[-1]
    assert own["step"] == 6
    found = answer(within("evaluate", "run", "--json", at=at))
    assert (found["part"], found["sequences"], found["counted"]["nsp"]) == ("eval", 1, 1)
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-5)
    test = answer(within("evaluate", "run", "--json", "--part", "test", at=at))
    assert test["loss"] != found["loss"]


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    """docs/data.md: its program makes the shards that its commands read."""
    run_section("BERT's", tmp_path)
