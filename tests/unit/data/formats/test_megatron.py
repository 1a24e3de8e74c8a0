"""From the data section to documents: formats, splits, blends, tokenizers, fingerprints, and what is refused."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.formats.megatron import _PreparedDocuments
from shardwise.data.formats.prepared_data import make_batches, make_evaluation_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.rows import part_bounds
from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.sentence_pairs import SentencePairBatches
from tests.unit.data.reading.test_megatron import idx_bytes
from tests.unit.data.small_runs import batches_of, config, refusals, saved_tokenizer

TEXT = "The ring of keys was lost in spring. A song went with it! Who sang it? Nobody knows.\n" * 4


def write(prefix: Path, documents: int = 40, first: int = 0, sentences: int = 1) -> str:
    """Documents of ten tokens a sentence: their own number, from `first`, again and again."""
    with IndexedWriter(prefix, 300) as writer:
        for number in range(first, first + documents):
            writer.add([number] * 10 * sentences, [10] * sentences)
    return str(prefix)


@pytest.mark.parametrize(("ending", "form"), [("", "auto"), (".bin", "auto"), (".idx", "megatron")])
def test_a_prefix_is_recognised(ending: str, form: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    data = prepare_data(config(path=prefix + ending, format=form), tmp_path / "cache")
    assert isinstance(data, _PreparedDocuments)
    assert data.tokenizer_path is None
    assert (data.count("train"), data.count("eval"), data.count("test")) == (380, 20, 0)
    assert (data.beginning("eval", 3), data.beginning("test", 3)) == ([38, 38, 38], [])
    assert data.summary == f"{prefix}{ending}: 800 B, 40 documents, 380 training and 20 evaluation tokens"
    assert not (tmp_path / "cache").exists(), "nothing is copied"


def test_splits_are_those_of_megatron() -> None:
    """Cumulative shares, rounded half to even."""
    for documents, split, bounds in (
        (1000, (980, 10, 10), [0, 980, 990, 1000]),
        (7, (969, 30, 1), [0, 7, 7, 7]),
        (11, (90, 5, 5), [0, 10, 10, 11]),
        (30, (95, 5, 0), [0, 28, 30, 30]),
        (3, (1, 0, 0), [0, 3, 3, 3]),
    ):
        assert part_bounds(documents, split) == bounds


@pytest.mark.parametrize(("packing", "bytes_each"), [("cut", 12), ("best_fit", 0)])
def test_a_document_takes_few_bytes_of_memory_and_no_object(packing: str, bytes_each: int, tmp_path: Path) -> None:
    """The files are mapped: an epoch's order takes 4 bytes a document, and the places where they begin 8."""
    kept = {}
    for documents in (1000, 100_000):
        bounds, starts = [*range(documents + 1)], [*range(0, 20 * documents, 20)]
        (tmp_path / f"{documents}.idx").write_bytes(idx_bytes([10] * documents, starts, bounds))
        np.zeros(10 * documents, dtype=np.uint16).tofile(tmp_path / f"{documents}.bin")
        chosen = config(path=str(tmp_path / f"{documents}"), packing=packing)
        batches_of(chosen, tmp_path / "cache").global_batch(0, 2)  # what is imported and prepared once
        tracemalloc.start()
        opened = batches_of(chosen, tmp_path / "cache")
        opened.global_batch(0, 2)
        kept[documents] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert (kept[100_000] - kept[1000]) / 99_000 < bytes_each + 0.5


def test_three_parts_and_their_evaluation(tmp_path: Path) -> None:
    chosen = config(path=write(tmp_path / "data", 100), split="80,10,10", eval_every=1)
    data = prepare_data(chosen, tmp_path / "cache")
    assert [data.count(part) for part in ("train", "eval", "test")] == [800, 100, 100]
    assert data.summary.endswith("800 training, 100 evaluation and 100 test tokens")
    for part, first, after in (("train", 0, 80), ("eval", 80, 90), ("test", 90, 100)):
        (batch,) = make_evaluation_batches(chosen, data, part).eval_batches(1, 64, 0, 1, 64)
        targets = batch.inputs["targets_SB"]
        assert set(np.unique(targets[targets != IGNORE])) == set(range(first, after))
    # In the order of the file, the partial last sequence too, which the evaluations of a run leave out.
    wanted = np.repeat(np.arange(80, 90), 10)[1:].tolist()
    for make, counted in ((make_evaluation_batches, 99), (make_batches, 96)):
        batches = make(chosen, data, "eval").eval_batches(8, 1, 0, 1, 1)
        found = np.concatenate([batch.inputs["targets_SB"].T for batch in batches]).ravel()
        assert found[found != IGNORE].tolist() == wanted[:counted]
    chosen = config(path=write(tmp_path / "data"), split="1,1")
    data = prepare_data(chosen, tmp_path / "cache")

    def rows(make: Any, part: str, seed: int) -> list[list[int]]:
        """Its first four, as a training or an evaluation reads them."""
        batches = make(chosen.with_keys(train={"seed": seed}), data, part)
        found = batches.global_batch(0, 4) if part == "train" else next(batches.eval_batches(1, 4, 0, 1, 4))
        return found.inputs["ids_SB"].tolist()

    assert rows(make_batches, "train", 1) != rows(make_batches, "train", 2)
    own = rows(make_batches, "eval", 1)
    assert own == rows(make_batches, "eval", 2)
    assert own == rows(make_evaluation_batches, "eval", 1), "an evaluation begins with what a run's own ones see"


