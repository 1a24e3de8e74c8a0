"""Which rows of which pieces are read for whom, and what a store that gives no answer means."""

import itertools
import pickle
import random
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from shardwise.base.errors import DamageError, StoreError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint import host_buffer
from shardwise.checkpoint.collective_reading import CheckpointReader, ReadRequest, read_tensors
from shardwise.checkpoint.format.manifest import Manifest, PieceEntry, Pieces
from shardwise.checkpoint.host_buffer import CopyAborted, HostBuffer
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
@pytest.mark.parametrize("seed", range(2))
def test_every_piece_meets_what_is_wanted(shape: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    pieces = cut(shape, 8, chance)
    turned_parts = turned(pieces[:2] if len(shape) < 2 else [])
    boxes = [*cut(shape, 3, chance), *turned(cut(shape[::-1], 5, chance)), *turned_parts]
    chance.shuffle(pieces)
    table = Pieces.of([PieceEntry(0, number, box) for number, box in enumerate(pieces)], len(shape))
    assert [each.box for each in table] == pieces
    numbered = list(enumerate(boxes))
    compared = [(number, at) for number, box in numbered for at, piece in enumerate(pieces) if box.intersect(piece)]
    asked = np.array([(box.start, box.size) for box in boxes]).reshape(len(boxes), 2, len(shape))
    for at_once in (1, 2**22):
        monkeypatch.setattr("shardwise.checkpoint.format.manifest._COMPARED_AT_ONCE", at_once)
        numbers, met = table.meeting(asked)
        assert list(zip(numbers.tolist(), met.tolist(), strict=True)) == compared, f"{at_once} compared at once"


def test_what_ranks_send_each_other_of_a_manifest_is_all_of_it(tmp_path: Path) -> None:
    manifest = Manifest.read(write_checkpoint(tmp_path, 100, small_tensors(), ranks=3))
    sent = pickle.loads(pickle.dumps(manifest))
    assert isinstance(sent.tensors["model"]["norm.weight"].pieces, Pieces)
    assert sent.to_json() == manifest.to_json()


class Everything:
    """All tensors of a checkpoint of two ranks, in a store that gives an error for some files."""

    def __init__(self, path: Path) -> None:
        self.folder = write_checkpoint(path, 100, small_tensors(), ranks=2)
        manifest = Manifest.read(self.folder)
        self.source = CheckpointReader(self.folder, manifest)
        self.wants = [
            ReadRequest(state, name, Box.whole(entry.shape), torch.full(entry.shape, 7.0))
            for state, named in manifest.tensors.items()
            for name, entry in named.items()
        ]
        self.reads: list[str] = []

    def read(self, failing: str, error: Exception) -> None:
        plain = LocalFileSystem.cat_file

        def cat_file(system: LocalFileSystem, path: str, *args: object, **options: object) -> bytes:
            self.reads.append(Path(path).name)
            if self.reads[-1] == failing:
                raise error
            content: bytes = plain(system, path, *args, **options)
            return content

        with mock.patch.object(LocalFileSystem, "cat_file", cat_file):
            read_tensors(self.source, self.wants, Mesh(device="cpu"))


def test_a_store_without_an_answer_is_no_damage_and_damage_stays_damage(tmp_path: Path) -> None:
    """And it is asked once: each answer may take minutes not to come."""
    whole, first = Everything(tmp_path), "rank-00000.safetensors"
    with pytest.raises(StoreError, match=rf"{first} cannot be read: no answer within 60 s$") as met:
        whole.read(first, TimeoutError("no answer within 60 s"))
    assert type(met.value) is StoreError
    assert whole.reads.count(first) == 1
    whole = Everything(tmp_path / "damaged")
    damaged = whole.folder.local() / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DamageError, match=r"model.safetensors is damaged: bytes [^;]*$"):
        whole.read("rank-00001.safetensors", PermissionError(13, "Permission denied"))


CPU = torch.device("cpu")


def carried(buffer: HostBuffer, tensors: list[torch.Tensor]) -> bytes:
    """What comes out at the other end, in another thread."""
    found = bytearray()

    def consume() -> None:
        for block in buffer.blocks():
            found.extend(block)

    thread = threading.Thread(target=consume)
    thread.start()
    for tensor in tensors:
        buffer.put(tensor)
    buffer.end()
    thread.join(30)
    assert not thread.is_alive(), "the consumer still waits"
    return bytes(found)


@pytest.mark.parametrize("limit", [None, 8192, 100_000])
def test_bytes_in_order(limit: int | None) -> None:
    tensors = [
        torch.arange(5000, dtype=torch.float32).view(50, 100).t(),  # not contiguous
        torch.randn(3, 7, 11).to(torch.bfloat16),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.randn(2, 40_000),  # a row is longer than the smallest block
    ]
    tensors.insert(2, torch.zeros(1, dtype=torch.bfloat16))  # and the next is not aligned to its size
    wanted = b"".join(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors)
    buffer = HostBuffer(CPU, limit)
    assert carried(buffer, tensors) == wanted, "first save"
    assert carried(buffer, tensors) == wanted, "second save, in blocks used before"


def test_a_given_up_save_reaches_the_writer_and_memory_stays_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = HostBuffer(CPU)
    buffer.put(torch.ones(10))
    buffer.abort()
    with pytest.raises(CopyAborted):
        list(buffer.blocks())
    assert carried(buffer, [torch.ones(2)]) == torch.ones(2).numpy().tobytes(), "the next save is whole again"
    # Pinned memory is lost to other programs as long as the run lasts; beyond the bound other memory is used.
    allocated, pinned, empty = list[int](), list[bool](), torch.empty

    def counting(size: int, *, pin_memory: bool = False, **options: object) -> torch.Tensor:
        allocated.append(size)
        pinned.append(pin_memory)
        return empty(size, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", counting)
    assert len(carried(HostBuffer(CPU, 64 * 1024), [torch.ones(1_000_000)])) == 4_000_000
    assert 0 < sum(allocated) <= 64 * 1024, f"{sum(allocated)} bytes of host memory, 65,536 were allowed"
    pinned.clear()
    monkeypatch.setattr(host_buffer, "PINNED_BYTES", 3 * host_buffer.BLOCK_BYTES)
    monkeypatch.setattr(host_buffer.devices, "side_stream", lambda device: None)
    HostBuffer(torch.device("cuda")).put(torch.zeros(5 * host_buffer.BLOCK_BYTES // 4))
    assert pinned == [True] * 3 + [False] * 2
