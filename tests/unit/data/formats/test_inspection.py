"""What is told of lengths, and of data in parts that a user would not look for."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import DataError
from shardwise.data.formats import text
from shardwise.data.formats.data_format import Inspection, LengthStatistics
from shardwise.data.formats.inspections import evenly_spread
from shardwise.data.preview import inspect_data
from shardwise.data.reading.megatron_files import IndexedFile
from tests.unit.data.prepare.jobs import Folder


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50))
def test_each_length_is_in_one_bin(values: list[int]) -> None:
    found = LengthStatistics.of("tokens", np.array(values), len(values))
    assert (found.least, found.most) == (min(values), max(values))
    assert sum(number for _, _, number in found.bins) == len(values)
    for low, high, number in found.bins:
        assert low <= high
        assert number == sum(low <= value <= high for value in values)
    assert [low for low, _, _ in found.bins[1:]] == [high + 1 for _, high, _ in found.bins[:-1]]
    assert len(found.bins) <= 22
    assert (evenly_spread(3, 10).tolist(), evenly_spread(1000, 4).tolist()) == ([0, 1, 2], [0, 333, 666, 999])


def looked(path: Path, tokenizer: Path | None = None, packed_length: int | None = None) -> Inspection:
    return inspect_data(str(path), 2, {"tokenizer": None if tokenizer is None else str(tokenizer)}, packed_length)


def test_packed_samples_are_shown_in_place_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.fill(tmp_path)
    folder.run(folder.job("out"))
    lengths = IndexedFile.open(tmp_path / "out").sizes - 1
    length = int(lengths.max())
    found = looked(tmp_path / "out", packed_length=length)
    facts = found.counts["packing"]
    assert (facts["targets"], facts["cut"]) == (lengths.sum(), 0)
    assert facts["places"] == length * facts["samples"] >= lengths.sum()
    row = dict(found.rows)["samples"]
    assert row.startswith("packed by best fit: ")
    assert "looked at" not in row
    for sample in found.samples:
        shown = [piece.partition(" ") for piece in str(sample.text).split(" ‖ ")]
        assert sum(int(size) for size, _, _ in shown) == length
        for _, _, text_of_piece in shown:
            if "of padding" not in text_of_piece:
                beginning = text_of_piece.partition(": ")[2][:20]
                assert any(document.startswith(beginning) for document in folder.documents)
    of_text = looked(tmp_path / "text.jsonl", tmp_path / "tokenizer", length)
    assert of_text.counts["packing"] == facts, "text and the tokens made of it"
    monkeypatch.setattr(text, "_ENCODED_CHARACTERS", 1)
    row = dict(looked(tmp_path / "text.jsonl", tmp_path / "tokenizer", length).rows)["samples"]
    assert row.endswith("; looked at: the first 1 document")
    with pytest.raises(DataError, match=r"is text, whose samples need data\.tokenizer"):
        looked(tmp_path / "text.jsonl", packed_length=8)
    with pytest.raises(DataError, match="--sequence-length must be left out with PATH"):
        inspect_data(str(tmp_path / "text.jsonl"), 1, {"format": "chat"}, 8)


def test_samples_are_text_where_a_tokenizer_is_at_hand(tmp_path: Path) -> None:
    folder = Folder.fill(tmp_path)
    folder.run(folder.job("out"))
    found = looked(tmp_path / "out")
    assert folder.documents[0].startswith(str(found.samples[0].text)[:40])
    assert not found.notes
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    found = looked(tmp_path / "out")
    assert found.samples[0].text is None
    assert "is not here, name it by --tokenizer" in found.notes[0]
    assert looked(tmp_path / "out", tmp_path / "moved").samples[0].text is not None
