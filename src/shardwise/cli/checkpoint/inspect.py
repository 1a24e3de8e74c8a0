"""Show what a checkpoint holds, or list the checkpoints of a run or a folder, newest first.

Reads manifests and the sizes of files; `shardwise checkpoint verify` reads the files.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError
from shardwise.base.mesh_axes import layout_text
from shardwise.base.units import count, counted, duration, size
from shardwise.checkpoint.storage.checkpoint_folders import checkpoint_folder
from shardwise.cli import output
from shardwise.cli.arguments import add_json
from shardwise.cli.checkpoint import add_path

if TYPE_CHECKING:
    from shardwise.checkpoint.format.manifest import Manifest
    from shardwise.checkpoint.storage.checkpoint_folders import StepFolder


def configure(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("--tensors", action="store_true", help="also list the tensors of the checkpoint")
    add_json(parser, ", of several checkpoints a list")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.storage.checkpoint_folders import abandoned

    place = checkpoint_folder(arguments.path)
    checkpoints = place.checkpoints()
    if arguments.tensors and not place.is_checkpoint:
        raise ConfigError(f"--tensors needs one checkpoint, and {place.root} is a folder of them: name one in it")
    if arguments.json:
        described = [_described(checkpoint, arguments.tensors) for checkpoint in checkpoints]
        output.json(described[0] if place.is_checkpoint else described)
    elif place.is_checkpoint:
        _show(checkpoints[0], arguments.tensors)
    else:
        output.line(f"{place.root}: {counted(len(checkpoints), 'checkpoint')}")
        if checkpoints:
            rows = [
                [f"{checkpoint.step:,}", size(checkpoint.bytes), _age(checkpoint), checkpoint.problem or "complete"]
                for checkpoint in checkpoints
            ]
            output.table(rows, ["step", "size", "age", "state"], right=(0, 1, 2))
        if aside := abandoned(place.root):
            output.line(f"set aside: {', '.join(folder.name for folder in aside)}")
    return 0


def _age(checkpoint: StepFolder) -> str:
    """The age of a checkpoint as a text; empty if its manifest does not tell it."""
    try:
        created = datetime.fromisoformat(checkpoint.manifest.created) if checkpoint.manifest is not None else None
        return "" if created is None else duration(max((datetime.now(UTC) - created).total_seconds(), 0.0))
    except (ValueError, TypeError):
        return ""


def _show(checkpoint: StepFolder, tensors: bool) -> None:
    from shardwise.checkpoint.format.stored_tensors import ordered_names

    manifest = checkpoint.manifest
    if manifest is None:
        raise ConfigError(str(checkpoint.problem))
    age = _age(checkpoint)
    train = manifest.config.get("train")
    states = _states(manifest)
    planned = train.get("steps") if isinstance(train, dict) else None
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()) if version)
    output.table(
        [
            ("checkpoint", f"{checkpoint.folder}: {size(checkpoint.bytes)} in {counted(len(manifest.files), 'file')}"),
            ("state", checkpoint.problem or "complete (`shardwise checkpoint verify` reads the checksums)"),
            ("written", f"{manifest.created} ({age} ago)" if age else manifest.created),
            ("versions", versions),
            ("step", f"{manifest.step:,} of {planned:,}" if isinstance(planned, int) else f"{manifest.step:,}"),
            ("samples", f"{manifest.samples:,}; next of the data is sample {manifest.position:,}"),
            ("tokens", f"{manifest.tokens:,}"),
            ("model", _model(manifest)),
            ("layout", _layout(manifest.layout)),
            ("optimizer", _optimizer(manifest)),
            ("dtypes", "; ".join(f"{state} {', '.join(_dtypes(manifest, state))}" for state in states)),
            ("data", _flat(manifest.data)),
            ("schedule", _flat(manifest.schedule)),
            ("randomness", _flat(manifest.rng)),
        ]
    )
    output.line()
    files = [[entry.path, size(entry.bytes), size(entry.chunk_bytes)] for entry in manifest.files]
    output.table(files, ["file", "size", "checksum per"], right=(1, 2))
    if tensors:
        output.line()
        rows = [
            [state, name, str(list(entry.shape)), entry.dtype, str(len(entry.pieces))]
            for state in states
            for name in ordered_names(manifest.tensors[state])
            for entry in [manifest.tensors[state][name]]
        ]
        output.table(rows, ["state", "tensor", "shape", "dtype", "pieces"], right=(4,))


def _described(checkpoint: StepFolder, tensors: bool) -> dict[str, Any]:
    """A checkpoint as JSON shows it."""
    described: dict[str, Any] = {
        "path": str(checkpoint.folder),
        "step": checkpoint.step,
        "bytes": checkpoint.bytes,
        "state": "complete" if checkpoint.problem is None else "damaged" if checkpoint.manifest else "incomplete",
        "problem": checkpoint.problem,
    }
    manifest = checkpoint.manifest
    if manifest is None:
        return described
    simple = ("samples", "position", "tokens", "created", "versions", "layout", "optimizer", "data", "schedule", "rng")
    described |= {key: getattr(manifest, key) for key in simple}
    described |= {
        "model": manifest.config.get("model"),
        "parameters": _parameters(manifest),
        "dtypes": {state: _dtypes(manifest, state) for state in _states(manifest)},
        "files": [{"path": entry.path, "bytes": entry.bytes} for entry in manifest.files],
    }
    if tensors:
        described["tensors"] = {
            state: {
                name: {"shape": entry.shape, "dtype": entry.dtype, "pieces": len(entry.pieces)}
                for name, entry in manifest.tensors[state].items()
            }
            for state in _states(manifest)
        }
    return described


def _states(manifest: Manifest) -> list[str]:
    from shardwise.checkpoint.format.stored_tensors import ordered_states

    return ordered_states(manifest.tensors)


def _parameters(manifest: Manifest) -> int:
    return sum(math.prod(entry.shape) for entry in manifest.tensors.get("model", {}).values())


def _model(manifest: Manifest) -> str:
    model = manifest.config.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    total = _parameters(manifest)
    return f"{family or 'of unknown family'}, {count(total)} parameters ({total:,})"


def _layout(layout: Mapping[str, Any]) -> str:
    keys = ("tensor", "pipeline", "data", "world")
    # A manifest may be of another version, or edited: then all that it has is shown as it is.
    if not all(type(layout.get(key)) is int for key in keys):
        return _flat(layout)
    sequence = layout.get("sequence") is True
    further_keys = _flat({key: value for key, value in layout.items() if key not in (*keys, "sequence")})
    text = f"{layout_text(layout, sequence=sequence)} = {counted(layout['world'], 'rank')}"
    return f"{text}; {further_keys}" if further_keys else text


def _optimizer(manifest: Manifest) -> str:
    optimizer = manifest.optimizer
    if optimizer is None:
        return "none: weights only"
    states = [state for state in _states(manifest) if state != "model"]
    return f"{optimizer.get('name')} after {optimizer.get('steps')} updates: {', '.join(states) or 'no states'}"


def _dtypes(manifest: Manifest, state: str) -> list[str]:
    return sorted({entry.dtype for entry in manifest.tensors[state].values()})


def _flat(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
