"""From text to tokens through the cache: built once, checked when opened, built again when damaged."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import DataError
from shardwise.base.files import cache_root
from shardwise.config import Config
from shardwise.data import cache
from shardwise.data.formats import text as preparation
from shardwise.data.formats.prepared_data import PreparedData
from shardwise.data.formats.text import plan_text_split
from shardwise.data.open_data import prepare_data
from shardwise.data.reading.text_sources import TextPiece
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.os_errors import raises
from tests.unit.data.small_runs import refusals, sized, stories, text_of


def config(**data: str | None) -> Config:
    return sized(512, 64, 0, **data)


def entry_of(data: PreparedData) -> Path:
    return data.tokenizer_path.parent


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the tiny text."""
    root = tmp_path_factory.mktemp("filled")
    prepare_data(config(), root)
    return root


@pytest.fixture
def cached(filled: Path, tmp_path: Path) -> Path:
    """A copy of that cache, which a test may change."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def test_tokens_decode_to_the_documents(filled: Path) -> None:
    data = prepare_data(config(), filled)
    assert (data.tokens["train"].dtype, data.vocab_size) == (np.uint16, 512)
    train, held = (text_of(data, data.tokens[part]).split("<|endoftext|>") for part in ("train", "eval"))
    assert train.pop() == held.pop() == ""
    assert sorted(train + held) == sorted(stories())
    assert 0.035 < len("".join(held)) / len("".join(stories())) <= 0.05
    assert data.summary.startswith("tiny: 2")
    assert all(text in data.summary for text in ("260 documents", "vocabulary 512", "bytes per token"))
    # Golden loss curves rest on these: on every Python, and on every version of tokenizers.
    digests = [hashlib.sha256(data.tokens[part].tobytes()).hexdigest()[:16] for part in ("train", "eval")]
    assert digests == ["c6410f2f3802f4ed", "9bebad3c9ba28cf9"]
    assert data.fingerprint[:16] == "ff83a8f05fb395ac"


def test_the_second_call_opens_what_the_first_built(tmp_path: Path) -> None:
    built: list[str] = []
    first = prepare_data(config(), tmp_path, announce=built.append)
    inode = (entry_of(first) / "train.bin").stat().st_ino
    second = prepare_data(config(), tmp_path, announce=built.append)
    (line,) = built
    assert "tiny" in line
    assert str(tmp_path) in line
    assert (entry_of(second) / "train.bin").stat().st_ino == inode
    assert second.fingerprint == first.fingerprint
    assert prepare_data(sized(400, 64, 0), tmp_path).fingerprint != first.fingerprint
    assert prepare_data(config(split="90,10"), tmp_path).fingerprint != first.fingerprint
    assert prepare_data(sized(512, 32, 0, split="19,1"), tmp_path).tokenizer_path == first.tokenizer_path
    # An evaluation opens it by the tokenizer that was trained, and its tokens are those that it would prepare itself.
    shutil.copytree(first.tokenizer_path, tmp_path / "checkpoint")
    named = config(tokenizer=str(tmp_path / "checkpoint"))
    evaluated = prepare_data(named, tmp_path, announce=built.append)
    assert (len(built), entry_of(evaluated)) == (1, entry_of(first))
    itself = prepare_data(named, tmp_path / "other")
    assert itself.fingerprint == first.fingerprint
    assert np.array_equal(itself.tokens["eval"], evaluated.tokens["eval"])


def test_fault_13_equal_text_is_equal_data_wherever_and_beside_what_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("".join(stories()[:80]), encoding="utf-8")
    chosen = sized(300, 64, 0, path=str(tmp_path / "one"))
    first = prepare_data(chosen, tmp_path / "cache")
    second = prepare_data(sized(300, 64, 0, path=str(tmp_path / "two")), tmp_path / "other")
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.tokens["train"], second.tokens["train"])
    (tmp_path / "one" / "_SUCCESS").touch()
    again = prepare_data(chosen, tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert again.summary == f"{first.summary}, left out _SUCCESS", "fault 13: each start says so"
    text = (tmp_path / "one/a.txt").read_text(encoding="utf-8")
    (tmp_path / "one/a.txt").write_text(text[::-1], encoding="utf-8")
    assert prepare_data(chosen, tmp_path / "cache").fingerprint != first.fingerprint, "other text is prepared anew"


def test_a_single_file_holds_its_end_out(tmp_path: Path) -> None:
    text = "".join(stories())
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = prepare_data(sized(512, 64, 1, path=str(tmp_path / "a.txt")), tmp_path / "cache")
    train, held = text_of(data, data.tokens["train"]), text_of(data, data.tokens["eval"])
    assert train + held == text + "<|endoftext|>"
    assert train.endswith("\n")
    assert 0.04 < len(held) / len(text) <= 0.051


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: tuple[tuple[str, Callable[[Path], object]], ...] = (
    ("train.bin", truncate),
    ("train.bin", alter),
    ("eval.bin", Path.unlink),
    ("manifest.json", lambda file: file.write_text('{"format": 1}')),
    ("tokenizer/tokenizer.json", lambda file: file.write_bytes(b"")),
)


def test_a_damaged_entry_is_built_anew(cached: Path) -> None:
    first = prepare_data(config(), cached)
    fingerprint, tokens = first.fingerprint, np.array(first.tokens["train"])
    built: list[str] = []
    for number, (name, damage) in enumerate(DAMAGES, start=1):
        damage(entry_of(first) / name)
        second = prepare_data(config(), cached, announce=built.append)
        assert len(built) == number, name
        assert second.fingerprint == fingerprint
        assert np.array_equal(second.tokens["train"], tokens)
        assert [path.name for path in (cached / "tokens").iterdir()] == [entry_of(second).name]


def test_large_files_are_checked_in_blocks_and_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    with file.open("wb") as stream:
        stream.truncate(40 << 20)
    digests = [cache.spread_digest(file)]
    for at in (0, (40 << 20) - 1):
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"\x01")
        digests.append(cache.spread_digest(file))
    assert len(set(digests)) == 3
    assert cache.token_dtype(1 << 16) == np.dtype("uint16")
    assert cache.token_dtype((1 << 16) + 1) == np.dtype("int32")


def test_a_preparation_that_ends_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cache.TokenWriter, "write", raises(errno.ENOSPC))
        with pytest.raises(DataError, match=r"cannot be written: No space left on device; set SHARDWISE_CACHE"):
            prepare_data(config(), tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []
    with monkeypatch.context() as patch:  # without locks, too, it is built
        patch.setattr(fcntl, "flock", raises(errno.ENOLCK))
        entry = entry_of(prepare_data(config(), tmp_path))
    entry.rename(entry.with_name(f".building-{entry.name}-1-abc"))  # as a killed builder leaves it
    prepare_data(config(), tmp_path)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [entry.name]


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(stories()), encoding="utf-8")
    train = preparation.train_tokenizer

    def train_and_change(*arguments: object, **options: object) -> Tokenizer:
        tokenizer = train(*arguments, **options)
        with file.open("a") as stream:
            stream.write("more")
        return tokenizer

    monkeypatch.setattr(preparation, "train_tokenizer", train_and_change)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare_data(config(path=str(file)), tmp_path / "cache")


def _prepare_at(root: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    built: list[str] = []
    data = prepare_data(config(), Path(root), announce=built.append)
    results.put((data.fingerprint, int(data.tokens["train"].sum(dtype=np.int64)), len(built)))


def test_processes_at_once_build_a_damaged_entry_once(cached: Path) -> None:
    truncate(entry_of(prepare_data(config(), cached)) / "train.bin")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_prepare_at, args=(str(cached), barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len({(fingerprint, total) for fingerprint, total, _ in found}) == 1
    assert sum(built for _, _, built in found) == 1


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(stories()[:3]), encoding="utf-8")
    problems = refusals(sized(270, 4000, 5, path=str(path)), tmp_path / "cache")
    for part, problem in zip(("training", "evaluation"), problems, strict=True):
        assert problem.startswith(f"the {part} part of data.path {path} (")
        assert "must be at least one sample of train.sequence_length + 1 (4,001 tokens)" in problem
    assert prepare_data(sized(270, 1000, 0, path=str(path)), tmp_path / "cache").vocab_size == 270


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHARDWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache/shardwise"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x/shardwise"
    monkeypatch.setenv("SHARDWISE_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"
    assert cache_root(tmp_path / "argument") == tmp_path / "argument"
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written: Not a directory; set SHARDWISE_CACHE"):
        prepare_data(config(), tmp_path / "file")


def test_a_settled_source_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is known by the stamps of its files."""
    monkeypatch.setattr("shardwise.data.reading.text_sources._SETTLED_SECONDS", -1.0)
    prepare_data(config(), tmp_path)
    monkeypatch.setattr(preparation, "_scan", None)
    prepare_data(config(), tmp_path)


