"""Checkpoints made without torch: numpy tensors, cut as a layout would cut them, written as a save writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest, PieceEntry, TensorEntry
from shardwise.checkpoint.format.safetensors import DTYPES, safetensors_header
from shardwise.checkpoint.storage.checkpoint_folders import step_name
from shardwise.checkpoint.storage.chunks import ChunkedWriter, FileEntry
from shardwise.checkpoint.storage.root import Root

Tensor = tuple[str, npt.NDArray[Any]]
"""(dtype of the format, values or their bits)."""
Tensors = Mapping[str, Mapping[str, Tensor]]
MODEL_CONFIG = {"family": "llama", "hidden_size": 6, "num_hidden_layers": 1, "vocab_size": 11}


def float32(seed: int, *shape: int) -> Tensor:
    return "F32", np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def bfloat16(seed: int, *shape: int) -> Tensor:
    bits = float32(seed, *shape)[1].view(np.uint32) >> 16
    return "BF16", bits.astype(np.uint16)


def small_tensors(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """A model in bfloat16 with AdamW's states, of shapes that no cut divides evenly."""
    shapes = {"embed.weight": (11, 6), "layer.0.weight": (7, 6), "layer.0.bias": (7,), "norm.weight": (6,)}
    model = {name: bfloat16(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    states = ("exp_avg", "exp_avg_sq", "master")
    return {"model": model} | {
        state: {name: float32(seed + 100 * j + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        for j, state in enumerate(states, 1)
    }


def write_checkpoint(
    checkpoints: Path | Root,
    step: int = 100,
    tensors: Tensors | None = None,
    *,
    ranks: int = 1,
    shards: int = 1,
    fields: Mapping[str, Any] = MODEL_CONFIG,
    **changed: Any,
) -> Root:
    """Write `step-…` into a folder of checkpoints and return it.

    Args:
        ranks: that hold equal runs of all optimizer states, end to end. shards: files of the model's weights.
        fields: of its `config.json`.
        changed: fields of the manifest.
    """
    root = checkpoints if isinstance(checkpoints, Root) else Root.of(checkpoints)
    folder = root / step_name(step)
    (folder / "optimizer").make()
    tensors = small_tensors() if tensors is None else tensors
    files: list[FileEntry] = []
    stored: dict[str, dict[str, TensorEntry]] = {
        state: {name: TensorEntry(values.shape, dtype, ()) for name, (dtype, values) in named.items()}
        for state, named in tensors.items()
    }

    def write(path: str, parts: list[tuple[str, str, str, Box]]) -> None:
        """`parts`: (name in the file, state, canonical name, box)."""
        named = [(label, stored[state][name].dtype, box.size) for label, state, name, box in parts]
        head, offsets, total = safetensors_header(named, {"format": "pt"})
        writer = ChunkedWriter(folder / path, total, path)
        writer.write(head)
        for (_, state, name, box), offset in zip(parts, offsets, strict=True):
            dtype, values = tensors[state][name]
            writer.write(np.ascontiguousarray(values[box.slices]).astype(DTYPES[dtype]).tobytes())
            entry, piece = stored[state][name], PieceEntry(len(files), offset, box)
            stored[state][name] = TensorEntry(entry.shape, dtype, (*entry.pieces, piece))
        files.append(writer.close())

    model = tensors["model"]
    names_of_all, per_shard = list(model), -(-len(model) // shards)
    for i in range(shards):
        names = names_of_all[i * per_shard : (i + 1) * per_shard]
        path = "model.safetensors" if shards == 1 else f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write(path, [(name, "model", name, Box.whole(model[name][1].shape)) for name in names])
    slices = _slices({state: named for state, named in tensors.items() if state != "model"}, ranks)
    for rank, parts in enumerate(slices):
        write(f"optimizer/rank-{rank:05}.safetensors", parts)
    config = json.dumps({"model_type": "llama", **fields}).encode()
    writer = ChunkedWriter(folder / "config.json", len(config), "config.json")
    writer.write(config)
    files.append(writer.close())
    states = [state for state in tensors if state != "model"]
    described: dict[str, Any] = {
        "step": step, "samples": 8 * step, "position": 8 * step, "tokens": 256 * step,
        "config": {"model": MODEL_CONFIG, "train": {"steps": 1000}},
        "layout": {"world": ranks, "tensor": 1, "pipeline": 1, "data": ranks, "zero": 1},
        "schedule": {"name": "linear"}, "data": {"fingerprint": "tiny"}, "rng": {"seed": 1},
        "versions": {"shardwise": "0.1.0"}, "created": "2026-01-02T03:04:05+00:00",
        "optimizer": {"name": "adamw", "steps": step, "states": states} if states else None,
    }  # fmt: skip
    manifest = Manifest(**(described | changed), files=tuple(files), tensors=stored)
    (folder / MANIFEST).write(manifest.to_json().encode())
    return folder


def _slices(states: Tensors, ranks: int) -> list[list[tuple[str, str, str, Box]]]:
    """What each rank holds where the flat states are cut into equal runs."""
    held: list[list[tuple[str, str, str, Box]]] = [[] for _ in range(ranks if states else 0)]
    for state, named in states.items():
        total = sum(values.size for _, values in named.values())
        per_rank, at = -(-total // ranks), 0
        for name, (_, values) in named.items():
            for rank in range(ranks):
                low, high = max(at, rank * per_rank), min(at + values.size, (rank + 1) * per_rank)
                for box in Box.of_run(low - at, high - low, values.shape) if low < high else ():
                    label = f"{state}/{name}@{','.join(map(str, box.start))}"
                    held[rank].append((label, state, name, box))
            at += values.size
    return held
