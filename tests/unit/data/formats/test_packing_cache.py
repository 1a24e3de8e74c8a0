"""Packed documents of every format: each document once, in samples that are made once; and the refusals."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config import Config
from shardwise.data.formats.prepared_data import PreparedData, make_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.reading.megatron_files import IndexedFile, IndexedWriter
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.unit.data import small_runs
from tests.unit.data.small_runs import json_lines, refusal, saved_rows

LENGTH = 32
TEXTS = [f"Document {number} tells of " + "words and " * (number % 9) + "an end." for number in range(60)]


def config(length: int = LENGTH, **data: Any) -> Config:
    return small_runs.config(300, length, **{"packing": "best_fit", **data})


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts as JSON lines and as Megatron's files, with their tokenizer."""
    folder = tmp_path_factory.mktemp("packed")
    json_lines(folder / "texts.jsonl", TEXTS)
    tokenizer = train_tokenizer(TEXTS, 270, "test")
    tokenizer.save(folder / "tokenizer")
    for name, texts in (("all", TEXTS), ("few", TEXTS[:20]), ("one", TEXTS[:1])):
        with IndexedWriter(folder / name, 300) as writer:
            for text in texts:
                writer.add([*tokenizer.encode(text).tolist(), tokenizer.end_of_document_id])
    return folder


def documents_in(batch: Batch) -> list[tuple[int, ...]]:
    """The pieces of a batch's samples, each with its last target."""
    pieces = []
    for b in range(len(batch.samples)):
        ids, targets, starts = (batch.inputs[name][:, b] for name in ("ids_SB", "targets_SB", "starts_SB"))
        for begin, end in pairwise([*np.unique(starts).tolist(), len(ids)]):
            if targets[begin] != IGNORE:
                pieces.append((*ids[begin:end].tolist(), int(targets[end - 1])))
    return pieces


def expected(texts: Sequence[str], at: Path, length: int = LENGTH) -> list[tuple[int, ...]]:
    """The tokens of documents, cut where they are longer than a sample and a target."""
    tokenizer = Tokenizer.load(at / "tokenizer")
    pieces = []
    for text in texts:
        row = [*tokenizer.encode(text).tolist(), tokenizer.end_of_document_id]
        pieces += [tuple(row[begin : begin + length + 1]) for begin in range(0, len(row) - 1, length)]
    return sorted(pieces)


def epoch(settings: Config, data: PreparedData, part: Any = "train", number: int | None = None) -> Batch:
    batches = make_batches(settings, data, part)
    return batches.global_batch(0, number or batches.num_samples)


@pytest.mark.parametrize("kind", ["text", "megatron", "rows of tokens", "stream", "mixture"])
def test_an_epoch_has_each_document_once(kind: str, at: Path, tmp_path: Path) -> None:
    text = {"path": str(at / "texts.jsonl"), "split": "1,0"}
    tokenizer = {"tokenizer": str(at / "tokenizer")}
    given: dict[str, dict[str, Any]] = {
        "text": text | tokenizer,
        "megatron": {"path": str(at / "all"), "split": "1,0"},
        "rows of tokens": {"path": str(at / "rows"), "split": "1,0", "eod_token": 0},
        "stream": text | tokenizer | {"streaming": True},
        "mixture": {"mixture": {"a": {"weight": 1, **text}}, **tokenizer},
    }
    if kind == "rows of tokens":
        write_rows(at / "rows", at)
    settings = config(**given[kind])
    said: list[str] = []
    data = prepare_data(settings, tmp_path, said.append)
    # The number of a stream's samples is not known; the others tell theirs.
    prepared = epoch(config(**given["text"]), prepare_data(config(**given["text"]), tmp_path))
    batch = epoch(settings, data, number=len(prepared.samples))
    assert sorted(documents_in(batch)) == expected(TEXTS, at)
    if kind == "megatron":
        assert sum(": packing the documents once, " in line for line in said) == 1
        assert "60 documents, " in data.summary
        assert "; packed by best fit: " in data.summary
        assert ", 12 of 60 documents cut, as they are longer than a sample; " in data.summary
        again: list[str] = []
        assert prepare_data(settings, tmp_path, again.append).summary == data.summary
        assert again == [], "the samples are in the cache"


def write_rows(path: Path, at: Path) -> None:
    """A data set of the documents' tokens, of which a row has several."""
    file = IndexedFile.open(at / "all")
    rows = np.split(np.asarray(file.tokens), file.starts(np.arange(7, 60, 7)))
    saved_rows(path, input_ids=[row.tolist() for row in rows])


def test_a_stream_resumes_and_a_mixture_has_conversations_too(at: Path, tmp_path: Path) -> None:
    text = {"path": str(at / "texts.jsonl"), "split": "1,0"}
    tokenizer = {"tokenizer": str(at / "tokenizer")}
    chat = {"path": str(tmp_path / "chat.jsonl"), "format": "chat", "split": "1,0"}
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "An end."}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 8)
    for settings in (
        config(**text, **tokenizer, streaming=True, shuffle_buffer=7),
        config(mixture={"a": {"weight": 1, **text}, "b": {"weight": 1, **chat}}, **tokenizer),
    ):
        data = prepare_data(settings, tmp_path)
        batches, other = (make_batches(settings, data, "train") for _ in range(2))
        whole = batches.global_batch(0, 40)
        assert {name: array.shape for name, array in whole.inputs.items()} == dict.fromkeys(
            ("ids_SB", "targets_SB", "positions_SB", "starts_SB"), (LENGTH, 40)
        )
        if state := batches.state(30):
            other.restore(state)
        part = other.global_batch(30, 10)
        for name, array in part.inputs.items():
            assert (array == whole.inputs[name][:, 30:]).all()
        other.close()
        batches.close()


def test_samples_are_of_a_length_and_split_and_need_ends(at: Path, tmp_path: Path) -> None:
    for length in (LENGTH, 2 * LENGTH):
        for split, parts in (("1,0", {"train": TEXTS}), ("50,50", {"train": TEXTS[:30], "eval": TEXTS[30:]})):
            settings = config(path=str(at / "all"), split=split, length=length)
            data = prepare_data(settings, tmp_path)
            for part, texts in parts.items():
                assert sorted(documents_in(epoch(settings, data, part))) == expected(texts, at, length)
    (tmp_path / "one.txt").write_text(" ".join(TEXTS))
    end = Tokenizer.load(at / "tokenizer").end_of_document_id
    said = refusal(config(path=str(tmp_path / "one.txt"), tokenizer=str(at / "tokenizer")), tmp_path)
    assert f"must have the token that ends a document (id {end}), as data.packing (best_fit)" in said
    write_rows(tmp_path / "rows", at)
    said = refusal(config(path=str(tmp_path / "rows")), tmp_path)
    assert said.startswith("data.packing (best_fit) needs the id of the token that ends a document: set ")
    said = refusal(config(path=str(at / "one"), split="1,0", length=8), tmp_path)
    assert said.startswith(f"{at / 'one'} must have several documents, as data.packing (best_fit) packs documents")
