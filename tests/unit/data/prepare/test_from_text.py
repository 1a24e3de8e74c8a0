"""What is made of text: as the formats' readers read it, whatever happens on the way."""

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError, DataError, RunError
from shardwise.data.prepare import tokenizing
from shardwise.data.prepare.from_text import _TextConversion
from shardwise.data.prepare.output import PreparedOutput
from shardwise.data.prepare.tokenizing import TokenizingWorkers
from shardwise.data.reading.data_manifest import read_manifest, write_manifest
from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.tokens import encoding
from shardwise.data.tokens.encoding import cut_sentences
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.os_errors import raises
from tests.unit.data.prepare.jobs import Folder, Told
from tests.unit.data.small_runs import json_lines


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches of a few documents, each of them durable; pieces that end within a document."""
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 400)
    monkeypatch.setattr(tokenizing, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr("shardwise.data.reading.text_sources.PIECE_CHARACTERS", 150)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder.fill(tmp_path)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(each) for each in tokenizer.encode(text)]


@pytest.mark.parametrize(("append_eod", "prepend_bos"), [(True, True), (False, False)])
def test_megatron_files_are_those_of_a_writer(
    folder: Folder, append_eod: bool, prepend_bos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are cut into several texts each, and some of them lie in two batches."""
    monkeypatch.setattr(encoding, "_LONGEST", 100)
    folder.run(folder.job("made", append_eod=append_eod, prepend_bos=prepend_bos))
    tokenizer = folder.tokenizer
    begin = [tokenizer.token_id("[CLS]")] * prepend_bos
    with IndexedWriter(folder.at / "by-hand", tokenizer.vocab_size) as writer:
        for text in folder.documents:
            writer.add([*begin, *ids(tokenizer, text), *([tokenizer.end_of_document_id] if append_eod else [])])
    assert folder.index("made") == folder.index("by-hand")


def test_sentences_are_sequences(folder: Folder) -> None:
    folder.run(folder.job("made", split_sentences=True))
    tokenizer = folder.tokenizer
    with IndexedWriter(folder.at / "by-hand", tokenizer.vocab_size) as writer:
        for text in folder.documents:
            sentences = [ids(tokenizer, each) for each in cut_sentences(text)]
            sentences[-1].append(tokenizer.required_end())
            writer.add(list(itertools.chain(*sentences)), list(map(len, sentences)))
    assert folder.index("made") == folder.index("by-hand")


class Killed(BaseException):
    """The process is gone."""