def divided(texts: list[list[str]], weights: tuple[float, float]) -> tuple[dict[str, str], bool]:
    sizes = np.array([sum(map(len, document)) for document in texts], dtype=np.int64)
    split = plan_text_split(sizes, weights)
    pieces = [TextPiece(text, at == len(document) - 1) for document in texts for at, text in enumerate(document)]
    parts = {"train": "", "eval": ""}
    for part, piece in split.parts(pieces):
        parts[part] += piece.text + ("|" if piece.ends_document else "")
    return parts, split.held_out is not None


def test_documents_are_held_out_whole_and_a_long_one_by_its_end() -> None:
    texts = [[f"document {number}\n" * (number % 7 + 1)] for number in range(400)]
    parts, whole = divided(texts, (95, 5))
    assert whole
    held = [text for text in parts["eval"].split("|") if text]
    assert set(held) <= {document[0] for document in texts}
    total = sum(len(document[0]) for document in texts)
    assert 0.75 * 0.05 <= sum(map(len, held)) / total <= 0.05
    assert (divided(texts, (95, 5))[0], divided(texts, (0.95, 0.05))[0]) == (parts, parts)
    held_out = plan_text_split(np.full(1000, 10, dtype=np.int64), (90, 10)).held_out
    assert all(part.any() for part in np.array_split(held_out, 10))
    lines = [f"line {number:04d}\n" for number in range(1000)]
    parts, whole = divided([["".join(lines[:300]), "".join(lines[300:])]], (9, 1))
    assert not whole
    assert parts["train"] + parts["eval"] == "".join(lines) + "|"
    assert parts["eval"].startswith("line 09")
    # Without lines at the share, and nothing at the weight 0.
    assert divided([["abcdefghij"]], (80, 20))[0] == {"train": "abcdefgh", "eval": "ij|"}
    assert divided([["abcdefghi\n"]], (80, 20))[0] == {"train": "abcdefgh", "eval": "i\n|"}
    assert divided([["abc"], ["def"]], (1, 0))[0] == {"train": "abc|def|", "eval": ""}


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.lists(st.text("ab\n", min_size=1, max_size=30), min_size=1, max_size=3), min_size=1, max_size=30),
    weights=st.tuples(st.floats(0.1, 100), st.floats(0, 100)),
)
def test_every_character_is_in_one_part(texts: list[list[str]], weights: tuple[float, float]) -> None:
    parts, whole = divided(texts, weights)
    everything = ["".join(document) for document in texts]
    if whole:
        assert sorted((parts["train"] + parts["eval"]).split("|")) == sorted([*everything, ""])
    else:
        assert parts["train"].replace("|", "") + parts["eval"].replace("|", "") == "".join(everything)
    share = sum(map(len, everything)) * weights[1] / sum(weights)
    assert share < 1 or parts["eval"]
