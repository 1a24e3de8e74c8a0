"""Megatron's data sets from the command line: what needs a tokenizer says so, and what does not fit the model."""

from pathlib import Path

import numpy as np
import pytest

from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.e2e.command import shardwise, within

WORDS = ["the", "ring", "of", "keys", "was", "lost", "in", "spring", "and", "a", "song", "went", "with", "it"]
COMMAND = (
    *("train", "gpt-tiny", "model.num_hidden_layers=2", "train.steps=2", "train.global_batch=4"),
    *("train.sequence_length=32", "log.tensorboard=false", "data.path=a"),
)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of a tokenizer that lies beside it."""
    at = tmp_path_factory.mktemp("megatron")
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, 40)) for _ in range(200)]
    tokenizer = train_tokenizer(texts, 300, "test")
    tokenizer.save(at / "tokenizer")
    with IndexedWriter(at / "a", tokenizer.vocab_size) as writer:
        for text in texts:
            writer.add([*tokenizer.encode(text).tolist(), tokenizer.end_of_document_id])
    return at


def test_without_a_tokenizer_there_is_no_sample_and_one_sentence(at: Path) -> None:
    begun = shardwise(*COMMAND, "model.vocab_size=300", "--run-dir", "run", at=at).succeeded()
    assert "data: a: " in begun.out
    assert "200 documents" in begun.out
    assert "sample: none, as the data hold only tokens: data.tokenizer names" in begun.out.replace("\n", " ")
    assert not (at / "run/checkpoints/step-00000002/tokenizer.json").exists()
    asked = ("generate", "run", "--prompt", "the ring", "--max-tokens", "4")
    said = within(*asked, at=at).failed(2)
    assert "must hold the model's tokenizer (tokenizer.json, vocab.json with merges.txt, " in said
    assert "), and it holds none: name it by data.tokenizer" in said
    text = within(*asked, "data.tokenizer=tokenizer", at=at)
    assert text.code == 0, text.err
    assert text.out.startswith("the ring")


def test_a_token_beyond_the_vocabulary_is_named(at: Path) -> None:
    said = shardwise(*COMMAND, "model.vocab_size=200", "--run-dir", "small", at=at)
    assert ", must be in 0 … 199: set model.vocab_size to that of the tokenizer that made the data" in said.failed(2)
