"""One HDF5 shard: arrays that are not all there, do not fit one another or lie elsewhere are refused."""

from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from shardwise.data.reading.hdf5_files import KEYS
from tests.unit.data.formats.test_hdf5 import config
from tests.unit.data.hdf5_shards import Arrays, arrays, write
from tests.unit.data.small_runs import refusal


def without(key: str) -> Callable[[Arrays], None]:
    def change(found: Arrays) -> None:
        del found[key]

    return change


def cut(key: str, *slices: slice) -> Callable[[Arrays], None]:
    def change(found: Arrays) -> None:
        found[key] = found[key][slices]

    return change


def as_type(key: str, dtype: str) -> Callable[[Arrays], None]:
    def change(found: Arrays) -> None:
        found[key] = found[key].astype(dtype)

    return change


def flat(found: Arrays) -> None:
    found["segment_ids"] = found["segment_ids"].ravel()


def rows_cut(found: Arrays) -> None:
    for key in KEYS:
        found[key] = found[key][:0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without("masked_lm_ids"), " must have the array masked_lm_ids, and has input_ids, input_mask, masked_lm_"),
        (cut("next_sentence_labels", slice(5)), ": next_sentence_labels (5 rows) must have as many as the other "),
        (cut("input_mask", slice(None), slice(12)), ": input_mask (12 tokens a row) must have as many as the other"),
        (flat, ": segment_ids (int32 of shape [128]) must hold integers of shape [rows, tokens a row]"),
        (as_type("input_ids", "f4"), ": input_ids (float32 of shape [8, 16]) must hold integers"),
        (rows_cut, ": input_ids (0 rows) must have as many as the other arrays (1), and at least 1: remove the file"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: Callable[[Arrays], None], text: str, tmp_path: Path) -> None:
    found = arrays(8)
    change(found)
    path = write(tmp_path / "a.hdf5", found)
    assert refusal(config(path), tmp_path / "cache").startswith(path + text)


@pytest.mark.parametrize("way", ["link", "raw", "virtual"])
def test_an_array_that_leads_to_another_file_is_refused(way: str, tmp_path: Path) -> None:
    found = arrays(8)
    secret = found.pop("input_ids")
    outside = write(tmp_path / "outside.hdf5", {**found, "input_ids": secret})
    path = write(tmp_path / "a.hdf5", found)
    with h5py.File(path, "r+") as file:
        if way == "link":
            file["input_ids"] = h5py.ExternalLink(outside, "input_ids")
        elif way == "raw":
            size = secret.size * secret.dtype.itemsize
            file.create_dataset("input_ids", secret.shape, secret.dtype, external=[(outside, 0, size)])
        else:
            layout = h5py.VirtualLayout(secret.shape, secret.dtype)
            layout[:] = h5py.VirtualSource(outside, "input_ids", secret.shape)
            file.create_virtual_dataset("input_ids", layout)
    assert refusal(config(path), tmp_path / "cache") == (
        f"{path}: input_ids must lie in the file itself, and it refers to another file: write the shard again"
    )
