"""Checkpoints of torchtitan: Llama 3 and Qwen 3 models with the state of AdamW, by its CheckpointManager.

    SOURCE/step-N/.metadata, __R_0.distcp     torch's distributed checkpoint

The names are flat: weights as `layers.0.attention.qkv_linear.wq.weight`; `optimizer.state.NAME.exp_avg` and
`optimizer.param_groups.NAME.lr`; `lr_scheduler.last_epoch`; `train_state.step` and `.ntokens_seen`;
`dataloader.world_size`. The last checkpoint of a run has the weights alone by default. No file says which model it is.

Llama 3's queries and keys are rotated in neighbouring pairs, those of Hugging Face in halves: the rows of each head
change their order. With a fused projection the weights are saved apart, and the moments as one tensor `wqkv`: of each
key/value head the rows of its queries, of its key and of its value. `ntokens_seen` counts the tokens of one
data-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.config import FamilyConfig
from shardwise_use.importing import dcp_models
from shardwise_use.importing.hugging_face import model_of_config_file
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress
from shardwise_use.importing.torch_dcp import DcpFolder, LazyTensor
from shardwise_use.sparse_models import TORCHTITAN_BIAS, TORCHTITAN_NAMES, split_sparse_name

_OTHER = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
_MODULES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk", "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", **TORCHTITAN_NAMES,
}  # fmt: skip
"""Canonical module, `split_sparse_name` → torchtitan's."""
_FAMILIES = {"llama": True, "qwen3": False, "qwen3_moe": False}
"""Family → its heads are rotated in neighbouring pairs there."""


def open_torchtitan(
    source: Path, config_file: Path, ignore: Collection[str] = (), *, weights_only: bool = False
) -> ImportedModel:
    """The model of a checkpoint of torchtitan, with its progress where the optimizer's state is there.

    Args:
        source: the folder of one step, or of several, of which the newest is taken.
        config_file: the model's Hugging Face `config.json`, or its folder (torchtitan's `hf_assets_path`).
    """
    folder = dcp_models.open_dcp_folder(dcp_models.newest_step_folder(source), "torchtitan")
    path, config = model_of_config_file(config_file, ignore)
    if config.family not in _FAMILIES:
        raise ConfigError(f"{path}: its family ({config.family}) must be {listing(_FAMILIES, 'or')} with torchtitan")
    stored = {name: tensor for name, tensor in folder.tensors.items() if not name.startswith(_OTHER)}
    for name in [name for name in stored if TORCHTITAN_BIAS.fullmatch(name)]:
        if bool(stored.pop(name).read().any()):
            raise ConfigError(f"{folder.where}: {name} must be 0, and is not: {config.family} has no such bias")
    if config.tie_word_embeddings:
        for copy in ("lm_head.weight", "output.weight"):
            dcp_models.drop_tied_copy(folder.where, stored, "tok_embeddings.weight", copy)
    weights = dcp_models.named_weights(folder.where, config, _tensors(config, stored), stored)
    progress, notes = (None, []) if weights_only else _progress(folder, config)
    return ImportedModel(config, weights, notes=notes, progress=progress)


def _tensors(config: FamilyConfig, stored: Mapping[str, LazyTensor]) -> Iterator[tuple[str, str, LazyTensor]]:
    for name in canonical_shapes(config):
        plain, number = split_sparse_name(name)
        there = dcp_models.foreign_name(plain, "layers", _MODULES)
        # The weights of several modules are one tensor, whose name is that of the parameter.
        there = there if number is None else there.removesuffix(".weight")
        fused = re.sub(r"\.w([qkv])(\.\w+)$", r".wqkv\2", there)
        if there not in stored and fused not in stored:
            # Releases before 0.3.
            there = there.replace("qkv_linear.", "").replace("lm_head.", "output.")
        if there in stored:
            tensor = stored[there] if number is None else stored[there][number]
        elif fused in stored:
            there, tensor = fused, _of_fused(stored[fused], config, there.rpartition(".")[0][-1])
        else:
            continue
        is_rotated = _FAMILIES[config.family] and re.search(r"\.[qk]_proj\.", name)
        yield name, there, tensor.by_rows(config.head_dim, dcp_models.pairs_to_halves) if is_rotated else tensor


def _of_fused(tensor: LazyTensor, config: FamilyConfig, letter: str) -> LazyTensor:
    size, kv_heads = config.head_dim, config.num_key_value_heads or config.num_attention_heads
    rows = len(tensor) // kv_heads
    stops = {"q": (0, rows - 2 * size), "k": (rows - 2 * size, rows - size), "v": (rows - size, rows)}
    start, stop = stops[letter]
    return LazyTensor.cat([tensor.rows(head * rows + start, head * rows + stop) for head in range(kv_heads)])


def _progress(folder: DcpFolder, config: FamilyConfig) -> tuple[ImportedProgress | None, list[str]]:
    if not any(name.startswith("optimizer.") for name in folder.tensors):
        return None, [f"{folder.where} has weights alone: torchtitan writes no more at the end of a run by default"]
    step, tokens, ranks = (
        folder.object(name) if name in folder.objects else None
        for name in ("train_state.step", "train_state.ntokens_seen", "dataloader.world_size")
    )
    if type(step) is not int or step < 1:
        raise ConfigError(f"{folder.where} must have the step of its training, train_state.step, and has {step!r}")
    progress = dcp_models.adamw_progress(folder, "optimizer.", step, config, partial(_tensors, config))
    if progress is None:
        return None, [f"the optimizer's state of {folder.where} is not AdamW's: the weights alone are imported"]
    notes = [
        "torchtitan's checkpoints do not tell the schedule of the rates (optimizer.schedule), clipping "
        "(optimizer.max_norm; there training.max_norm) and train.steps: give them as they were there"
    ]
    if type(tokens) is int and type(ranks) is int:
        progress = replace(progress, tokens=tokens * ranks)
        notes.append(
            f"{tokens:,} tokens on each of {ranks} data-parallel ranks: with context parallelism, give --tokens"
        )
    return progress, notes
