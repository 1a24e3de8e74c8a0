"""What a dry run finds of data and tokenizer, in the words of `prepare`, and what an inspection tells of them."""

import gzip
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base import hub
from shardwise.base.errors import ConfigError, DataError
from shardwise.data.formats import streamed_text as stream_data
from shardwise.data.formats.data_format import DataFormat, Inspection, LengthStatistics
from shardwise.data.formats.inspections import evenly_spread
from shardwise.data.formats.prepared_data import random_tokens
from shardwise.data.open_data import FORMATS, data_format_of, prepare_data
from shardwise.data.preview import DataPreview, inspect_data, preview_data
from shardwise.data.reading.megatron_files import IndexedFile, IndexedWriter
from shardwise.data.reading.text_sources import open_text_source
from shardwise.data.request import DataRequest
from tests.unit.data import hdf5_shards
from tests.unit.data.prepare.jobs import Folder
from tests.unit.data.small_runs import config, fill, saved_tokenizer


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data of each kind, a tokenizer of 257 tokens, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("shardwise.base.hub.HubFiles.download", None)
    monkeypatch.setattr("shardwise.data.cache.lock_entry", None)
    files: dict[str, str | bytes] = {
        "one.jsonl": '{"text": "one"}\n{"text": \n',
        "bad.jsonl": '{"text": \n',
        "latin.txt": "é".encode("latin-1"),
        "empty.txt": "",
        "texts/a.txt": "a",
        "texts/b.jsonl": '{"text": "b"}\n',
        "saved/state.json": '{"_data_files": [{"filename": "data.arrow"}]}',
        "saved/dataset_info.json": "{}",
    }
    fill(tmp_path, files)
    (tmp_path / "shards").mkdir()
    hdf5_shards.write(tmp_path / "shards/a_training_0.hdf5", hdf5_shards.arrays(4))
    with IndexedWriter("tokens", 300) as writer:
        writer.add([1, 2, 3], [3])
    Path("cut.bin").write_bytes(Path("tokens.bin").read_bytes())
    Path("cut.idx").write_bytes(Path("tokens.idx").read_bytes()[:-8])
    saved_tokenizer(tmp_path / "tokenizer", "a b", 257)
    return tmp_path


def look(family: str = "llama", vocab_size: int = 300, **data: Any) -> DataPreview:
    return preview_data(config(vocab_size, family=family, steps=2, **data))


TABLES = yaml.safe_load(Path(__file__).with_name("open_data.yaml").read_text(encoding="utf-8"))
DESCRIBED = TABLES["described"]
HELD_OUT = TABLES["held out"]
REFUSED = TABLES["refused"]


@pytest.mark.parametrize(("data", "text"), DESCRIBED)
def test_what_can_be_read_is_described(data: dict[str, Any], text: str, at: Path) -> None:
    before = sorted(at.rglob("*"))
    found = look(**data)
    assert found.problems == []
    (name, shown), *others = found.rows
    # The tokenizer of a stream has 257 tokens for 300 rows.
    warned = ["warning"] if "streaming" in data else []
    assert [name, *(other for other, _ in others)] == ["data", "tokenizer", *warned, "held out"]
    assert text in shown
    assert sorted(at.rglob("*")) == before, "a dry run prepares nothing"


