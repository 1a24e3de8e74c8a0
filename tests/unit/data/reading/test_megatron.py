"""Megatron's .bin and .idx: byte for byte what the format says, and one sentence for each way to break them."""

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import DataError
from shardwise.data.reading import megatron_files as indexed
from shardwise.data.reading.megatron_files import IndexedFile, IndexedWriter, is_megatron_file, megatron_dtype
from tests.os_errors import raises

# Three documents: one of two sequences, an empty one, one of one sequence.
TOKENS = [5, 1, 2, 3, 65499, 7]
SIZES, POINTERS, DOCUMENTS = [2, 3, 1], [0, 4, 10], [0, 2, 2, 3]


def idx_bytes(
    sizes: list[int] = SIZES,
    pointers: list[int] = POINTERS,
    documents: list[int] = DOCUMENTS,
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
) -> bytes:
    """By the format's definition."""
    content = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    content += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(documents))
    content += struct.pack(f"<{len(sizes)}i", *sizes)
    content += struct.pack(f"<{len(pointers)}q", *pointers)
    return content + struct.pack(f"<{len(documents)}q", *documents)


def by_hand(folder: Path, idx: bytes | None = None, tokens: bytes | None = None) -> Path:
    prefix = folder / "data"
    (folder / "data.idx").write_bytes(idx_bytes() if idx is None else idx)
    (folder / "data.bin").write_bytes(struct.pack("<6H", *TOKENS) if tokens is None else tokens)
    return prefix


def write(prefix: Path, documents: list[list[list[int]]], vocab_size: int) -> None:
    """Documents in sequences of tokens."""
    with IndexedWriter(prefix, vocab_size) as writer:
        for sequences in documents:
            writer.add([token for sequence in sequences for token in sequence], [len(each) for each in sequences])


