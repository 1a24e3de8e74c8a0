"""`README.md` of a checkpoint or an export: the model card that the hub shows, with the facts of the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwise.base import units
from shardwise.checkpoint.format.manifest import MODEL, Manifest
from shardwise.config.data import BUILT_IN_TEXTS

MODEL_CARD = "README.md"
_TASKS = {"bert": "fill-mask"}  # family → the hub's name of what its models do; all others continue a text
_SIZES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden size": ("hidden_size", "n_embd"),
    "vocabulary": ("vocab_size",),
}
"""Size → the keys that families give it."""
_TEXT = """\
---
{header}---

# {title}

Written by shardwise{version}.

| | |
|---|---|
{rows}

The weights are whole tensors under the names of the model. They do not depend on the number of ranks, nor on how the
model was cut while it was trained.

This card states no licence: whoever publishes the model chooses one, as `license` in the header.
"""


def model_card(manifest: Manifest, base_model: str | None = None) -> bytes:
    """The card of a checkpoint; a manifest that lacks a fact, such as one of an import, has a card without it.

    Args:
        base_model: hub id of the weights that the training started from. Only the run that loaded them knows whether
            `checkpoint.load` is a hub id: `runs/base` may be a folder, which another machine does not have.
    """
    model = _section(manifest.config, "model")
    family = str(model.get("family", "model"))
    parameters = sum(math.prod(tensor.shape) for tensor in manifest.tensors.get(MODEL, {}).values())
    version = manifest.versions.get("shardwise")
    text = _TEXT.format(
        header=yaml.safe_dump(_header(manifest.config, family, base_model), sort_keys=False),
        title=f"{_plain(family)}, {units.count(parameters)} parameters",
        version=f" {version}" if version else "",
        rows="\n".join(f"| {name} | {value} |" for name, value in _rows(manifest, parameters, base_model)),
    )
    return text.encode()


def _header(config: Mapping[str, Any], family: str, base_model: str | None) -> dict[str, Any]:
    # A class of the user's own is opened by its own code, and by no library.
    is_own = ":" in family
    header: dict[str, Any] = {"library_name": "shardwise" if is_own else "transformers"}
    if not is_own:
        header["pipeline_tag"] = _TASKS.get(family, "text-generation")
    if base_model is not None:
        header["base_model"] = base_model
    dataset = _section(config, "data").get("dataset")
    if isinstance(dataset, str) and dataset not in BUILT_IN_TEXTS:
        header["datasets"] = [dataset.partition("@")[0]]
    return {**header, "tags": ["shardwise"]}


def _rows(manifest: Manifest, parameters: int, base_model: str | None) -> Iterator[tuple[str, str]]:
    config = manifest.config
    model = _section(config, "model")
    sizes = [f"{parameters:,} parameters"]
    for name, keys in _SIZES.items():
        sizes += [f"{name} {model[key]:,}" for key in keys if isinstance(model.get(key), int)][:1]
    yield "model", f"`{_plain(str(model.get('family', 'unknown')))}`: {', '.join(sizes)}"
    if names := _data_names(_section(config, "data")):
        yield "data", ", ".join(f"`{_plain(name)}`" for name in names)
    if manifest.step:
        steps = _section(config, "train").get("steps")
        planned = f" of {steps:,}" if isinstance(steps, int) else ""
        yield "steps", f"{manifest.step:,}{planned}"
    if manifest.tokens:
        yield "tokens", f"{manifest.tokens:,} in {manifest.samples:,} samples"
    if losses := manifest.losses:
        mean = math.fsum(losses) / len(losses)
        yield "training loss", f"{losses[-1]:.4f} at the last step, {mean:.4f} in the mean of the last {len(losses)}"
    load = _section(config, "checkpoint").get("load")
    if isinstance(load, str):
        yield "began from", f"`{_plain(base_model or _last_name(load))}`"


def _data_names(data: Mapping[str, Any]) -> list[str]:
    """Names of the data: of a path the last part, since the rest tells of the machine."""
    if mixture := data.get("mixture"):
        return list(mixture)
    if blend := data.get("blend"):
        return [_last_name(part) for part in blend if isinstance(part, str)]
    if path := data.get("path"):
        return [_last_name(path)]
    return [data["dataset"]] if data.get("dataset") else []


def _last_name(path: str) -> str:
    return Path(path.partition("?")[0]).name


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() and character not in "`|" else "_" for character in text)
