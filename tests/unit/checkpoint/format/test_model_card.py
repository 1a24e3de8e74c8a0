"""The card of a checkpoint and of an export: facts of the manifest, and a header that the hub reads."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.checkpoint.format.export_checkpoint import Export
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.model_card import MODEL_CARD, model_card
from shardwise.checkpoint.format.writing import write_small_file
from shardwise.checkpoint.storage.root import Root
from shardwise.config import load_config
from tests.stored import write_checkpoint

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
