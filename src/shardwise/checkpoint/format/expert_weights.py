"""Weights that a block has once for each expert: fused tensors as single ones, and those that a folder lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product

from shardwise.base.errors import ConfigError
from shardwise.base.tensor_box import Box
from shardwise.base.yaml_and_json import json_object
from shardwise.checkpoint.format.manifest import PieceEntry, TensorEntry
from shardwise.checkpoint.format.safetensors import DTYPES
from shardwise.checkpoint.storage.chunks import chunk_numbers_text
from shardwise.checkpoint.storage.root import Root

_FUSED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_LEAVES = {"gate_up": ("gate", "up"), "down": ("down",)}
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
"""The number of an expert in the name of a tensor."""
_OF_EXPERT = re.compile(r"(?:.*\.)?(\d+)\.[^.]+\.experts\.(\d+)\.")
_OF_MLP = re.compile(r"(?:.*\.)?(\d+)\.(?:mlp|block_sparse_moe)\.")
_FIX = "save the model with one tensor for each expert, as transformers does by default"


def unfused_experts(folder: Root, weights: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Name → tensor of a Hugging Face folder, where each fused tensor is replaced by the weights of single experts.

    With `save_original_format=False`, transformers 5 writes the experts of a block as `experts.gate_up_proj`
    `[N, 2F, H]`, the gate's rows first, and `experts.down_proj` `[N, H, F]`: a weight is a run of bytes in it.

    Raises:
        ConfigError: the tensors are transposed, as other programs write them, or may be; or an expert is there twice.
    """
    single: dict[str, TensorEntry] = {}
    for name, tensor in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None or len(tensor.shape) != 3 or 0 in tensor.shape or tensor.dtype not in DTYPES:
            single[name] = tensor
            continue
        layer, kind = match.groups()
        if kind == "gate_up" and f"{layer}.down_proj" in weights:
            _require_orientation(folder, layer, tensor.shape, weights[f"{layer}.down_proj"].shape)
        count, rows, columns = tensor.shape
        shape = (rows // len(_LEAVES[kind]), columns)
        for expert, (number, leaf) in product(range(count), enumerate(_LEAVES[kind])):
            box = Box((expert, number * shape[0], 0), (1, *shape))
            pieces = [_within(piece, box, tensor.dtype) for piece in tensor.pieces if piece.box.intersect(box)]
            of_expert = f"{layer}.{expert}.{leaf}_proj.weight"
            if of_expert in weights:
                raise ConfigError(f"{folder} must have {of_expert} by itself or in {name}, and it has both")
            single[of_expert] = TensorEntry(shape, tensor.dtype, pieces)
    return single


def _within(piece: PieceEntry, box: Box, dtype: str) -> PieceEntry:
    """The part of a fused tensor's piece that lies in the box of one expert's weight, counted from the box's start."""
    overlap = piece.box.intersect(box)
    assert overlap is not None
    # Rows of one expert, as wide as the piece, are one run.
    ((start, _),) = overlap.relative_to(piece.box).runs(piece.box.size)
    inner = overlap.relative_to(box)
    return PieceEntry(piece.file, piece.offset + start * DTYPES[dtype].itemsize, Box(inner.start[1:], inner.size[1:]))


def _require_orientation(folder: Root, layer: str, gate_up: tuple[int, ...], down: tuple[int, ...]) -> None:
    """Raise where two fused tensors are not as transformers 5 has them, or where nothing tells that they are.

    Of one tensor with two equal dimensions the shape says nothing. Programs that transpose one transpose both, and
    of the other one the dimensions then differ; and transformers 5 transposes none.
    """
    shown = f"{folder}: {layer}.gate_up_proj {list(gate_up)} and down_proj {list(down)}"
    if len(down) != 3 or gate_up[1:] != (2 * down[2], down[1]):
        raise ConfigError(
            f"{shown} must be [experts, 2 × width, hidden size] and [experts, hidden size, width]: they are transposed "
            f"or of two models; {_FIX}"
        )
    if gate_up[1] != gate_up[2] and down[1] != down[2]:
        return
    path = folder / "config.json"
    writer = str(json_object(path.read(), str(path)).get("transformers_version")) if path.exists() else "None"
    major = writer.partition(".")[0]
    if not major.isdigit() or int(major) < 5:
        raise ConfigError(
            f"{shown} may be transposed, which two equal dimensions hide, and {path} must name transformers 5 or later "
            f"as their writer (transformers_version: {writer}); {_FIX}"
        )


def differing_expert_blocks(
    where: str, needed: Iterable[str], stored: Iterable[str]
) -> tuple[list[str], Callable[[str], bool]]:
    """The ways in which the experts of a folder are not the model's, and a rule for the names that they explain.

    Args:
        needed: canonical names of the model.
        stored: canonical names in the folder.
    """
    needs, kept = _experts_of_blocks(needed), _experts_of_blocks(stored)
    by_line: dict[str, list[int]] = {}
    if needs.keys() != kept.keys():
        line = f"{where} has experts in {_counted('block', kept)}, and the model in {_counted('block', needs)}"
        by_line[line] = [*(needs.keys() ^ kept.keys())]
    else:
        lines: dict[str, list[int]] = {}
        for block, experts in needs.items():
            if missing := experts - kept[block]:
                lines.setdefault(f"lacks {_counted('expert', missing)} of {{}}", []).append(block)
            if further := kept[block] - experts:
                lines.setdefault(f"has {_counted('expert', further)} of {{}}, which the model lacks", []).append(block)
        by_line = {f"{where} {line.format(_counted('block', blocks))}": blocks for line, blocks in lines.items()}
    explained = {block for blocks in by_line.values() for block in blocks}
    is_other_kind = bool(needs) != bool(kept)

    def is_explained(name: str) -> bool:
        match = _OF_MLP.match(name)
        return is_other_kind or (match is not None and int(match[1]) in explained)

    return [*by_line], is_explained


def _experts_of_blocks(names: Iterable[str]) -> dict[int, set[int]]:
    blocks: dict[int, set[int]] = {}
    for name in names:
        if match := _OF_EXPERT.match(name):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    return blocks


def _counted(noun: str, numbers: Collection[int]) -> str:
    return f"{noun}{'s' * (len(numbers) > 1)} {chunk_numbers_text(numbers)}" if numbers else f"no {noun}"
