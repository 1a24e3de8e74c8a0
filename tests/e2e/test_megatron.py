"""Megatron's data sets from the command line: trained on, gone on with, evaluated; what needs a tokenizer says so."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.e2e.command import Outcome, metrics, shardwise, within
from tests.e2e.test_evaluate_and_generate import answer

WORDS = ["the", "ring", "of", "keys", "was", "lost", "in", "spring", "and", "a", "song", "went", "with", "it"]
COMMAND = (
    "gpt-tiny",
    "model.vocab_size=300",
    "train.steps=6",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.sequence_length=32",
    "train.eval_every=3",
    "train.eval_batches=2",
    "log.tensorboard=false",
)


@dataclass(frozen=True)
class Data:
    at: Path
    blend: str


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Two data sets of a tokenizer that lies beside them."""
    at = tmp_path_factory.mktemp("megatron")
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, 40)) for _ in range(300)]
    tokenizer = train_tokenizer(texts, 300, "test")
    tokenizer.save(at / "tokenizer")
    for name, chosen in (("a", texts[:200]), ("b", texts[200:])):
        with IndexedWriter(at / name, tokenizer.vocab_size) as writer:
            for text in chosen:
                writer.add([*tokenizer.encode(text).tolist(), tokenizer.end_of_document_id])
    return Data(at, "data.blend=[0.7,a,0.3,b]")


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in metrics(run, "step")]


@dataclass(frozen=True)
class Ran:
    run: Path
    whole: list[float]
    begun: Outcome


@pytest.fixture(scope="module")
def ran(data: Data) -> Ran:
    """One process without a stop, and two ranks that stop after 2 of 6 steps, where one process goes on."""
    at, given = data.at, ("data.path=a", "data.format=megatron", "data.split=90,5,5")
    shardwise("train", *COMMAND, *given, "--run-dir", "whole", at=at).succeeded()
    command = ("train", *COMMAND, *given, "--run-dir", "run")
    begun = shardwise(*command, "train.stop_after=2", "--nproc", "2", at=at).succeeded()
    shardwise(*command, at=at).succeeded()
    return Ran(at / "run", losses(at / "whole"), begun)


def test_a_run_goes_on_at_another_layout_with_the_same_samples(ran: Ran) -> None:
    assert losses(ran.run) == pytest.approx(ran.whole, rel=1e-5)
    assert len(metrics(ran.run, "resume")) == 1
    assert [event["step"] for event in metrics(ran.run, "eval")][-1] == 6


def test_without_a_tokenizer_there_is_no_sample_and_one_sentence(ran: Ran, data: Data) -> None:
    assert "data: a: " in ran.begun.out
    assert "200 documents" in ran.begun.out
    assert "sample: none, as the data hold only tokens: data.tokenizer names" in ran.begun.out.replace("\n", " ")
    folder = ran.run / "checkpoints" / "step-00000006"
    assert not (folder / "tokenizer.json").exists()
    said = within("generate", "run", "--prompt", "the ring", at=data.at).failed(2)
    assert "must hold the model's tokenizer (tokenizer.json, vocab.json with merges.txt, " in said
    assert "), and it holds none: name it by data.tokenizer" in said
    text = within(
        "generate", "run", "--prompt", "the ring", "--max-tokens", "4", "data.tokenizer=tokenizer", at=data.at
    )
    assert text.code == 0, text.err
    assert text.out.startswith("the ring")


@pytest.mark.slow
def test_each_part_is_evaluated(ran: Ran, data: Data) -> None:
    evaluate = ("evaluate", "run", "--json")
    found = {part: answer(within(*evaluate, "--part", part, at=data.at)) for part in ("eval", "test")}
    assert found["eval"]["part"] == "eval"
    assert found["eval"]["data"] == "a"
    own = metrics(ran.run, "eval")[-1]["loss"]
    assert found["eval"]["loss"] == pytest.approx(own, rel=0.05)
    assert found["test"]["loss"] != found["eval"]["loss"]
    said = within("evaluate", "run", "--part", "test", "data.split=9,1", at=data.at).failed(2)
    assert "--part test: data.split has no test part; give it a third weight" in said
    other = answer(within(*evaluate, "data.path=b.bin", at=data.at))
    assert (other["data"], other["part"]) == ("b.bin", "all")
    mixed = answer(within(*evaluate, data.blend, at=data.at))
    assert (mixed["data"], mixed["part"]) == ("a + b", "all")
    said = within("evaluate", "run", "data.dataset=tiny", at=data.at).failed(2)
    assert "must hold the model's tokenizer" in said


@pytest.mark.slow
def test_a_blend_with_its_tokenizer(data: Data) -> None:
    given = (data.blend, "data.tokenizer=tokenizer", "--run-dir", "blended")
    command = ("train", *COMMAND, *given)
    shardwise(*command, "train.stop_after=3", "--nproc", "2", at=data.at).succeeded()
    done = shardwise(*command, at=data.at).succeeded()
    assert "data: 0.7 × a + 0.3 × b: " in done.out
    assert "sample: " in done.out
    assert "sample: none" not in done.out
    assert (data.at / "blended/checkpoints/step-00000006/tokenizer.json").is_file()
    shardwise("train", *COMMAND, data.blend, "data.tokenizer=tokenizer", "--run-dir", "alone", at=data.at).succeeded()
    assert losses(data.at / "blended") == pytest.approx(losses(data.at / "alone"), rel=1e-5)
    changed = within("train", *COMMAND, "data.blend=[1,a,1,b]", "--run-dir", "blended", at=data.at).failed(2)
    assert 'data.blend ([1.0, "a", 1.0, "b"]) must be [0.7, "a", 0.3, "b"]' in changed


def test_a_token_beyond_the_vocabulary_is_named(data: Data) -> None:
    said = shardwise("train", *COMMAND, "model.vocab_size=200", "data.path=a", "--run-dir", "small", at=data.at)
    assert ", must be in 0 … 199: set model.vocab_size to that of the tokenizer that made the data" in said.failed(2)