@pytest.mark.parametrize(("vocab_size", "code", "letter", "width"), [(65499, 8, "H", 2), (65500, 4, "i", 4)])
def test_files_follow_the_definition(vocab_size: int, code: int, letter: str, width: int, tmp_path: Path) -> None:
    tokens = [token % vocab_size for token in TOKENS]
    assert megatron_dtype(vocab_size) == np.dtype({2: "uint16", 4: "int32"}[width])
    write(tmp_path / "data", [[tokens[:2], tokens[2:5]], [], [tokens[5:]]], vocab_size)
    pointers = [pointer // 2 * width for pointer in POINTERS]
    assert (tmp_path / "data.idx").read_bytes() == idx_bytes(pointers=pointers, code=code)
    assert (tmp_path / "data.bin").read_bytes() == struct.pack(f"<6{letter}", *tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    # A document is one sequence unless its sizes are given.
    with IndexedWriter(tmp_path / "data", vocab_size) as writer:
        for document in (np.array([1, 2, 3], dtype=np.uint16), [], [4]):
            writer.add(document)
    file = IndexedFile.open(tmp_path / "data")
    assert (file.sizes.tolist(), file.documents.tolist()) == ([3, 1], [0, 1, 1, 2])
    assert file.pointers.tolist() == [0, 3 * width]


def test_fault_15_pointers_of_32_bits_are_computed_again(tmp_path: Path) -> None:
    """As Megatron wrote them while it added up numbers of 32 bits: those beyond 2 GiB are negative, or begin again."""
    sizes = [2**30 - 1, 2**30, 2**30, 5, 1]
    starts = [2 * sum(sizes[:number]) for number in range(6)]
    wrapped = [(start + 2**31) % 2**32 - 2**31 for start in starts[:-1]]
    assert min(wrapped) < 0
    by_hand(tmp_path, idx_bytes(sizes, wrapped, [0, 2, 5]))
    with (tmp_path / "data.bin").open("wb") as file:  # a file with a hole takes no room
        file.seek(starts[3])
        file.write(struct.pack("<6H", *TOKENS))
    data = IndexedFile.open(tmp_path / "data")
    assert data.pointers.tolist() == starts[:-1]
    assert data.starts(np.arange(3)).tolist() == [0, sizes[0] + sizes[1], sum(sizes)]
    assert data.tokens[data.sequence_starts(np.array([3]))[0] :].tolist() == TOKENS
    (tmp_path / "data.bin").write_bytes(b"")
    told = r"copy both again, or prepare the data again: from sequence 2 on, the pointers have overflowed 32 bits"
    with pytest.raises(DataError, match=told):
        IndexedFile.open(tmp_path / "data")
    by_hand(tmp_path, idx_bytes(sizes, [*wrapped[:-1], wrapped[-1] + 2], [0, 2, 5]))
    with pytest.raises(DataError, match=r"the pointer of sequence 4 \(.*\) must be .*, its first byte"):
        IndexedFile.open(tmp_path / "data")


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (3, "h"), (5, "q")])
def test_every_kind_of_integer_is_read(code: int, letter: str, tmp_path: Path) -> None:
    width = struct.calcsize(letter)
    idx = idx_bytes(pointers=[pointer // 2 * width for pointer in POINTERS], code=code)
    prefix = by_hand(tmp_path, idx, struct.pack(f"<6{letter}", 5, 1, 2, 3, 4, 7))
    file = IndexedFile.open(prefix)
    assert file.tokens.tolist() == [5, 1, 2, 3, 4, 7]
    assert file.starts(np.arange(4)).tolist() == [0, 5, 5, 6]


@settings(deadline=None, max_examples=25)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 299), max_size=5), max_size=4), min_size=1, max_size=8),
    block=st.integers(1, 5),
)
def test_what_is_written_is_read(
    documents: list[list[list[int]]], block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "data"
    flat = [token for sequences in documents for sequence in sequences for token in sequence]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(indexed, "_BLOCK", block)
        write(prefix, documents, 300)
        if not flat:
            with pytest.raises(DataError, match=r"holds no documents|it is empty"):
                IndexedFile.open(prefix)
            return
        file = IndexedFile.open(prefix)
    assert file.tokens.tolist() == flat
    assert file.sizes.tolist() == [len(sequence) for sequences in documents for sequence in sequences]
    assert np.diff(file.documents).tolist() == [len(sequences) for sequences in documents]
    lengths = [sum(map(len, sequences)) for sequences in documents]
    assert np.diff(file.starts(np.arange(len(documents) + 1))).tolist() == lengths


COUNT = struct.pack("<Q", 2**60)
BROKEN: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "a header cut short": (idx_bytes()[:33], None, r"its size \(33 bytes\) must be at least 34"),
    "magic": (idx_bytes(magic=b"MMIDIDX\x00\x01"), None, r"byte 0, the magic \(.*\), must be .*: it is no \.idx of"),
    "version": (idx_bytes(version=2), None, r"byte 9, the version \(2\), must be 1: it is no"),
    "floating dtype": (idx_bytes(code=7), None, r"dtype code \(7\), must be"),
    "no documents": (idx_bytes([], [], [0]), b"", r"sequences and documents \(0 and 0\), must be 1 or more each"),
    "no tokens": (idx_bytes([0], [0], [0, 1]), b"", r"data\.bin must hold tokens, and it is empty"),
    "multimodal": (idx_bytes() + bytes(3), None, r"a byte for each of its 3 sequences, as data of several media have"),
    "truncated": (idx_bytes()[:-3], None, r"its size \(99 bytes\) must be 102, for 3 sequences and 3 documents"),
    "absurd count": (idx_bytes()[:18] + COUNT + idx_bytes()[26:], None, r"for 1152921504606846976 sequences"),
    "negative size": (idx_bytes([2, -3, 1]), None, r"sequence 1 \(-3 tokens\) must have 0 tokens or more"),
    "documents that begin late": (idx_bytes(documents=[1, 2, 2, 3]), None, r"bound \(1, 3\) must be 0 and 3"),
    "a short .bin": (
        None,
        bytes(10),
        r"data\.bin \(10 bytes\) must have 12 bytes, as data\.idx says: it was cut off, or the two belong to diff",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_each_fault_is_one_sentence(fault: str, tmp_path: Path) -> None:
    idx, tokens, text = BROKEN[fault]
    prefix = by_hand(tmp_path, idx, tokens)
    with pytest.raises(DataError, match=text) as caught:
        IndexedFile.open(prefix)
    assert len(caught.value.problems) == 1
    assert str(tmp_path) in str(caught.value)


def test_missing_files_are_named_both(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        IndexedFile.open(tmp_path / "none")
    names = [f"{tmp_path}/none.bin", f"{tmp_path}/none.idx"]
    assert [problem.split(" ")[0] for problem in caught.value.problems] == names
    by_hand(tmp_path)
    (tmp_path / "data.idx").unlink()
    told = r"data\.idx does not exist: data\.format=megatron reads data\.bin and data\.idx"
    with pytest.raises(DataError, match=told):
        IndexedFile.open(tmp_path / "data.bin")
    assert is_megatron_file(tmp_path / "data")


def test_opening_reads_nothing_of_the_tokens(tmp_path: Path) -> None:
    """100 GB, of which the disk holds nothing."""
    size, sequences = 2**31 - 1, 25
    pointers, documents = [2 * size * i for i in range(sequences)], [*range(sequences + 1)]
    prefix = by_hand(tmp_path, idx_bytes([size] * sequences, pointers, documents))
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(2 * size * sequences)
    opened = IndexedFile.open(prefix)
    assert opened.tokens.nbytes > 100e9
    assert opened.starts(np.array([sequences])).tolist() == [size * sequences]
    assert opened.digest == IndexedFile.open(prefix).digest
    assert (tmp_path / "data.bin").stat().st_blocks == 0


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data", [[[1, 2]]], 100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match=r"document 1: token 1 \(100\) must be in 0 … 99, the vocabulary"):
        write(tmp_path / "data", [[[1, 2]], [[3, 100]]], 100)
    told = r"document 0: the sizes of its sequences \(2 tokens\) must add up to its tokens"
    with pytest.raises(DataError, match=told), IndexedWriter(tmp_path / "other", 100) as writer:
        writer.add([1, 2, 3], [2])
    monkeypatch.setattr(os, "fsync", raises(errno.ENOSPC))
    told = r"other cannot be written: No space left on device; name a place that has room"
    with pytest.raises(DataError, match=told):
        write(tmp_path / "other", [[[1, 2]]], 100)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("moment", range(5))
def test_a_killed_writer_leaves_whole_data(moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each flush to the disk: what lies there is no data, or all of the new ones; never the old with the new."""
    write(tmp_path / "data", [[[1, 2, 3]]], 100)
    reached = []
    flush = os.fsync

    class KilledError(BaseException):
        pass

    def count(descriptor: int) -> None:
        flush(descriptor)
        reached.append(descriptor)
        if len(reached) == moment + 1:
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", count)
        with pytest.raises(KilledError):
            write(tmp_path / "data", [[[4, 5, 6]]], 100)
    if moment in (0, 1):
        assert IndexedFile.open(tmp_path / "data").tokens.tolist() == [1, 2, 3]
    elif moment in (2, 3):
        with pytest.raises(DataError, match=r"data\.idx does not exist"):
            IndexedFile.open(tmp_path / "data")
    else:
        assert IndexedFile.open(tmp_path / "data").tokens.tolist() == [4, 5, 6]


def test_all_tokens_are_on_the_disk_before_they_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: dict[int, int] = {}
    monkeypatch.setattr(os, "fsync", lambda file: flushed.update({os.fstat(file).st_ino: os.fstat(file).st_size}))
    write(tmp_path / "data", [[[1, 2, 3]]], 100)
    for suffix in (".bin", ".idx"):
        found = (tmp_path / f"data{suffix}").stat()
        assert flushed[found.st_ino] == found.st_size > 0, suffix
