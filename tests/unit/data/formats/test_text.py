"""From text to tokens through the cache: built once, checked when opened, built again when damaged."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.base.files import cache_root
from shardwise.config import Config, config_from
from shardwise.data import cache
from shardwise.data.formats import text as preparation
from shardwise.data.formats.common import PreparedData
from shardwise.data.open_data import prepare
from shardwise.data.tokens.tokenizer import Tokenizer


def config(**data: str | None) -> Config:
    return sized(512, 64, 0, **data)


def sized(vocab_size: int, sequence_length: int, eval_every: int, **data: str | None) -> Config:
    return config_from(
        {
            "model": {
                "family": "llama",
                "vocab_size": vocab_size,
                "hidden_size": 64,
                "intermediate_size": 176,
                "num_hidden_layers": 8,
                "num_attention_heads": 4,
                "max_position_embeddings": 4096,
            },
            "train": {"steps": 1, "global_batch": 2, "sequence_length": sequence_length, "eval_every": eval_every},
            "optimizer": {"lr": 1e-3},
            "data": {"dataset": "tiny", **data},
        }
    )


def text_of(data: PreparedData, tokens: np.ndarray) -> str:
    return Tokenizer.load(data.tokenizer_path).decode(tokens)


def stories() -> list[str]:
    path = Path(cache.__file__).parent / "corpus" / "tiny.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def entry_of(data: PreparedData) -> Path:
    return data.tokenizer_path.parent


def test_tokens_decode_to_the_documents(tmp_path: Path) -> None:
    data = prepare(config(), tmp_path)
    assert data.tokens["train"].dtype == np.uint16
    assert data.vocab_size == 512
    train = text_of(data, data.tokens["train"]).split("<|endoftext|>")
    held = text_of(data, data.tokens["eval"]).split("<|endoftext|>")
    assert train.pop() == held.pop() == ""
    assert sorted(train + held) == sorted(stories())
    assert 0.035 < len("".join(held)) / len("".join(stories())) <= 0.05
    assert data.summary.startswith("tiny: 2")
    assert "260 documents" in data.summary
    assert "vocabulary 512" in data.summary
    assert "bytes per token" in data.summary


def test_the_tokens_of_the_tiny_corpus_stay_the_same(tmp_path: Path) -> None:
    """Golden loss curves rest on them: on every Python, and on every version of tokenizers."""
    data = prepare(config(), tmp_path)
    assert hashlib.sha256(data.tokens["train"].tobytes()).hexdigest()[:16] == "c6410f2f3802f4ed"
    assert hashlib.sha256(data.tokens["eval"].tobytes()).hexdigest()[:16] == "9bebad3c9ba28cf9"
    assert data.fingerprint[:16] == "ff83a8f05fb395ac"


def test_the_second_call_opens_what_the_first_built(tmp_path: Path) -> None:
    built: list[str] = []
    first = prepare(config(), tmp_path, announce=built.append)
    inode = (entry_of(first) / "train.bin").stat().st_ino
    second = prepare(config(), tmp_path, announce=built.append)
    assert len(built) == 1
    assert "tiny" in built[0]
    assert str(tmp_path) in built[0]
    assert (entry_of(second) / "train.bin").stat().st_ino == inode
    assert second.fingerprint == first.fingerprint
    assert prepare(sized(400, 64, 0), tmp_path).fingerprint != first.fingerprint
    assert prepare(config(split="90,10"), tmp_path).fingerprint != first.fingerprint
    assert prepare(sized(512, 32, 0, split="19,1"), tmp_path).tokenizer_path == first.tokenizer_path


def test_the_start_says_how_many_documents_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *stories(), ""]), encoding="utf-8")
    said: list[str] = []
    data = prepare(config(dataset=None, path=str(path)), tmp_path / "cache", announce=said.append)
    assert f"{path}: 2 empty documents left out" in said
    assert data.fingerprint == prepare(config(), tmp_path / "cache").fingerprint


def test_an_evaluation_opens_what_the_training_prepared(tmp_path: Path) -> None:
    """It names the tokenizer that was trained, and its tokens are those that it would prepare itself."""
    built: list[str] = []
    trained = prepare(config(), tmp_path / "cache", announce=built.append)
    shutil.copytree(trained.tokenizer_path, tmp_path / "checkpoint")
    named = config(tokenizer=str(tmp_path / "checkpoint"))
    evaluated = prepare(named, tmp_path / "cache", announce=built.append)
    assert len(built) == 1
    assert entry_of(evaluated) == entry_of(trained)
    itself = prepare(named, tmp_path / "other")
    assert itself.fingerprint == trained.fingerprint
    assert np.array_equal(itself.tokens["eval"], evaluated.tokens["eval"])


def test_fault_13_equal_text_is_equal_data_wherever_and_beside_what_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("".join(stories()[:80]), encoding="utf-8")
    first = prepare(sized(300, 64, 0, path=str(tmp_path / "one")), tmp_path / "cache")
    second = prepare(sized(300, 64, 0, path=str(tmp_path / "two")), tmp_path / "other")
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.tokens["train"], second.tokens["train"])
    (tmp_path / "one" / "_SUCCESS").touch()
    again = prepare(sized(300, 64, 0, path=str(tmp_path / "one")), tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert again.summary == f"{first.summary}, left out _SUCCESS", "fault 13: each start says so"


def test_changed_text_is_prepared_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    text = "".join(stories()[:80])
    file.write_text(text, encoding="utf-8")
    chosen = sized(300, 64, 0, path=str(file))
    first = prepare(chosen, tmp_path / "cache")
    file.write_text(text[::-1], encoding="utf-8")
    assert prepare(chosen, tmp_path / "cache").fingerprint != first.fingerprint


def test_a_single_file_holds_its_end_out(tmp_path: Path) -> None:
    text = "".join(stories())
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = prepare(sized(512, 64, 1, path=str(tmp_path / "a.txt")), tmp_path / "cache")
    train, held = text_of(data, data.tokens["train"]), text_of(data, data.tokens["eval"])
    assert train + held == text + "<|endoftext|>"
    assert train.endswith("\n")
    assert 0.04 < len(held) / len(text) <= 0.051


def test_a_users_tokenizer_is_used_and_exported(tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(prepare(config(), tmp_path / "a").tokenizer_path, own)
    data = prepare(sized(100_000, 64, 0, tokenizer=str(own)), tmp_path / "b")
    assert data.vocab_size == 512
    assert np.array_equal(data.tokens["train"], prepare(config(), tmp_path / "a").tokens["train"])
    with pytest.raises(DataError, match=r"\(512\) must be at most model\.vocab_size \(511\)"):
        prepare(sized(511, 64, 0, tokenizer=str(own)), tmp_path / "b")
    assert not list((tmp_path / "b" / "tokens").glob(".*"))


def test_large_vocabularies_take_four_bytes() -> None:
    assert cache.token_dtype(1 << 16) == np.dtype("uint16")
    assert cache.token_dtype((1 << 16) + 1) == np.dtype("int32")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {"truncate": truncate, "alter": alter, "unlink": Path.unlink, "empty": lambda file: file.write_bytes(b"")}
FILES = ("train.bin", "eval.bin", "manifest.json", "tokenizer/tokenizer.json")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, change, id=f"{name}-{kind}", marks=() if number % 4 in (0, 3) else pytest.mark.slow)
        for row, name in enumerate(FILES)
        for number, (kind, change) in enumerate(DAMAGES.items(), start=row)
    ],
)
def test_a_damaged_entry_is_built_anew(tmp_path: Path, name: str, damage: object) -> None:
    first = prepare(config(), tmp_path)
    fingerprint, tokens = first.fingerprint, np.array(first.tokens["train"])
    if damage is alter and name == "manifest.json":
        (entry_of(first) / name).write_text('{"format": 1}', encoding="utf-8")
    else:
        damage(entry_of(first) / name)  # type: ignore[operator]
    built: list[str] = []
    second = prepare(config(), tmp_path, announce=built.append)
    assert len(built) == 1
    assert second.fingerprint == fingerprint
    assert np.array_equal(second.tokens["train"], tokens)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [entry_of(second).name]


def test_large_files_are_checked_in_blocks(tmp_path: Path) -> None:
    file = tmp_path / "large.bin"
    with file.open("wb") as stream:
        stream.truncate(40 << 20)
    before = cache.spread_digest(file)
    for at in (0, (40 << 20) - 1):
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"\x01")
        after = cache.spread_digest(file)
        assert after != before
        before = after


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    entry = entry_of(prepare(config(), tmp_path))
    leftover = entry.with_name(f".building-{entry.name}-1-abc")
    entry.rename(leftover)
    prepare(config(), tmp_path)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [entry.name]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.TokenWriter, "write", fail)
    with pytest.raises(DataError, match=r"cannot be written: No space left on device; set SHARDWISE_CACHE"):
        prepare(config(), tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("".join(stories()), encoding="utf-8")
    train = preparation.train_tokenizer

    def train_and_change(*arguments: object, **options: object) -> Tokenizer:
        tokenizer = train(*arguments, **options)  # type: ignore[arg-type]
        with file.open("a") as stream:
            stream.write("more")
        return tokenizer

    monkeypatch.setattr(preparation, "train_tokenizer", train_and_change)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(config(path=str(file)), tmp_path / "cache")


def _prepare_at(root: str, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    built: list[str] = []
    data = prepare(config(), Path(root), announce=built.append)
    results.put((data.fingerprint, int(data.tokens["train"].sum(dtype=np.int64)), len(built)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_many_processes_at_once_build_once(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        truncate(entry_of(prepare(config(), tmp_path)) / "train.bin")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_prepare_at, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len({(fingerprint, total) for fingerprint, total, _ in found}) == 1
    assert sum(built for _, _, built in found) == 1


def test_a_file_system_without_locks_still_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert len(prepare(config(), tmp_path).tokens["train"]) > 0


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(stories()[:3]), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        prepare(sized(270, 4000, 5, path=str(tmp_path / "a.txt")), tmp_path / "cache")
    assert len(caught.value.problems) == 2
    for part, problem in zip(("training", "evaluation"), caught.value.problems, strict=True):
        assert problem.startswith(f"the {part} part of data.path {tmp_path}/a.txt (")
        assert "must be at least one sample of train.sequence_length + 1 (4,001 tokens)" in problem
    assert prepare(sized(270, 1000, 0, path=str(tmp_path / "a.txt")), tmp_path / "cache").vocab_size == 270


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
        prepare(config(), tmp_path / "file")


def test_a_settled_source_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start takes no time: the text is known by the stamps of its files."""
    monkeypatch.setattr("shardwise.data.reading.text_sources._SETTLED_SECONDS", -1.0)
    prepare(config(), tmp_path)
    monkeypatch.setattr(preparation, "_scan", None)
    start = time.process_time()
    prepare(config(), tmp_path)
    assert time.process_time() - start < 0.2


def test_torch_is_never_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from shardwise.config import load_config
from shardwise.data.open_data import prepare
from shardwise.data.request import DataRequest
prepare(load_config("llama2-tiny", []), Path({str(tmp_path)!r}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