def test_what_was_cut_off_anywhere_goes_on_to_the_same_bytes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(text.encode()) for text in folder.documents)
    replace = Path.replace
    seen = 0

    def counted(source: Path, target: Path) -> Path:
        nonlocal seen
        seen += 1
        if seen == last:
            raise Killed
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", counted)
    last = 0
    folder.run(folder.job("whole/out"))
    whole, places = folder.left("whole/"), seen
    assert places > 10
    for last in (1, places // 2, *range(places - 3, places + 1)):
        seen = 0
        with pytest.raises(Killed):
            folder.run(folder.job("part/out"))
        left = {name for name in folder.left("part/") if not name.startswith("part/.out.preparing/")}
        assert "part/out.idx" not in left, f"after {last} replacements a reader would find the data"
        told, last = Told(), 0
        done = folder.run(folder.job("part/out"), told=told)
        assert not done.was_there
        assert told.advanced in (0, size), "all text is passed, none of it twice"
        made = {name.replace("part/", "whole/"): content for name, content in folder.left("part/").items()}
        assert made.keys() == whole.keys()
        different = [name for name in whole if made[name].replace(b"part", b"whole") != whole[name]]
        assert not different, f"{different} are other bytes"
        shutil.rmtree(folder.at / "part")


def cut_off(folder: Folder, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> int:
    """Begins to prepare `out`, and ends as the 20th document is saved; returns the batches that are done then."""
    batches = 0

    def dying(self: PreparedOutput, progress: Mapping[str, Any]) -> None:
        nonlocal batches
        if error is None or progress["read"]["documents"] <= 20:
            save(self, progress)
            batches = progress["read"]["batches"]
        if progress["read"]["documents"] > 20:
            raise Killed if error is None else error

    save = PreparedOutput.save
    with monkeypatch.context() as patch:
        patch.setattr(PreparedOutput, "save", dying)
        with pytest.raises(Killed if error is None else DataError) as caught:
            folder.run(folder.job("out"))
    if error is not None:
        assert "cannot be written: No space left on device; what is finished stays in" in str(caught.value)
    return batches


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_finished_work_is_not_repeated(folder: Folder, monkeypatch: pytest.MonkeyPatch, error: OSError | None) -> None:
    done = cut_off(folder, monkeypatch, error)
    encoded = []
    rows = Tokenizer.encode_rows
    monkeypatch.setattr(
        Tokenizer, "encode_rows", lambda self, each, **o: (encoded.append(len(each)), rows(self, each, **o))[1]
    )
    told = Told()
    folder.run(folder.job("out"), told=told)
    source = _TextConversion(folder.job("x"), print).source
    expected = len(list(tokenizing.text_batches(source, False)))
    assert len(encoded) - 1 == expected - done, "one call for the estimate, one for each batch that was not done"
    assert any("continuing after" in line for line in told.lines)


@pytest.mark.parametrize("change", ["text", "tokens", "options"])
def test_what_changed_meanwhile_is_begun_anew(change: str, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(folder, monkeypatch)
    told = Told()
    if change == "text":
        json_lines(folder.at / "text.jsonl", ["other beginning", *folder.documents])
    elif change == "tokens":
        (folder.at / ".out.preparing/tokens.sizes").write_bytes(b"")
    options = {"append_eod": change != "options"}
    folder.run(folder.job("out", **options), told=told)
    assert sum(line.endswith("it starts again from the beginning") for line in told.lines) == (change != "options")
    folder.run(folder.job("fresh", **options))
    assert (folder.at / "out.bin").read_bytes() == (folder.at / "fresh.bin").read_bytes()


def test_what_is_there_is_not_made_again_and_nothing_else_is_replaced(folder: Folder) -> None:
    job = folder.job("out")
    assert not folder.run(job).was_there
    before = folder.left("out")
    assert folder.run(job).was_there
    other = folder.job("out", append_eod=False)
    with pytest.raises(DataError, match=r"out\.idx was prepared from .*text\.jsonl with .*, and now --append-eod is a"):
        folder.run(other)
    assert folder.left("out") == before
    folder.run(other, force=True)
    assert folder.left("out").keys() == before.keys()
    assert folder.left("out") != before
    json_lines(folder.at / "text.jsonl", folder.documents[:-1])
    with pytest.raises(DataError, match=r"now the text is another: name another OUTPUT, or replace it by --force"):
        folder.run(other)
    assert not list(folder.at.glob(".*preparing"))


@pytest.mark.parametrize("name", ["out.json", "out.bin"])  # the latter of a model, or raw tokens
def test_what_was_not_prepared_here_is_never_removed(folder: Folder, name: str) -> None:
    mine = folder.at / name
    mine.write_text("{}")
    with pytest.raises(DataError, match=rf"{name} is there, and was not prepared here: remove it, or name another"):
        folder.run(folder.job("out"), force=True)
    assert mine.read_text() == "{}"


def test_too_small_a_disk_is_told_before(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10_000))
    monkeypatch.setattr("shardwise.data.prepare.output._LEAST", 0)
    json_lines(folder.at / "small.jsonl", folder.documents[:5])
    folder.run(folder.job("small", "small.jsonl"))
    with pytest.raises(DataError, match=r"\(9\.8 KiB free\) must have about .* KiB free: make room"):
        folder.run(folder.job("out"))
    assert not list(folder.at.glob(".*preparing"))


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_at_once_do_not_meet(folder: Folder, has_locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", raises(errno.ENOLCK))
    first, second = (PreparedOutput(folder.at / "out", None, None, {}) for _ in range(2))
    with first._locked():
        first.clear()
        with pytest.raises(ConfigError, match="is being prepared by another process: wait for its end"):
            folder.run(folder.job("out"))
    with contextlib.ExitStack() as held:
        with first._locked():
            shutil.rmtree(first.folder)  # as when all is published
            held.enter_context(second._locked())
        assert second.folder.exists(), "the end of one removes the folder of the next"
    assert not second.folder.exists()


def test_output_lies_outside_of_the_text_and_has_a_name(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="must lie outside INPUT"):
        folder.run(folder.job("texts/out", source="."))
    texts = folder.at / "texts"
    texts.mkdir()
    (folder.at / "link").symlink_to(texts)
    for source, output in (("link", "texts/out"), ("texts", "link/out")):
        with pytest.raises(ConfigError, match="must lie outside INPUT"):
            folder.run(folder.job(output, source=source))
    for path in (Path(), Path("/"), Path("..")):
        with pytest.raises(ConfigError, match="must end in a name: add one"):
            folder.run(dataclasses.replace(folder.job("out"), output=path))


def test_several_processes_make_what_one_makes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run(folder.job("alone"))
    monkeypatch.setattr(tokenizing, "SMALL_BYTES", 0)
    monkeypatch.setattr(tokenizing, "CORES_OF_A_PROCESS", 0)
    folder.run(folder.job("several"))
    assert folder.index("several") == folder.index("alone")


def test_workers_share_out_tasks() -> None:
    with TokenizingWorkers.processes(2, None) as workers:
        assert list(workers.each(abs, range(-20, 0))) == [(task, -task) for task in range(-20, 0)]
    with (
        TokenizingWorkers.processes(1, None) as workers,
        pytest.raises(RunError, match="a process that prepares data has ended early"),
    ):
        list(workers.each(os._exit, [3]))


FACTS = {"format": "megatron", "source": {"name": "text"}, "options": {}, "documents": 1, "sequences": 1, "tokens": 3}


def test_what_was_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    assert read_manifest(path) is None
    write_manifest(path, {**FACTS, "tokenizer": {"name": "own", "sha256": 64 * "0"}})
    found = read_manifest(path)
    assert found is not None
    assert found["tokens"] == 3
    for other in ("[]", "{}", '{"kind": "shardwise.prepared", "version": 1}', "{", '{"text": "of the user"}'):
        path.write_text(other)
        assert read_manifest(path) is None, other
