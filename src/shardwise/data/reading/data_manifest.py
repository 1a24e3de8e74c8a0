"""The record that `shardwise data prepare` leaves with its files: PREFIX.json, or manifest.json in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.base.files import write_atomic
from shardwise.base.yaml_and_json import json_value
from shardwise.data.reading.raw_tokens import read_datatrove_metadata

KIND = "shardwise.prepared"
VERSION = 1
NAME = "manifest.json"
_FIELDS = {
    "format": str,
    "tokenizer": dict,
    "source": dict,
    "options": dict,
    "documents": int,
    "sequences": int,
    "tokens": int,
}


def manifest_of_prefix(prefix: Path) -> Path:
    """The file of the manifest of prepared data: PREFIX.json beside PREFIX.bin and PREFIX.idx."""
    return Path(f"{prefix}.json")


def manifest_of_folder(folder: Path) -> Path:
    """The file of the manifest of prepared data in a folder of shards, or in one that `datasets` opens."""
    return folder / NAME


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of prepared data; None if no such file is there. Of datatrove's metadata, the tokenizer alone."""
    if path.suffix == ".metadata":
        metadata = read_datatrove_metadata(path)
        return metadata and {"tokenizer": {"name": metadata[0], "sha256": None}}
    try:
        manifest = json_value(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or (manifest.get("kind"), manifest.get("version")) != (KIND, VERSION):
        return None
    if not all(isinstance(manifest.get(field), type_) for field, type_ in _FIELDS.items()):
        return None
    # Raw ids may have been converted without their tokenizer.
    if not isinstance(manifest["tokenizer"].get("sha256", 0), str | None):
        return None
    return manifest


def write_manifest(path: Path, facts: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps({"kind": KIND, "version": VERSION, **facts}, indent=2) + "\n")
