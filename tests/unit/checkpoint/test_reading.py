"""Which rows of which pieces are read for whom, and what a store that gives no answer means."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from shardwise.base.tensor_box import Box
from shardwise.checkpoint.collective_reading import CheckpointReader, ReadRequest, read
from shardwise.checkpoint.format.manifest import Manifest, PieceEntry, Pieces
from shardwise.checkpoint.storage.root import DamageError, Root, StoreError
from shardwise.distributed.mesh import Mesh
from tests.stored import small_tensors, write_checkpoint


def cut(shape: tuple[int, ...], parts: int, chance: random.Random) -> list[Box]:
    """A tensor as runs of uneven lengths, each as boxes."""
    total = torch.Size(shape).numel()
    places = sorted({0, total, *(chance.randrange(total + 1) for _ in range(parts - 1))})
    return [box for a, b in itertools.pairwise(places) for box in Box.of_run(a, b - a, shape)]


def turned(boxes: list[Box]) -> list[Box]:
    return [Box(box.start[::-1], box.size[::-1]) for box in boxes]


@pytest.mark.parametrize("shape", [(), (1,), (37,), (9, 7), (5, 6, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_every_piece_meets_what_is_wanted_of_it(
    shape: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    pieces = cut(shape, 8, chance)
    boxes = [
        *cut(shape, 3, chance),
        *turned(cut(shape[::-1], 5, chance)),
        *turned(pieces[:2] if len(shape) < 2 else []),
    ]
    chance.shuffle(pieces)
    table = Pieces.of([PieceEntry(0, number, box) for number, box in enumerate(pieces)], len(shape))
    assert [each.box for each in table] == pieces
    compared = [
        (number, at) for number, box in enumerate(boxes) for at, piece in enumerate(pieces) if box.intersect(piece)
    ]
    for at_once in (1, 2**22):
        monkeypatch.setattr("shardwise.checkpoint.format.manifest._COMPARED_AT_ONCE", at_once)
        numbers, met = table.meeting(
            np.array([(box.start, box.size) for box in boxes]).reshape(len(boxes), 2, len(shape))
        )
        assert list(zip(numbers.tolist(), met.tolist(), strict=True)) == compared, f"{at_once} compared at once"


def test_what_ranks_send_each_other_of_a_manifest_is_all_of_it(tmp_path: Path) -> None:
    manifest = Manifest.read(write_checkpoint(tmp_path, 100, small_tensors(), ranks=3))
    sent = pickle.loads(pickle.dumps(manifest))
    assert isinstance(sent.tensors["model"]["norm.weight"].pieces, Pieces)
    assert sent.to_json() == manifest.to_json()


def everything(folder: Root) -> tuple[CheckpointReader, list[ReadRequest]]:
    manifest = Manifest.read(folder)
    wants = [
        ReadRequest(state, name, Box.whole(entry.shape), torch.full(entry.shape, 7.0))
        for state, named in manifest.tensors.items()
        for name, entry in named.items()
    ]
    return CheckpointReader(folder, manifest), wants


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
