"""Headers: the library reads what we write, we read what it writes, and nothing crafted gets through."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from shardwise.checkpoint.format.safetensors import read_header, safetensors_header
from shardwise.checkpoint.storage.root import DamageError, Root


def test_the_library_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    values = {
        "ä": np.arange(6, dtype=np.float32).reshape(2, 3),
        "one": np.float64(2.5).reshape(()),
        "none": np.zeros((0, 4)),
    }
    described = [(name, "F32" if v.dtype == np.float32 else "F64", v.shape) for name, v in values.items()]
    head, offsets, total = safetensors_header(described, {"format": "pt"})
    assert len(head) % 8 == 0
    data = head + b"".join(v.tobytes() for v in values.values())
    assert len(data) == total
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118  it is no mapping
    assert found == {name: v.tolist() for name, v in values.items()}
    assert [tensor.start for tensor in read_header(Root.of(path)).values()] == offsets
    values = {"a": np.arange(3, dtype=np.int64), "b": np.ones((2, 2), dtype=np.float16)}
    path = tmp_path / "x.safetensors"
    save_file(values, path)
    data = path.read_bytes()
    for name, stored in read_header(Root.of(path)).items():
        assert stored.shape == values[name].shape
        assert data[stored.start : stored.stop] == values[name].tobytes()


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD: dict[str, tuple[Any, str]] = {
    "no object": ([], "x is damaged: its header cannot be used: it is no JSON object"),
    "wrong size": ({"a": {**F32, "shape": [3]}}, "a has 8 bytes, and its shape needs 12"),
    "overlap": ({"a": F32, "b": F32}, r"b begins at byte \d+ and must begin at byte \d+"),
    "beyond the end": ({"a": {**F32, "shape": [4], "data_offsets": [0, 16]}}, "its tensors end at byte"),
    "huge": ({"a": {**F32, "shape": [2**70, 2**70]}}, "the shape of a must be at most 64 whole numbers"),
    "escape sequence": ({"\x1b[2J": F32}, "must be printable"),
}


def stored(path: Path, text: bytes, length: int | None = None, size: int = 8) -> Root:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(size))
    return Root.of(path)


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_does_not_fit_is_damage(case: str, tmp_path: Path) -> None:
    fields, text = BAD[case]
    with pytest.raises(DamageError, match=text):
        read_header(stored(tmp_path / "x", json.dumps(fields).encode()))


NO_HEADER: list[tuple[bytes, int | None, str]] = [
    (b"{", None, "its header cannot be used: Expecting"),
    (b"[" * 100_000, None, "its header cannot be used: "),
    (b"{}", 2**63, "the length of its header .* must be at most"),
    (b'{"a":1,"a":2}', None, "its header cannot be used: a name is there twice"),
]


@pytest.mark.parametrize(("text", "length", "problem"), NO_HEADER)
def test_what_is_no_header_is_damage(text: bytes, length: int | None, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DamageError, match=f"x is damaged: {problem}"):
        read_header(stored(tmp_path / "x", text, length))
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(DamageError, match=r"\(3 bytes\) must have at least 8 bytes"):
        read_header(Root.of(tmp_path / "x"))
