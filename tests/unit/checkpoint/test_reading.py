"""What a store that gives no answer means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from shardwise.boxes import Box
from shardwise.checkpoint.reading import Source, Want, read
from shardwise.mesh import Mesh
from shardwise.store.manifest import Manifest
from shardwise.store.root import DamageError, Root, StoreError
from tests.stored import small_tensors, write_checkpoint


def everything(folder: Root) -> tuple[Source, list[Want]]:
    manifest = Manifest.read(folder)
    wants = [
        Want(state, name, Box.whole(entry.shape), torch.full(entry.shape, 7.0))
        for state, named in manifest.tensors.items()
        for name, entry in named.items()
    ]
    return Source(folder, manifest), wants


def silent(reads: list[str], names: tuple[str, ...], error: Exception) -> Callable[..., bytes]:
    plain = LocalFileSystem.cat_file

    def cat_file(self: LocalFileSystem, path: str, *args: object, **options: object) -> bytes:
        reads.append(Path(path).name)
        if reads[-1] in names:
            raise error
        content: bytes = plain(self, path, *args, **options)
        return content

    return cat_file


def test_a_store_without_an_answer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is asked once: each answer may take minutes not to come."""
    folder = write_checkpoint(tmp_path, 100, small_tensors(), ranks=2)
    source, wants = everything(folder)
    reads: list[str] = []
    first = "rank-00000.safetensors"
    monkeypatch.setattr(LocalFileSystem, "cat_file", silent(reads, (first,), TimeoutError("no answer within 60 s")))
    with pytest.raises(StoreError, match=rf"{first} cannot be read: no answer within 60 s$") as met:
        read(source, wants, Mesh(device="cpu"))
    assert type(met.value) is StoreError
    assert reads.count(first) == 1


def test_damage_stays_damage_whatever_else_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, 100, small_tensors(), ranks=2)
    source, wants = everything(folder)
    damaged = Path(str(folder)) / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    refused = silent([], ("rank-00001.safetensors",), PermissionError(13, "Permission denied"))
    monkeypatch.setattr(LocalFileSystem, "cat_file", refused)
    with pytest.raises(DamageError, match=r"model.safetensors is damaged: bytes [^;]*$"):
        read(source, wants, Mesh(device="cpu"))


def test_a_file_that_goes_while_it_is_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, 100, small_tensors())
    source, wants = everything(folder)
    gone = silent([], ("model.safetensors",), FileNotFoundError(2, "No such file or directory"))
    monkeypatch.setattr(LocalFileSystem, "cat_file", gone)
    with pytest.raises(DamageError, match=r"model.safetensors cannot be read: there is no such file"):
        read(source, wants, Mesh(device="cpu"))
