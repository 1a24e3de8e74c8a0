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
from shardwise.cli.checkpoint import add_path
from shardwise.cli.help import add_json

if TYPE_CHECKING:
    from shardwise.checkpoint.format.manifest import Manifest
    from shardwise.checkpoint.storage.checkpoint_folders import StepFolder

_FACTS = ("samples", "position", "tokens", "created", "versions", "layout", "optimizer", "data", "schedule", "rng")
"""Fields of a manifest that are shown as they are."""
_TABLES = ("files", "tensors", "model")  # facts that are no row of their own


def configure(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument("--tensors", action="store_true", help="also list the tensors of the checkpoint")
    add_json(parser, ", of several checkpoints a list")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint.storage.checkpoint_folders import abandoned_checkpoints

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
        if aside := abandoned_checkpoints(place.root):
            output.line(f"set aside: {', '.join(folder.name for folder in aside)}")
    return 0


def _age(checkpoint: StepFolder) -> str:
    try:
        created = datetime.fromisoformat(checkpoint.manifest.created) if checkpoint.manifest is not None else None
        return "" if created is None else duration(max((datetime.now(UTC) - created).total_seconds(), 0.0))
    except (ValueError, TypeError):
        return ""


def _show(checkpoint: StepFolder, tensors: bool) -> None:
    manifest = checkpoint.manifest
    if manifest is None:
        raise ConfigError(str(checkpoint.problem))
    described = _described(checkpoint, tensors)
    facts = {key: fact for key, fact in described.items() if key not in _TABLES and fact not in (None, {})}
    model = manifest.config.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    layout = manifest.layout
    # A manifest may be of another version, or edited: then all that it has is shown as it is.
    if all(type(layout.get(key)) is int for key in ("tensor", "pipeline", "data", "world")):
        facts["layout"] = f"{layout_text(layout, sequence=layout.get('sequence') is True)} = " + counted(
            layout["world"], "rank"
        )
    facts |= {
        "bytes": f"{size(checkpoint.bytes)} in {counted(len(manifest.files), 'file')}",
        "parameters": f"{family or 'of unknown family'}, {count(facts.get('parameters', 0))}",
    }
    output.table([(key, _text(fact)) for key, fact in facts.items()])
    output.line()
    files = [[entry.path, size(entry.bytes), size(entry.chunk_bytes)] for entry in manifest.files]
    output.table(files, ["file", "size", "checksum per"], right=(1, 2))
    if tensors:
        output.line()
        rows = [
            [state, name, str(list(entry.shape)), entry.dtype, str(len(entry.pieces))]
            for state, entries in _tensors(manifest).items()
            for name, entry in entries.items()
        ]
        output.table(rows, ["state", "tensor", "shape", "dtype", "pieces"], right=(4,))


def _text(fact: Any) -> str:
    if isinstance(fact, Mapping):
        return ", ".join(f"{key} {_text(value)}" for key, value in fact.items())
    if isinstance(fact, list):
        return " ".join(map(str, fact))
    return f"{fact:,}" if type(fact) is int else str(fact)


def _described(checkpoint: StepFolder, tensors: bool) -> dict[str, Any]:
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
    by_state = _tensors(manifest)
    described |= {key: getattr(manifest, key) for key in _FACTS}
    described |= {
        "model": manifest.config.get("model"),
        "parameters": sum(math.prod(entry.shape) for entry in by_state.get("model", {}).values()),
        "dtypes": {state: sorted({entry.dtype for entry in named.values()}) for state, named in by_state.items()},
        "files": [{"path": entry.path, "bytes": entry.bytes} for entry in manifest.files],
    }
    if tensors:
        described["tensors"] = {
            state: {
                name: {"shape": entry.shape, "dtype": entry.dtype, "pieces": len(entry.pieces)}
                for name, entry in named.items()
            }
            for state, named in by_state.items()
        }
    return described


def _tensors(manifest: Manifest) -> dict[str, dict[str, Any]]:
    from shardwise.checkpoint.format.stored_tensors import ordered_names, ordered_states

    return {
        state: {name: manifest.tensors[state][name] for name in ordered_names(manifest.tensors[state])}
        for state in ordered_states(manifest.tensors)
    }
