"""Show what a checkpoint holds. Of a run or a folder of checkpoints: list them, newest first.

Reads manifests and the sizes of files; `shardwise checkpoint verify` reads the files.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.cli import output, text
from shardwise.cli.checkpoint import places
from shardwise.errors import ConfigError
from shardwise.units import count, size

if TYPE_CHECKING:
    from shardwise.checkpoint_format.folders import Found
    from shardwise.checkpoint_format.manifest import Manifest, TensorEntry


def configure(parser: argparse.ArgumentParser) -> None:
    places.add_path(parser)
    parser.add_argument("--tensors", action="store_true", help="also list the tensors of the checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object, of several checkpoints a list")


def run(arguments: argparse.Namespace) -> int:
    place = places.locate(arguments.path)
    found = places.all_of(place)
    if arguments.tensors and not place.single:
        raise ConfigError(f"--tensors needs one checkpoint, and {place.root} is a folder of them: name one in it")
    if arguments.json:
        from shardwise.runlog import json_text

        described = [_described(each, arguments.tensors) for each in found]
        output.line(json_text(described[0] if place.single else described, indent=2))
    elif not place.single:
        _list(place, found)
    else:
        _show(found[0], arguments.tensors)
    return 0


def _list(place: places.Place, found: list[Found]) -> None:
    from shardwise.checkpoint_format.folders import abandoned

    text.line(f"{place.root}: {text.of(len(found), 'checkpoint')}")
    if found:
        body = [[f"{each.step:,}", size(each.bytes), text.age(each), each.problem or "complete"] for each in found]
        text.table(["step", "size", "age", "state"], body, right=(0, 1, 2))
    if aside := abandoned(place.root):
        text.line(f"set aside: {', '.join(each.name for each in aside)}")


def _show(found: Found, tensors: bool) -> None:
    manifest = found.manifest
    if manifest is None:
        raise ConfigError(str(found.problem))
    written = f"{manifest.created} ({text.age(found)} ago)" if text.age(found) else manifest.created
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()) if version)
    text.rows(
        [
            ("checkpoint", f"{found.folder}: {size(found.bytes)} in {text.of(len(manifest.files), 'file')}"),
            ("state", found.problem or "complete (`shardwise checkpoint verify` reads the checksums)"),
            ("written", written),
            ("versions", versions),
            ("step", _step(manifest)),
            ("samples", f"{manifest.samples:,}; next of the data is sample {manifest.position:,}"),
            ("tokens", f"{manifest.tokens:,}"),
            ("model", _model(manifest)),
            ("layout", _layout(manifest.layout)),
            ("optimizer", _optimizer(manifest)),
            ("dtypes", "; ".join(f"{state} {_dtypes(manifest, state)}" for state in _states(manifest))),
            ("data", _flat(manifest.data)),
            ("schedule", _flat(manifest.schedule)),
            ("randomness", _flat(manifest.rng)),
        ]
    )
    text.line()
    files = [[entry.path, size(entry.bytes), size(entry.chunk_bytes)] for entry in manifest.files]
    text.table(["file", "size", "checksum per"], files, right=(1, 2))
    if tensors:
        text.line()
        _show_tensors(manifest)


def _show_tensors(manifest: Manifest) -> None:
    from shardwise.checkpoint_format.tensors import ordered_names

    body = [
        [state, name, str(list(entry.shape)), entry.dtype, str(len(entry.pieces))]
        for state in _states(manifest)
        for name, entry in ((name, manifest.tensors[state][name]) for name in ordered_names(manifest.tensors[state]))
    ]
    text.table(["state", "tensor", "shape", "dtype", "pieces"], body, right=(4,))


def _described(found: Found, tensors: bool) -> dict[str, Any]:
    """A checkpoint as JSON shows it."""
    described: dict[str, Any] = {
        "path": str(found.folder),
        "step": found.step,
        "bytes": found.bytes,
        "state": "complete" if found.problem is None else "damaged" if found.manifest else "incomplete",
        "problem": found.problem,
    }
    manifest = found.manifest
    if manifest is None:
        return described
    simple = ("samples", "position", "tokens", "created", "versions", "layout", "optimizer", "data", "schedule", "rng")
    described |= {key: getattr(manifest, key) for key in simple}
    described |= {
        "model": manifest.config.get("model"),
        "parameters": _parameters(manifest),
        "dtypes": {state: sorted({t.dtype for t in manifest.tensors[state].values()}) for state in _states(manifest)},
        "files": [{"path": entry.path, "bytes": entry.bytes} for entry in manifest.files],
    }
    if tensors:
        described["tensors"] = {
            state: {name: _described_tensor(entry) for name, entry in manifest.tensors[state].items()}
            for state in _states(manifest)
        }
    return described


def _described_tensor(entry: TensorEntry) -> dict[str, Any]:
    return {"shape": entry.shape, "dtype": entry.dtype, "pieces": len(entry.pieces)}


def _states(manifest: Manifest) -> list[str]:
    from shardwise.checkpoint_format.tensors import ordered_states

    return ordered_states(manifest.tensors)


def _parameters(manifest: Manifest) -> int:
    return sum(math.prod(entry.shape) for entry in manifest.tensors.get("model", {}).values())


def _step(manifest: Manifest) -> str:
    train = manifest.config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    return f"{manifest.step:,} of {planned:,}" if isinstance(planned, int) else f"{manifest.step:,}"


def _model(manifest: Manifest) -> str:
    model = manifest.config.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    total = _parameters(manifest)
    return f"{family or 'of unknown family'}, {count(total)} parameters ({total:,})"


def _layout(layout: Mapping[str, Any]) -> str:
    keys = ("tensor", "pipeline", "data", "world")
    if not all(type(layout.get(key)) is int for key in keys):
        return _flat(layout)
    tensor, pipeline, data, world = (layout[key] for key in keys)
    rest = _flat({key: value for key, value in layout.items() if key not in keys})
    return f"TP {tensor} × PP {pipeline} × DP {data} = {text.of(world, 'rank')}{'; ' if rest else ''}{rest}"


def _optimizer(manifest: Manifest) -> str:
    optimizer = manifest.optimizer
    if optimizer is None:
        return "none: weights only"
    states = [state for state in _states(manifest) if state != "model"]
    return f"{optimizer.get('name')} after {optimizer.get('steps')} updates: {', '.join(states) or 'no states'}"


def _dtypes(manifest: Manifest, state: str) -> str:
    return ", ".join(sorted({entry.dtype for entry in manifest.tensors[state].values()}))


def _flat(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
