"""A model as a Hugging Face folder, which `transformers` loads as it is: `safetensors`, `config.json`, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.canonical_tensors import canonical_tensors, model_tensors
from shardwise.checkpoint.companion_files import Companions
from shardwise.checkpoint.format.writing import CONFIG, MAX_SHARD_BYTES, StreamedWeight, to_json, write_folder
from shardwise.checkpoint.storage.root import Buffer, Root
from shardwise.checkpoint.torch_dtypes import DTYPE_NAMES
from shardwise.config import ModelConfig, shapes_of
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data.tokens.tokenizer import special_token_ids
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh


def export_hugging_face(
    model: nn.Module,
    config: ModelConfig,
    mesh: Mesh,
    folder: Path,
    *,
    tokenizer: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the whole model from however many ranks; collective over the world.

    Rank 0 writes, a tensor at a time, into shards of at most `max_shard_bytes` (a larger tensor has one to itself).
    The folder appears complete or not at all. `tokenizer`: a folder whose files are copied along.

    Raises:
        StoreError: it cannot be written: out of space, or the like.
    """
    if mesh.dp.rank == 0:
        parameters = model_tensors(model, mesh.pp)
        tensors = canonical_tensors(model, pipeline=mesh.pp)
        if mesh.world.rank == 0:
            small_files = model_files(config, next(model.parameters()).dtype, tokenizer)
            weights = [
                StreamedWeight(
                    tensor.name, DTYPE_NAMES[tensor.dtype], tensor.shape, partial(_read, tensors, tensor.name)
                )
                for parameter in parameters
                for tensor in parameter.tensors
            ]
            write_folder(
                Root.of(folder.parent),
                folder.name,
                weights,
                small_files,
                max_shard_bytes=max_shard_bytes,
                replaces=True,
            )
        else:
            # Collective: the other ranks take part in each tensor that rank 0 puts together.
            for _ in tensors:
                pass
    collectives.barrier(mesh.world)


def model_files(
    config: ModelConfig, dtype: torch.dtype, tokenizer: Path | None, companions: Companions | None = None
) -> dict[str, bytes]:
    """Name → content of the files that `transformers` reads beside the weights: `config.json` and the tokenizer's.

    The `config.json` of a user's own model is its `model` section, which only its class reads. The ids that begin and
    end a text are those of the companions, else the tokenizer's, or null: without them transformers would take those of
    its own default tokenizer, which are letters in most vocabularies, and generation would stop there. A model that
    generates nothing has none.
    """
    companions = companions or Companions()
    tokenizer_files: dict[str, bytes] = {}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        tokenizer_files = {name: (tokenizer / name).read_bytes() for name in Root.of(tokenizer).files()}
        if config.causal:
            ids = special_token_ids(tokenizer)
    family = shapes_of(config)
    if family is None:
        fields = config.model_dump(mode="json")
        ids |= {name: value for name, value in companions.ids.items() if name in ids}
    else:
        fields = to_hugging_face(family)
        # Ids that are keys of the family, such as BERT's padding, stay the model's.
        ids |= {name: value for name, value in companions.ids.items() if name not in type(family).model_fields}
    described = {**fields, "torch_dtype": str(dtype).removeprefix("torch."), **ids}
    return {**companions.files, **tokenizer_files, CONFIG: to_json(described)}


def _read(tensors: Iterator[tuple[str, Tensor]], name: str) -> Iterator[Buffer]:
    """The bytes of the next tensor, which has this name."""
    next_name, tensor = next(tensors)
    assert next_name == name
    yield tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
