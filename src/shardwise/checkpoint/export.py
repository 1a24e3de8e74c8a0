"""A model as a Hugging Face folder, which `transformers` loads as it is: `safetensors`, `config.json`, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise import comm
from shardwise.checkpoint.canonical import canonical
from shardwise.config import ModelConfig, OwnConfig
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data import special_token_ids
from shardwise.mesh import Mesh
from shardwise.store.writing import MAX_SHARD_BYTES


def export_hugging_face(
    model: nn.Module,
    config: ModelConfig,
    mesh: Mesh,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the whole model from however many ranks; collective over the tensor-parallel ranks.

    Data-parallel replica 0's first tensor-parallel rank writes, one shard of at most `max_shard_bytes` at a time (a
    larger tensor has one to itself). The folder appears complete or not at all. `tokenizer`: a folder whose files are
    copied along.
    """
    if mesh.dp.rank == 0:
        tensors = canonical(model)
        if mesh.tp.rank == 0:
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            try:
                _write_weights(tensors, partial, max_shard_bytes)
                described = hugging_face_config(config, next(model.parameters()).dtype, tokenizer)
                (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
                for file in sorted(tokenizer.iterdir()) if tokenizer else ():
                    shutil.copy(file, partial / file.name)
                shutil.rmtree(folder, ignore_errors=True)
                partial.replace(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        else:
            for _ in tensors:
                pass
    comm.barrier(mesh.world)


def hugging_face_config(config: ModelConfig, dtype: torch.dtype, tokenizer: Path | None = None) -> dict[str, Any]:
    """The model's `config.json`; of a user's own model its `model` section, which only its class reads.

    The ids that begin and end a text are the tokenizer's, or null: left out, transformers would take those of its own
    default tokenizer, which are letters in most vocabularies, and generation would stop there. A model that generates
    nothing has none.
    """
    fields = config.model_dump(mode="json") if isinstance(config, OwnConfig) else to_hugging_face(config)
    special: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None and config.causal:
        special = special_token_ids(tokenizer)
    return {**fields, "torch_dtype": str(dtype).removeprefix("torch."), **special}


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> None:
    shard: dict[str, Tensor] = {}
    written: list[dict[str, int]] = []
    held = 0

    def flush() -> None:
        nonlocal held
        save_file(shard, folder / f"part-{len(written)}", metadata={"format": "pt"})
        written.append({name: t.numel() * t.element_size() for name, t in shard.items()})
        shard.clear()
        held = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > max_shard_bytes:
            flush()
        shard[name] = tensor.cpu().contiguous()
        held += size
    flush()
    if len(written) == 1:
        (folder / "part-0").replace(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{len(written):05}.safetensors" for i in range(len(written))]
    for i, name in enumerate(names):
        (folder / f"part-{i}").replace(folder / name)
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in written)},
        "weight_map": {tensor: name for name, sizes in zip(names, written, strict=True) for tensor in sizes},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
