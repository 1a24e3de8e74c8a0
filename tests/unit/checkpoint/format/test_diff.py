"""Differences: by values, whatever layouts wrote the two, and none where there is none."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardwise.base.tensor_box import Box, box_segments
from shardwise.checkpoint.format.diff import ABSENT, diff_folders
from shardwise.checkpoint.format.stored_tensors import StoredTensors
from shardwise.checkpoint.storage.root import Root
from tests.stored import Tensor, float32, small_tensors, write_checkpoint


def test_folders_of_any_form_hold_the_same_tensors(tmp_path: Path) -> None:
    a = write_checkpoint(tmp_path / "a", ranks=1)
    b = write_checkpoint(tmp_path / "b", ranks=5, shards=3, layout={"world": 5})
    seen: list[int] = []
    found = diff_folders(a, b, seen.append)
    assert found.equal
    assert found.config == ()
    assert len(found.tensors) == 16
    assert all(each.equal and each.largest == each.relative == 0 for each in found.tensors)
    assert sum(seen) == (66 + 42 + 7 + 6) * (2 + 3 * 4)
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    for folder, hidden in ((single, 1), (sharded, 2)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden": hidden}))
    save_file(values, single / "model.safetensors")
    for name in values:
        save_file({name: values[name]}, sharded / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in values}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    found = diff_folders(Root.of(single), Root.of(sharded))
    assert found.equal
    assert found.config == (("hidden", 1, 2),)
    ours = write_checkpoint(tmp_path, tensors={"model": {name: ("F32", value) for name, value in values.items()}})
    assert diff_folders(ours, Root.of(single)).equal


def test_every_kind_of_difference(tmp_path: Path) -> None:
    ours, theirs = small_tensors(), small_tensors()
    dtype, bits = theirs["model"]["norm.weight"]
    theirs["model"]["norm.weight"] = dtype, bits ^ 1
    theirs["model"]["layer.0.bias"] = float32(3, 8)
    del theirs["model"]["layer.0.weight"]
    del theirs["master"]
    ours["model"]["norm.weight"] = dtype, bits
    theirs["exp_avg"]["embed.weight"][1][3, 4] += 0.5
    a = write_checkpoint(tmp_path / "a", tensors=ours, config={"train": {"steps": 10, "seed": 1}, "x": 1})
    b = write_checkpoint(tmp_path / "b", tensors=theirs, ranks=2, config={"train": {"steps": 20, "seed": 1}, "y": None})
    found = diff_folders(a, b)
    assert not found.equal
    assert found.config == (("train.steps", 10, 20), ("x", 1, ABSENT), ("y", ABSENT, None))
    assert found.only_a == (("model", "layer.0.weight"), *(("master", name) for name in sorted(ours["master"])))
    assert found.only_b == ()
    assert found.shapes == (("model", "layer.0.bias", (7,), (8,)),)
    changed = {(each.state, each.name): each for each in found.tensors if not each.equal}
    assert set(changed) == {("model", "norm.weight"), ("exp_avg", "embed.weight")}
    moment = changed["exp_avg", "embed.weight"]
    assert moment.largest == pytest.approx(0.5, rel=1e-6)
    assert moment.relative == pytest.approx(0.5 / np.linalg.norm(ours["exp_avg"]["embed.weight"][1]), rel=1e-6)


BITS = small_tensors()["model"]["embed.weight"][1]
NOT_FINITE = np.array([np.inf, np.nan, 1], np.float32)
SPECIAL: dict[str, tuple[Tensor, Tensor, bool, float]] = {
    "another dtype": (("BF16", BITS), ("F32", (BITS.astype(np.uint32) << 16).view(np.float32)), False, 0.0),
    "a zero's sign": (("F32", np.zeros(3, np.float32)), ("F32", -np.zeros(3, np.float32)), False, 0.0),
    "from zero": (("F32", np.zeros((), np.float32)), ("F32", np.ones((), np.float32)), False, math.inf),
    "both not finite": (("F32", NOT_FINITE), ("F32", NOT_FINITE.copy()), True, 0.0),
    "one not finite": (("F32", np.ones(3, np.float32)), ("F32", NOT_FINITE), False, math.nan),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values(case: str, tmp_path: Path) -> None:
    *tensors, equal, relative = SPECIAL[case]
    folders = [write_checkpoint(tmp_path / str(i), tensors={"model": {"w": w}}) for i, w in enumerate(tensors)]
    (found,) = diff_folders(*folders).tensors
    assert found.equal == equal
    assert found.relative == pytest.approx(relative, nan_ok=True)


def test_a_difference_within_a_tolerance(tmp_path: Path) -> None:
    """A relative one, whatever the dtypes; tensors that only one of the two has are never within it."""
    ours = small_tensors()
    theirs = small_tensors()
    theirs["exp_avg"]["embed.weight"][1][3, 4] += 1e-3
    a = write_checkpoint(tmp_path / "a", tensors=ours)
    b = write_checkpoint(tmp_path / "b", tensors=theirs)
    relative = 1e-3 / float(np.linalg.norm(ours["exp_avg"]["embed.weight"][1]))
    found = diff_folders(a, b)
    assert not found.equal
    assert found.within(1.01 * relative)
    assert not found.within(0.99 * relative)
    del theirs["exp_avg"]["norm.weight"]
    assert not diff_folders(a, write_checkpoint(tmp_path / "c", tensors=theirs)).within(1.0)


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.integers(1, 40))
@settings(deadline=None)
def test_segments_tile_the_tensor(shape: tuple[int, ...], elements: int) -> None:
    held = np.zeros(shape, int)
    for box in box_segments(shape, elements):
        assert 0 < box.numel <= elements
        held[box.slices] += 1
    assert (held == 1).all()


@pytest.mark.parametrize("at_once", [60, 2**20])
def test_any_box_of_a_plain_file(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns come from whole rows, which are read in groups: rows of 24 bytes here."""
    monkeypatch.setattr("shardwise.checkpoint.format.stored_tensors.READ_BYTES", at_once)
    values = {"matrix": np.arange(66, dtype=np.float32).reshape(11, 6), "scalar": np.array(7, np.float32)}
    save_file(values, tmp_path / "model.safetensors")
    stored = StoredTensors.of(Root.of(tmp_path))
    for box in (Box.whole((11, 6)), Box((2, 1), (7, 3)), Box((10, 5), (1, 1)), Box((0, 5), (11, 1))):
        assert np.array_equal(stored.read("model", "matrix", box), values["matrix"][box.slices])
    assert stored.read("model", "scalar", Box.whole(())) == 7