def test_blends_and_fingerprints_of_data(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", 40), write(tmp_path / "b", 40, first=100)
    chosen = config(blend=[0.75, first, 0.25, second], eval_every=1)
    data = prepare_data(chosen, tmp_path / "cache")
    assert data.summary.startswith(f"0.75 × {first} + 0.25 × {second}: 1.6 KiB, 80 documents, 760 training and 40 ")
    ids_SB = make_batches(chosen, data, "train").global_batch(1000, 40).inputs["ids_SB"]
    assert np.count_nonzero((ids_SB < 100).all(axis=0)) == 30
    assert np.count_nonzero((ids_SB >= 100).all(axis=0)) == 10
    evaluation = make_evaluation_batches(chosen, data, "eval")
    assert sum(int(each.counts[0]) for each in evaluation.eval_batches(9, 1, 0, 1, 1)) == 38
    twice = config(blend=[1, first, 1, first])
    ids_SB = batches_of(twice, tmp_path / "cache").global_batch(0, 40).inputs["ids_SB"]
    assert not np.array_equal(ids_SB[:, ::2], ids_SB[:, 1::2]), "the same data twice go in two orders"
    (tmp_path / "copy").mkdir()
    one, copy = write(tmp_path / "a"), write(tmp_path / "copy" / "a")
    other = write(tmp_path / "b", first=50)
    found = [
        prepare_data(config(**data), tmp_path / "cache").fingerprint
        for data in (
            {"path": one},
            {"path": one, "split": "90,10"},
            {"path": other},
            {"blend": [1, one, 1, other]},
            {"blend": [1, one, 2, other]},
        )
    ]
    assert len(set(found)) == len(found)
    assert prepare_data(config(path=copy), tmp_path / "cache").fingerprint == found[0]


def test_sentence_pairs_of_split_sentences(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", 40, first=20, sentences=4)
    tokenizer = saved_tokenizer(tmp_path / "tokenizer", TEXT, 290, pairs=True)
    keys = {"family": "bert", "length": 32, "tokenizer": tokenizer, "eval_every": 1}
    batches = batches_of(config(path=prefix, **keys), tmp_path / "cache")
    assert isinstance(batches, SentencePairBatches)
    batch = batches.global_batch(0, batches.num_samples)
    ids_SB, types_SB = batch.inputs["ids_SB"], batch.inputs["token_types_SB"]
    for column, random in enumerate(batch.inputs["next_sentence_B"]):
        of_a, of_b = (
            [token for token in ids_SB[types_SB[:, column] == kind, column] if 20 <= token < 60] for kind in (0, 1)
        )
        if len(of_a) > 2 and len(of_b) > 2:  # random tokens stand in for a few
            usual = [max(set(tokens), key=tokens.count) for tokens in (of_a, of_b)]
            assert (usual[0] != usual[1]) == random
    batch = batches_of(config(blend=[1, prefix, 1, prefix], **keys), tmp_path / "cache").global_batch(0, 6)
    assert batch.inputs["ids_SB"].shape == (32, 6)
    assert batch.inputs["next_sentence_B"].shape == (6,)
    assert batch.counts[1] == 6


def test_too_few_documents_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", 2)
    assert refusals(config(path=prefix, split="1,1", eval_every=1), tmp_path / "cache") == [
        f"the {part} part of data.path {prefix} (10 tokens in 1 document at data.split=1,1) must be at least one "
        "sample of train.sequence_length + 1 (17 tokens): give more documents, a shorter sequence or another split"
        for part in ("training", "evaluation")
    ]
    data = prepare_data(config(path=prefix, split="1,1"), tmp_path / "cache", any_size=True)
    assert make_batches(config(), data, "train") is None
    assert make_evaluation_batches(config(), data, "test") is None
    assert make_batches(config(), replace(data, parts={"eval": ()}, weights=()), "eval") is None
