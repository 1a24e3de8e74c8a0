"""Checkpoints as plain Hugging Face folders: formats, shards, model cards, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from shardwise.base.errors import ConfigError, DamageError, RunError, StoreError
from shardwise.checkpoint.format.export_checkpoint import Export
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.format.model_card import MODEL_CARD, model_card
from shardwise.checkpoint.format.safetensors import DTYPES, cast_overflows, cast_values
from shardwise.checkpoint.format.writing import staged_folder, write_small_file
from shardwise.checkpoint.storage.root import Root
from shardwise.config import load_config
from tests.stored import Tensors, small_tensors, write_checkpoint

TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def as_torch(dtype: str, values: np.ndarray) -> torch.Tensor:
    data = bytearray(np.ascontiguousarray(values).astype(DTYPES[dtype]).tobytes())
    return torch.frombuffer(data, dtype=TORCH[dtype]).view(values.shape)


def export(folder: Root, target: Path, dtype: str | None = None, max_bytes: int = 10**9) -> dict[str, torch.Tensor]:
    planned = Export(folder, dtype)
    done = planned.write(Root.of(target.parent), target.name, max_bytes)
    assert (planned.step, str(done.folder)) == (100, str(target))
    files = sorted(target.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Root:
    return write_checkpoint(tmp_path / "checkpoints")


def with_tensors(path: Path, tensors: Tensors) -> Root:
    return write_checkpoint(path / "checkpoints", tensors=tensors)


@pytest.mark.parametrize("source", TORCH)
@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_formats_are_cast_as_torch_casts(source: str, target: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, 20_000, dtype=np.uint16)
    edges = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 3e-39, float("inf"), float("-inf"), float("nan"), 1.00390625]
    if source == "BF16":
        values: np.ndarray = bits
    elif source == "F16":
        values = bits.view(np.float16)
    else:
        wide = np.random.default_rng(1).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
        with np.errstate(invalid="ignore"):  # some of the bits are signalling NaNs
            values = np.concatenate([wide, np.array(edges, np.float32)]).astype(DTYPES[source])
    found = as_torch(target, cast_values(values, source, target))
    wanted = as_torch(source, values).to(torch.float32).to(TORCH[target])
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0.5), wanted.nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_weights_of_another_format_come_from_the_masters(tmp_path: Path, dtype: str | None) -> None:
    tensors = small_tensors()
    folder = write_checkpoint(tmp_path / "checkpoints", tensors=tensors, ranks=3, shards=2)
    found = export(folder, tmp_path / "out", dtype)
    state = "model" if dtype in (None, "bfloat16") else "master"
    assert set(found) == set(tensors["model"])
    for name, tensor in found.items():
        assert torch.equal(tensor, as_torch(*tensors[state][name]).to(NAMES[dtype or "bfloat16"])), name
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == (dtype or "bfloat16")


def test_biases_of_routers_stay_in_float32_and_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    """As in transformers, whose `_keep_in_fp32_modules_strict` names them."""
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors: Tensors = {"model": {bias: ("F32", np.array([0.251, -0.001], np.float32)), "w": ("F32", np.ones(2, "f4"))}}
    found = export(with_tensors(tmp_path, tensors), tmp_path / "out", "bfloat16")
    assert (found[bias].dtype, found["w"].dtype) == (torch.float32, torch.bfloat16)
    assert found[bias].tolist() == tensors["model"][bias][1].tolist()
    tensors = {"model": {"norm.weight": ("F32", np.array([1.0, 1e5], np.float32))}}
    folder = with_tensors(tmp_path / "wide", tensors)
    with pytest.raises(RunError, match=r"norm.weight has values beyond the range of float16 \(65,504\)"):
        export(folder, tmp_path / "none", "float16")
    assert not (tmp_path / "none").exists()
    assert cast_overflows(np.array([1.0, 7e4], np.float32), "F32", "F16")
    assert not cast_overflows(np.array([1.0, np.inf, np.nan, 65504.0], np.float32), "F32", "F16"), (
        "finite values alone do"
    )


def test_fault_09_files_in_folders_are_exported(folder: Root, tmp_path: Path) -> None:
    """Chat templates with names, but nothing that only training needs."""
    template = "additional_chat_templates/tool_use.jinja"
    planned, entry = Export(folder), write_small_file(folder, template, b"{{ tools }}")
    planned._manifest = replace(planned._manifest, files=(*planned._manifest.files, entry))
    planned.write(Root.of(tmp_path), "files", 10**9)
    assert (tmp_path / "files" / template).read_bytes() == b"{{ tools }}"
    assert not (tmp_path / "files" / "optimizer").exists()


def test_shards_have_an_index_and_a_limit_and_folders_that_exist_are_refused(folder: Root, tmp_path: Path) -> None:
    found = export(folder, tmp_path / "out", "float32", max_bytes=200)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in found.values())
    assert index["weight_map"].keys() == found.keys()
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        held = load_file(tmp_path / "out" / file)
        assert name in held
        assert len(held) == 1 or sum(4 * tensor.numel() for tensor in held.values()) <= 200
    assert not [path for path in tmp_path.glob("out/**/*") if path.name in (MANIFEST, "optimizer")]
    with pytest.raises(ConfigError, match="out exists already: choose another name, or remove it"):
        export(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"must be a checkpoint, and it has no manifest.json"):
        Export(Root.of(tmp_path))


@pytest.mark.parametrize("kind", ["masters", "truncated"])
def test_damage_is_told_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints", ranks=2)
    dtype, path = {
        "masters": ("float32", folder.local() / "optimizer/rank-00001.safetensors"),
        "truncated": (None, next(folder.local().glob("*.safetensors"))),
    }[kind]
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[-1]
    else:
        data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match=rf"^[^\n]*{path}[^\n]*$"):
        export(folder, tmp_path / "out", dtype)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints"]


def test_a_disk_that_fills_up_leaves_nothing(folder: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a model looks like a whole one, or takes the room of one."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full"):
        export(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_folder_is_durable_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(Root, "sync", lambda place: synced.append((place.name, (tmp_path / "model").exists())))
    with staged_folder(Root.of(tmp_path), "model") as folder:
        (folder / "weights").write(b"x")
    assert synced == [(".model.partial", False), (tmp_path.name, True)]


LOSSES = (3.0, 2.5, 2.25)


def card(
    tmp_path: Path, *overrides: str, recipe: str = "llama2-tiny", base_model: str | None = None, **changed: Any
) -> tuple[dict[str, Any], str]:
    """The header and the text of the card of a checkpoint with a configuration."""
    config = load_config(recipe, list(overrides)).recorded()
    folder = write_checkpoint(tmp_path, config=config, **({"losses": LOSSES} | changed))
    _, header, text = model_card(Manifest.read(folder), base_model).decode().split("---\n", 2)
    return yaml.safe_load(header), text


def test_a_card_has_the_facts_of_the_manifest_and_what_a_hub_id_names(tmp_path: Path) -> None:
    header, text = card(tmp_path, "train.steps=200")
    assert header == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["shardwise"]}
    model = load_config("llama2-tiny").model
    for fact in (
        "# llama, 121 parameters",
        "Written by shardwise 0.1.0.",
        f"| model | `llama`: 121 parameters, layers {model.num_hidden_layers}, hidden size {model.hidden_size}, ",
        "| data | `tiny` |",
        "| steps | 100 of 200 |",
        "| tokens | 25,600 in 800 samples |",
        "| training loss | 2.2500 at the last step, 2.5833 in the mean of the last 3 |",
        "They do not depend on the number of ranks",
        "This card states no licence",
    ):
        assert fact in text
    assert "began from" not in text
    overrides = ("data.dataset=acme/text@v1", "checkpoint.load=acme/tiny")
    header, text = card(tmp_path / "hub", *overrides, base_model="acme/tiny")
    assert (header["base_model"], header["datasets"]) == ("acme/tiny", ["acme/text"])
    assert "| began from | `acme/tiny` |" in text
    header, text = card(tmp_path / "folder", "checkpoint.load=runs/base")
    assert "base_model" not in header
    assert "| began from | `base` |" in text


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["data.path=/home/me/secret place/corpus.jsonl"], "`corpus.jsonl`"),
        (["data.path=s3://me:hunter2@bucket/a|b?key=1"], "`a_b`"),
        (["data.mixture={web: {path: /data/w, weight: 1}, code: {dataset: python, weight: 1}}"], "`code`, `web`"),
    ],
)
def test_of_data_on_a_disk_the_card_has_names_alone(tmp_path: Path, overrides: list[str], names: str) -> None:
    _, text = card(tmp_path, "data.dataset=null", *overrides)
    assert f"| data | {names} |\n" in text
    assert "/home" not in text
    assert "hunter2" not in text


def test_an_export_has_the_card_of_its_checkpoint_or_a_new_one(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoints")
    planned = Export(folder)
    planned.write(Root.of(tmp_path), "new")
    assert (tmp_path / "new" / MODEL_CARD).read_bytes() == model_card(Manifest.read(folder))
    entry = write_small_file(folder, MODEL_CARD, b"of the checkpoint")
    manifest = Manifest.read(folder)
    changed = Manifest(**(vars(manifest) | {"files": (*manifest.files, entry)}))
    (folder / "manifest.json").write(changed.to_json().encode())
    Export(folder).write(Root.of(tmp_path), "copied")
    assert (tmp_path / "copied" / MODEL_CARD).read_bytes() == b"of the checkpoint"
