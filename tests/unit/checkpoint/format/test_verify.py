"""Verification: nothing is said of a sound checkpoint, and every damage is found."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import DamageError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest, PieceEntry, Pieces, TensorEntry, _tiling_problem
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.format.verify import count_non_finite, verify_checkpoint
from shardwise.checkpoint.storage.root import Root
from tests.stored import bfloat16, float32, small_tensors, write_checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Two shards of weights and three ranks' states, with more than one chunk in a file."""
    tensors = small_tensors()
    tensors["model"]["wide.weight"] = bfloat16(9, 300, 200)
    tensors["exp_avg"]["wide.weight"] = float32(10, 300, 200)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints"), tensors=tensors, ranks=3, shards=2)


@pytest.fixture
def copy(sound: Root, tmp_path: Path) -> Path:
    shutil.copytree(sound.local(), tmp_path / "copy")
    return tmp_path / "copy"


def test_a_sound_checkpoint(sound: Root) -> None:
    seen: list[int] = []
    report = verify_checkpoint(sound, seen.append)
    assert report.sound, report
    total = sum(size for path, size in sound.files().items() if path != MANIFEST)
    assert report.bytes == sum(seen) == total
    assert (report.files, report.tensors) == (6, 18)
    assert report.unlisted == []


@pytest.mark.parametrize("seed", range(24))
def test_any_damage_is_found(seed: int, copy: Path) -> None:
    """A flipped bit, a lost end or a lost byte, anywhere in any file."""
    chance = random.Random(seed)
    file = chance.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if seed % 3 == 0:
        del data[at:]
    elif seed % 3 == 1:
        del data[at]
    else:
        data[at] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    assert verify_checkpoint(Root.of(copy)).problems, f"{file.name} at {at}"


def test_every_problem_is_listed(copy: Path) -> None:
    (copy / "config.json").unlink()
    weights = copy / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes() + b"x")
    states = copy / "optimizer/rank-00000.safetensors"
    states.write_bytes(bytes(b ^ 255 for b in states.read_bytes()))
    (copy / "README.md").write_text("a note")
    (copy / "extra.safetensors").write_bytes(b"")
    report = verify_checkpoint(Root.of(copy))
    assert report.unlisted == ["README.md", "extra.safetensors"]
    text = "\n".join(report.problems)
    assert len(report.problems) == 4, text
    assert "config.json is missing, and the manifest lists it" in text
    assert "model-00001-of-00002.safetensors is damaged: its length" in text
    assert "rank-00000.safetensors is damaged: bytes 0 to" in text
    assert "extra.safetensors holds weights that manifest.json does not list" in text


def test_values_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = small_tensors()
    dtype, bits = tensors["model"]["layer.0.bias"]
    tensors["model"]["layer.0.bias"] = dtype, np.concatenate([bits[:4], np.array([0x7F80, 0xFF80, 0x7FC1], np.uint16)])
    tensors["exp_avg"]["norm.weight"][1][2] = np.nan
    report = verify_checkpoint(write_checkpoint(tmp_path, tensors=tensors, ranks=3))
    assert report.problems == []
    assert report.non_finite == {"model/layer.0.bias": 3, "exp_avg/norm.weight": 1}
    assert not report.sound
    for dtype, numpy in [("F16", np.float16), ("F32", np.float32), ("F64", np.float64)]:
        info = np.finfo(numpy)
        values = np.array(
            [0, -0.0, info.max, info.min, info.tiny, info.smallest_subnormal, np.inf, -np.inf, np.nan], numpy
        )
        assert count_non_finite(memoryview(values.tobytes()), dtype) == 3
    # A float64 tensor after an odd number of bytes: values lie across the ends of what is read at a time.
    monkeypatch.setattr("shardwise.checkpoint.format.verify.READ_BYTES", 1)
    bad = np.full(30_000, np.inf)
    tensors = {"model": {"a": ("U8", np.zeros(3, np.uint8)), "b": ("F64", bad)}}
    assert verify_checkpoint(write_checkpoint(tmp_path, tensors=tensors)).non_finite == {"model/b": 30_000}


def rewrite(folder: Path, changed: dict[tuple[str, str], tuple[PieceEntry, ...]]) -> None:
    """Change the pieces of tensors in a manifest that is otherwise in order."""
    manifest = Manifest.read(Root.of(folder))
    tensors = {
        state: {
            name: TensorEntry(entry.shape, entry.dtype, changed.get((state, name), entry.pieces))
            for name, entry in named.items()
        }
        for state, named in manifest.tensors.items()
    }
    (folder / MANIFEST).write_text(Manifest(**(vars(manifest) | {"tensors": tensors})).to_json())


def test_pieces_elsewhere_and_gaps_are_found(copy: Path) -> None:
    """The bytes are those of the checksums, the pieces tile, and other programs would read other tensors."""
    model = Manifest.read(Root.of(copy)).tensors["model"]
    (wide,), (norm,) = model["wide.weight"].pieces, model["norm.weight"].pieces
    moved = (PieceEntry(wide.file, wide.offset, norm.box),)
    rewrite(copy, {("model", "norm.weight"): moved, ("model", "wide.weight"): ()})
    text = "\n".join(verify_checkpoint(Root.of(copy)).problems)
    assert "its header and manifest.json say different things about norm.weight" in text
    pieces = Manifest.read(Root.of(copy)).tensors["exp_avg"]["wide.weight"].pieces
    assert len(pieces) > 1
    rewrite(copy, {("exp_avg", "wide.weight"): list(pieces)[1:]})
    assert any(
        "exp_avg/wide.weight leave a gap: they cover" in problem
        for problem in verify_checkpoint(Root.of(copy)).problems
    )
    tensors = StoredTensors.of(Root.of(copy))
    shape = tensors.states["exp_avg"]["wide.weight"].shape
    with pytest.raises(DamageError, match=f"{copy}: the pieces of exp_avg/wide.weight do not tile it"):
        tensors.read("exp_avg", "wide.weight", Box.whole(shape))
    boxes = table([Box((0, 0), (2, 2)), Box((1, 0), (2, 2))], dims=2)
    assert _tiling_problem((4, 2), boxes) == "overlap: [0:2, 0:2] and [1:3, 0:2]"


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut in two along some dim, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.size[dim]))
        boxes.append(Box(box.start, (*box.size[:dim], cut, *box.size[dim + 1 :])))
        start = (*box.start[:dim], box.start[dim] + cut, *box.start[dim + 1 :])
        boxes.append(Box(start, (*box.size[:dim], box.size[dim] - cut, *box.size[dim + 1 :])))
    return shape, draw(st.permutations(boxes))


def table(boxes: list[Box], dims: int) -> Pieces:
    return Pieces.of([PieceEntry(0, 0, box) for box in boxes], dims)


@given(tilings(), st.data())
@settings(deadline=None, max_examples=40)
def test_tilings(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = case
    assert _tiling_problem(shape, table(boxes, len(shape))) is None
    chosen = data.draw(st.sampled_from([box for box in boxes if box.numel]))
    assert "leave a gap" in str(_tiling_problem(shape, table([box for box in boxes if box != chosen], len(shape))))
    assert "overlap" in str(_tiling_problem(shape, table([*boxes, chosen], len(shape))))


def test_boxes_that_overlap_and_leave_a_gap_of_equal_size_do_not_tile() -> None:
    boxes = table([Box((0, 0), (2, 2)), Box((1, 0), (2, 2))], dims=2)
    assert _tiling_problem((4, 2), boxes) == "overlap: [0:2, 0:2] and [1:3, 0:2]"