@pytest.mark.parametrize(
    ("data", "most"),
    [({"path": "one.jsonl"}, 26), ({"blend": [1, "tokens", 2, "tokens"]}, 6), ({"path": "packed.jsonl.gz"}, None)],
)
def test_data_that_are_read_a_hundred_times_are_warned_of(data: dict[str, Any], most: int | None, at: Path) -> None:
    """As far as files tell without reading: a token takes a byte of text at least."""
    (at / "packed.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n'))

    def warnings(steps: int) -> list[str]:
        found = preview_data(config(**data).with_keys(train={"steps": steps, "global_batch": 1}))
        assert found.problems == []
        return [text for name, text in found.rows if name == "warning"]

    few = 100 * (most or 16) // 16
    assert warnings(few) == []
    if most is None:
        assert warnings(10**9) == []
    else:
        (text,) = warnings(few + 1)
        tokens = f"{16 * (few + 1):,}"
        assert text.startswith(f"train.steps ({few + 1}) read {tokens} tokens, and the data have at most {most}: each")
        assert "is read at least 10" in text
    assert "warning" not in [name for name, _ in look(mixture={"a": {"weight": 1, **data}}).rows]


def test_a_held_out_part_has_a_row(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_on_hub", lambda wanted: "hub")
    for data, text in HELD_OUT:
        (row,) = [row for name, row in look(**data).rows if name == "held out"]
        assert row.startswith(text)
        evaluating = config(eval_every=1, steps=2, **data)
        reads = "an evaluation of the run reads its first 16 sequences at most" in evaluating.held_out_text
        assert reads is not text.startswith("nothing")


@pytest.mark.parametrize("found", ["hub", "unknown", ConfigError("no such repository")])
def test_hub_ids_are_looked_up(found: str | ConfigError, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(wanted: hub.HubFiles) -> str:
        if isinstance(found, ConfigError):
            raise found
        return found

    monkeypatch.setattr(hub, "find_on_hub", find)
    seen = look(dataset="wikitext", tokenizer="gpt2")
    if isinstance(found, ConfigError):
        assert (seen.rows, seen.problems) == ([], ["no such repository"]), "told once, of data and tokenizer"
    else:
        said = hub.FOUND[found]
        assert seen.problems == []
        assert seen.rows[:2] == [("data", f"wikitext: {said}"), ("tokenizer", f"gpt2: {said}")]


def test_what_cannot_be_read_is_refused_in_the_words_of_the_run(at: Path) -> None:
    for data, text in REFUSED:
        (problem,) = look(**data).problems
        assert text in problem
    # The numbers of a dry run are of use before there are data.
    assert look() == DataPreview([("data", "none is named: a run needs data.path, data.blend or data.dataset")], [])
    assert look(tokenizer="tokenizer").rows[1][1] == "tokenizer: 257 tokens, of model.vocab_size (300)"
    (problem,) = look(tokenizer="./nowhere").problems
    assert problem.startswith("data.tokenizer (./nowhere) must be a tokenizer's file or folder: there is none")
    with pytest.raises(ConfigError, match=r"data\.path, data\.blend or data\.dataset must name the data; for a trial"):
        prepare_data(config(), at)


def test_a_vocabulary_that_does_not_fit_the_model(at: Path) -> None:
    (problem,) = look(vocab_size=200, path="texts", tokenizer="tokenizer").problems
    assert problem == (
        "the vocabulary of data.tokenizer tokenizer (257) must be at most model.vocab_size (200): set "
        "model.vocab_size=257 (`shardwise explain vocabulary-too-small`)"
    )
    (problem,) = look(vocab_size=200, path="texts").problems
    assert problem.startswith("model.vocab_size (200) must be at least 257 ")
    row = look(path="texts", tokenizer="tokenizer").rows[1]
    assert row == ("tokenizer", "tokenizer: 257 tokens, of model.vocab_size (300)")
    assert len(look(path="nowhere", tokenizer="nowhere.json").problems) == 2, "all is reported at once"
    for rows, share in ((285, None), (600, "57%")):
        told = [text for _, text in look(vocab_size=rows, path="texts", tokenizer="tokenizer").rows]
        unused = [text for text in told if text.startswith("the tokenizer has 257 tokens, so that ")]
        assert len(unused) == (share is not None)
        assert all(f"so that {share} of the rows of" in text for text in unused)
        assert all("set model.vocab_size=257, whose" in text for text in unused)


def test_fault_13_a_dry_run_says_how_each_kind_of_file_is_read(at: Path) -> None:
    further = {
        "c.ndjson": '{"text": "c"}\n',
        "d.txt": gzip.compress(b"d"),
        "_SUCCESS": "",
        "README.md": "about the data",
    }
    fill(at / "texts", further)
    said = (
        "texts: 4 files, 50 B, read as plain text (a.txt), JSON lines (2 files) and plain text unpacked by gzip "
        "(d.txt), left out README.md and _SUCCESS, prepared when the run starts"
    )
    assert said in look(path="texts").rows[0][1]
    Path("texts/stats.json").write_text('{"rows": 2}\n')
    (problem,) = look(path="texts").problems
    assert problem.startswith("texts/stats.json: line 1 has no field 'text'")
    stream = config(path="texts", streaming=True, tokenizer="tokenizer")
    with pytest.raises(DataError, match=r"texts/stats\.json: line 1 has no field"):
        stream_data._build(at, open_text_source(stream.data), DataRequest.of(stream))
    Path("texts/stats.json").unlink()
    Path("texts/table").write_text("id,text\n1,a\n")
    (problem,) = look(path="texts").problems
    assert problem.startswith("texts/table is a table of separated values, and must be plain text")
    assert look(path="texts", format="text").problems == []
    with pytest.raises(DataError, match="texts/table is a table of separated values"):
        inspect_data("texts", 1, {})


def test_a_new_format_is_one_module_and_its_name(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command supports it then, and refuses keys that do not fit its samples."""
    module = ModuleType("shardwise.data.formats.probe")
    module.FORMAT = DataFormat(
        name="probe",
        contents="tokens",
        is_at=lambda path: path.suffix == ".probe",
        open_data=lambda _request: random_tokens(),
        preview=lambda _request: "a probe",
        inspect=lambda data, _samples: Inspection(str(data.path), "probe", 0, [], {}),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("shardwise.data.open_data.FORMATS", (*FORMATS, "probe"))
    assert data_format_of(config(path="some.probe").data) is module.FORMAT
    assert prepare_data(config(path="some.probe"), at).count("train") == random_tokens().count("train")
    rows = [("data", "some.probe: a probe"), ("tokenizer", "none, as the data hold tokens")]
    assert look(path="some.probe").rows[:2] == rows
    assert inspect_data("some.probe", 1, {}).format == "probe"
    (problem,) = look(path="some.probe", streaming=True, tokenizer="tokenizer").problems
    assert problem.endswith("whose tokens are read where they lie")


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
    monkeypatch.setattr("shardwise.data.formats.text._ENCODED_CHARACTERS", 1)
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
