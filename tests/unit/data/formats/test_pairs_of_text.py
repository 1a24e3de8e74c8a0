"""From text to sentence pairs: sentences are kept through tokenizer and cache, and what cannot be paired is refused."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config import Config
from shardwise.data.formats.prepared_data import PreparedData, make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.rows import PairTokens
from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.sentence_pairs import SentencePairBatches
from shardwise.data.tokens.encoding import cut_sentences
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.unit.data.small_runs import batches_of, refusals, sized, stories


def config(vocab_size: int = 512, length: int = 64, eval_every: int = 0, **data: Any) -> Config:
    return sized(vocab_size, length, eval_every, family="bert", **data)


def texts(data: PreparedData, part: str) -> list[list[str]]:
    """The sentences of each document, decoded."""
    tokenizer, found = Tokenizer.load(data.tokenizer_path), data.sentences[part]
    tokens = data.tokens["train"] if part == "train" else data.tokens["eval"]
    assert (found.bounds[-1], found.documents[-1]) == (len(tokens), len(found.bounds) - 1)
    pieces = [tokenizer.decode(tokens[a:b]) for a, b in zip(found.bounds, found.bounds[1:], strict=False)]
    return [pieces[a:b] for a, b in zip(found.documents, found.documents[1:], strict=False)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the tiny text with its sentences."""
    root = tmp_path_factory.mktemp("filled")
    prepare_data(config(), root)
    return root


def test_sentences_are_those_of_the_documents_and_masked_as_configured(filled: Path) -> None:
    data = prepare_data(config(), filled)
    assert data.pair_tokens == PairTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
    documents = texts(data, "train") + texts(data, "eval")
    assert sorted(documents) == sorted(cut_sentences(story.rstrip()) for story in stories())
    assert data.tokens["train"].min() > 4, "pairs have special tokens, the text has none"
    assert data.tokens["train"].dtype == np.uint16
    assert "260 documents" in data.summary
    manifest = json.loads((data.tokenizer_path.parent / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["pair_tokens"] == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    # Golden loss curves rest on these: on every Python, and on every version of numpy and tokenizers.
    assert data.fingerprint[:16] == "013386ec89738e6d"
    batches = make_batches(config(), data, "train")
    assert isinstance(batches, SentencePairBatches)
    digest = hashlib.sha256()
    for name, array in sorted(batches.global_batch(1000, 32).inputs.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "4972519b16f86ad0"
    for keys, predictions, masked in (
        ({}, 10, 9),  # ⌈0.15 · 64⌉; of at most 61 tokens 9
        ({"masked_fraction": 0.5, "max_predictions": 20}, 20, 20),
    ):
        targets_PB = batches_of(config(**keys), filled).global_batch(0, 32).inputs["targets_PB"]
        assert targets_PB.shape == (predictions, 32)
        assert (targets_PB != IGNORE).sum(axis=0).max() == masked


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def overwrite(file: Path) -> None:
    file.write_bytes(b"\1" * file.stat().st_size)


DAMAGES = (("train.sentences.bin", overwrite), ("train.documents.bin", truncate), ("eval.sentences.bin", Path.unlink))


def test_damaged_sentences_are_prepared_anew(filled: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(filled, tmp_path / "cache"))
    first = prepare_data(config(), root)
    bounds = np.array(first.sentences["train"].bounds)
    built: list[str] = []
    for number, (name, damage) in enumerate(DAMAGES, start=1):
        damage(first.tokenizer_path.parent / name)
        second = prepare_data(config(), root, announce=built.append)
        assert len(built) == number, name
        assert second.fingerprint == first.fingerprint
        assert np.array_equal(second.sentences["train"].bounds, bounds)


def test_special_names_are_text_and_little_text_is_refused(tmp_path: Path) -> None:
    """A text about BERT does not end segments or hide words."""
    words = " ".join(stories()[:40])
    (tmp_path / "a.txt").write_text(words + "Put [SEP] after [MASK] and [CLS].\n", encoding="utf-8")
    data = prepare_data(config(300, path=str(tmp_path / "a.txt"), split="1,0"), tmp_path / "cache")
    assert data.tokens["train"].min() > 4
    assert texts(data, "train")[0][-1] == "\nPut [SEP] after [MASK] and [CLS]."
    assert len(data.tokens["eval"]) == 0
    assert make_batches(config(300), data, "eval") is None
    (tmp_path / "a.txt").write_text(stories()[0], encoding="utf-8")
    chosen = {"path": str(tmp_path / "a.txt")}
    said = refusals(config(262, 2000, 1, **chosen), tmp_path / "cache")
    assert all("must be at least two samples of about train.sequence_length - 3 (1,997 tok" in text for text in said)
    data = prepare_data(config(262, 64, 0, **chosen), tmp_path / "cache")
    assert make_batches(config(262, 64), data, "eval") is None
    labels = make_batches(config(262, 64), data, "train").global_batch(0, 200).inputs["next_sentence_B"]
    assert 60 < labels.sum() < 140


def test_a_users_tokenizer_makes_pairs(filled: Path, tmp_path: Path) -> None:
    trained = prepare_data(config(), filled)
    own = shutil.copytree(trained.tokenizer_path, tmp_path / "own")
    data = prepare_data(config(600, tokenizer=str(own)), tmp_path / "b")
    assert data.pair_tokens == trained.pair_tokens
    assert np.array_equal(data.tokens["train"], trained.tokens["train"])
    without = prepare_data(sized(512, 64, 0), tmp_path / "a").tokenizer_path
    size, marks = refusals(config(511, tokenizer=str(without)), tmp_path / "b")
    assert "(512) must be at most model.vocab_size (511)" in size
    assert marks.startswith(
        f"data.tokenizer {without} has no [PAD], [CLS], [SEP] or [MASK]: model.family=bert needs [PAD], "
        "<|endoftext|>, [CLS], [SEP] and [MASK]; other names are read from a tokenizer_config.json beside it"
    )
