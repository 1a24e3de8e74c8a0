"""Checkpoints of neuronx-distributed: Llama, GPT-NeoX and BERT by their Hugging Face names, cut by TP and PP.

    SOURCE/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt     a rank's state
    SOURCE/model/….pt.tensors/tensor_N.pt                with xser: its tensors, to which the .pt refers by number
    SOURCE/tp_rank_TT_pp_rank_PP/checkpoint.pt           of releases before 0.6 and of BERT's script, under "model"
    SOURCE/tp_rank_TT_pp_rank_PP, ….tensors/tensor_N.pt  of these with xser
    SOURCE/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt     AdamW's state (optimizer_shards.py); without ZeRO-1 of DD = 00
    SOURCE/optim/full_tp_rank_TT_pp_rank_PP.pt           by optimizer/convert_zero_checkpoints.py, of all DD
    SOURCE/optim.dp_rank_DD.tp_rank_TT                   of the GPT-NeoX scripts; of BERT's it is under "optimizer"
    SOURCE/scheduler.pt, SOURCE/user_content.pt          rates; step and arguments. Older ones are beside "model"

As its trainer/checkpoint.py, optimizer/, and parallel_layers/checkpointing.py write them. A layer has the same number
on each pipeline stage. The model code says what the fused tensors of a rank are (modeling_llama_nxd.py, qkv_linear.py):

    gate_up_proj                        [gate; up]
    qkv_proj.weight                     [q; k; v]
    weight_q, weight_k and weight_v,    of GQAQKVColumnParallelLinear, which holds each key/value head several times, so
    or weight_qkv = [q; k; v]           that each rank has one
    query_key_value of a GPT-NeoX       [its heads, 3, head size], as in the whole model

The query heads of a rank attend to the key/value heads of that rank, so the order of the copies says which query heads
belong to a key/value head. scripts/checkpoint_converter.py writes all g heads and then all of them again (K0 K1 … K0
K1 …); other programs write the copies of a head next to each other.

BERT's training script cuts the attention alone, and a test of the library the padded vocabulary too: the shape of a
tensor tells whether a rank has it whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.checkpoint.format.model_files import config_token_ids
from shardwise.checkpoint.storage.root import Root
from shardwise.config import LlamaConfig, weight_names
from shardwise_use.importing import pickled
from shardwise_use.importing.hugging_face import model_of_config_file
from shardwise_use.importing.imported_model import ImportedModel
from shardwise_use.importing.optimizer_shards import ByName, Found, Rank, combine_with_optimizer
from shardwise_use.importing.tensor_parallel_shards import (
    TensorParallelShards,
    replica_drift,
    require_all_ranks,
    tensor_parallel_files,
)
from shardwise_use.importing.torch_dcp import LazyTensor

_RANK = re.compile(r"dp_rank_00_tp_rank_(\d{2,})_pp_rank_(\d{2,})\.pt|tp_rank_(\d{2,})_pp_rank_(\d{2,})")
_OPTIMIZER = re.compile(r"(?:(?:optim\.)?dp_rank_(\d{2,})|full)[._]tp_rank_(\d{2,})(?:_pp_rank_(\d{2,})\.pt)?")
_OLD_FILE = "checkpoint.pt"
_STARTED = "checkpoint"
_DONE = "done"
_SHOWN = 6

_ROW_PARALLEL = re.compile(r".*\.(?:o_proj|down_proj|attention\.dense|dense_4h_to_h|output\.dense)\.(weight|bias)")
_NORM = re.compile(r".*[nN]orm\.(weight|bias)")
_VOCABULARY = re.compile(r".*(embed_tokens|lm_head|embed_in|embed_out|word_embeddings)\.weight|cls\.predictions\.bias")


def open_neuronx(
    source: Path,
    config_file: Path,
    *,
    allow_drift: bool = False,
    ignore: Collection[str] = (),
    weights_only: bool = False,
) -> ImportedModel:
    """The model in a checkpoint of neuronx-distributed, and its progress; `config_file`: config.json, or its folder."""
    described, config = model_of_config_file(config_file, ignore)
    if config.family not in ("llama", "gpt_neox", "bert"):
        raise ConfigError(f"the model in {described} ({config.family}) must be llama, gpt_neox or bert")
    ranks = _ranks(source)
    tensor = max(rank for rank, _ in ranks) + 1
    pipeline = max(stage for _, stage in ranks) + 1
    require_all_ranks(str(source), set(ranks), tensor, pipeline, "tp_rank_{:02d}_pp_rank_{:02d}")
    buffers = re.compile(weight_names(config.family).buffers)
    held = {rank: pickled.load_pickled(path) for rank, path in sorted(ranks.items())}
    values = {rank: (ranks[rank], _values(state, ranks[rank], buffers)) for rank, state in held.items()}
    found = None if weights_only else _optimizers(source, ranks, held)
    shapes = canonical_shapes(config)
    tied = weight_names(config.family).tied if config.tie_word_embeddings else {}

    def combine(where: str, states: ByName) -> ImportedModel:
        shards = TensorParallelShards(where, tensor, allow_drift)
        for stage in range(pipeline):
            place = f"of pipeline stage {stage}" if pipeline > 1 else "that others have"
            shards.add([states[rank, stage] for rank in range(tensor)], place)
        shards.require_floats()
        for copy, name in tied.items():
            shards.require_tied(name, copy)
        tensors = dict(_fused(shards, config)) if isinstance(config, LlamaConfig) else {}
        for name, shape in shapes.items():
            if name not in tensors:
                tensors[name] = _tensor(shards, name, shape)
        weights = shards.weights(shapes, tensors)
        layout = {"tensor": tensor, "pipeline": pipeline}
        return ImportedModel(config, weights, layout, tokens=config_token_ids(Root.of(described)), notes=shards.notes)

    return combine_with_optimizer(
        str(source), values, tied, found, combine, lambda degree: _training(source, held[0, 0], degree)
    )


# ---- files


def _ranks(source: Path) -> dict[tuple[int, int], Path]:
    if (source / _STARTED).is_file() and not (source / _DONE).exists():
        raise ConfigError(f"{source} must be a checkpoint that was completed: it has no file '{_DONE}'")
    ranks = tensor_parallel_files(source / "model" if (source / "model").is_dir() else source, _RANK)
    files = {rank: path / _OLD_FILE if path.is_dir() else path for rank, path in ranks.items()}
    absent = [str(path) for path in files.values() if not path.is_file()]
    if absent:
        raise ConfigError(f"{source} lacks {listing(absent[:_SHOWN])}")
    if not files:
        tags = sorted(path.name for path in source.iterdir() if (path / "model").is_dir())
        hint = f"; it holds the checkpoints {listing(tags[-_SHOWN:])}: name one" if tags else ""
        raise ConfigError(
            f"{source} must hold model/dp_rank_00_tp_rank_00_pp_rank_00.pt, … or tp_rank_00_pp_rank_00, …{hint}"
        )
    return files


def _values(state: Any, path: Path, buffers: re.Pattern[str]) -> dict[str, Any]:
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold the state of a model: a dictionary of tensors")
    names = {re.sub(r"^(module\.)+", "", str(key)): value for key, value in state.items()}
    return {name: value for name, value in names.items() if not buffers.fullmatch(name)}


# ---- the optimizer's state


def _optimizers(source: Path, ranks: Mapping[Rank, Path], held: Mapping[Rank, Any]) -> Found:
    found: Found = {}
    for path in sorted([*(source / "optim").glob("*"), *source.glob("optim.*")]):
        if match := _OPTIMIZER.fullmatch(path.name):
            data, tensor, stage = (int(number or 0) for number in match.groups())
            found[tensor, stage, data] = path, pickled.load_pickled(path)
    inside = {rank: state.get("optimizer") for rank, state in held.items() if isinstance(state, dict)}
    return found or {(*rank, 0): (ranks[rank], state) for rank, state in inside.items() if isinstance(state, dict)}


def _training(source: Path, state: Mapping[str, Any], degree: int) -> dict[str, Any]:
    paths = {name: source / f"{name}.pt" for name in ("scheduler", "user_content")}
    content = {name: pickled.load_pickled(path) for name, path in paths.items() if path.is_file()}
    told = {**(state if "model" in state else {}), **content, **content.get("user_content", {})}
    given = told.get("cli_args") or {}
    per_rank = given.get("train_batch_size") or int(given.get("batch_size", 0)) * int(given.get("grad_accum_usteps", 1))
    return {**told, "given": given, "batch": int(per_rank) * degree, "length": given.get("seq_len")}


# ---- the models


def _tensor(shards: TensorParallelShards, name: str, shape: tuple[int, ...]) -> LazyTensor:
    """A tensor that is not fused with others; `shape`: its canonical shape, without rows of padding."""
    # The library cuts a vocabulary only where it was told to: a rank may hold all of it.
    row_parallel = _ROW_PARALLEL.fullmatch(name)
    first = next(iter(shards.tensors.get(name, ())), None)
    is_whole = first is not None and len(first) >= shape[0] and first.shape[1:] == shape[1:]
    if is_whole or _NORM.fullmatch(name) or (row_parallel and row_parallel[1] == "bias"):
        tensor = shards.copies(name)
    elif row_parallel:
        tensor = shards.rows(name)
    else:
        tensor = shards.columns(name)
    return tensor.rows(0, shape[0]) if _VOCABULARY.fullmatch(name) else tensor


def _fused(shards: TensorParallelShards, config: LlamaConfig) -> Iterator[tuple[str, LazyTensor]]:
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            fused = f"{mlp}.gate_up_proj.{kind}"
            if shards.has(fused):
                gate, up = shards.split(fused, [config.intermediate_size // shards.ranks] * 2)
                yield f"{mlp}.gate_proj.{kind}", gate
                yield f"{mlp}.up_proj.{kind}", up
        attention = f"model.layers.{layer}.self_attn"
        # Only where key/value heads have copies, the output projection is reordered too.
        for letter, tensor in zip("qkvo", _fused_attention(shards, config, attention), strict=False):
            yield f"{attention}.{letter}_proj.weight", tensor


def _fused_attention(shards: TensorParallelShards, config: LlamaConfig, attention: str) -> Sequence[LazyTensor]:
    query_rows = config.num_attention_heads * config.head_dim // shards.ranks
    qkv = f"{attention}.qkv_proj"
    if shards.has(f"{qkv}.weight"):
        return shards.split(f"{qkv}.weight", [query_rows] * 3)
    fused = f"{qkv}.weight_qkv"
    if shards.has(fused):
        key_rows = (len(shards.tensors[fused][0]) - query_rows) // 2
        if key_rows <= 0:
            raise shards.misshapen(fused, shards.parts(fused)[0].shape, f"more than {query_rows} rows")
        return _without_copies(shards, config, attention, shards.split(fused, [query_rows, key_rows, key_rows]))
    if shards.has(f"{qkv}.weight_q"):
        separate = [shards.columns(f"{qkv}.weight_{letter}") for letter in "qkv"]
        return _without_copies(shards, config, attention, separate)
    return []


def _without_copies(
    shards: TensorParallelShards, config: LlamaConfig, attention: str, qkv: Sequence[LazyTensor]
) -> list[LazyTensor]:
    """Q, K, V and the output projection with each head once and in order; `qkv`: as the ranks hold them."""
    out = shards.rows(f"{attention}.o_proj.weight")
    q, k, v = qkv
    n = config.num_attention_heads
    g = config.num_key_value_heads
    d = config.head_dim
    # A slot is a key/value head that some rank holds: each of the g heads has one, or several copies.
    slots = k.shape[0] // d
    has_whole_slots = k.shape == v.shape and k.shape[0] == slots * d
    fits = has_whole_slots and slots and slots % g == 0 and n % slots == 0
    if not fits or q.shape[0] != n * d or out.t.shape[0] != n * d:
        rows = f"{n * d}, and a multiple of {g * d} that divides {n * d} for keys and values"
        raise shards.misshapen(f"{attention}.qkv_proj and o_proj", (q.shape[0], k.shape[0], v.shape[0]), rows)
    copies = slots // g
    # Copies of a head are g slots apart, or next to each other: the order in which they are most alike is taken.
    orders = ([slot % g for slot in range(slots)], [slot // copies for slot in range(slots)])
    drifts = [max(_drift_of_copies(k, heads, d), _drift_of_copies(v, heads, d)) for heads in orders]
    smallest_drift = min(drifts)
    head_of_slot = orders[drifts.index(smallest_drift)]
    if smallest_drift:
        requirement = (
            f"must hold each of its {g} key/value heads (num_key_value_heads) {copies} times, equal to the bit"
        )
        shards.note_drift(f"{attention}.qkv_proj", smallest_drift, requirement, are_matrices=True)
    # All query heads of a slot attend to its head: ordered by the slots' heads, they are in the model's order.
    slot_order = sorted(range(slots), key=lambda slot: (head_of_slot[slot], slot))
    query_rows = n // slots * d
    first_slots = [head_of_slot.index(head) for head in range(g)]
    q, o = (_blocks(matrix, slot_order, query_rows) for matrix in (q, out.t))
    k, v = (_blocks(matrix, first_slots, d) for matrix in (k, v))
    return [q, k, v, o.t]


def _blocks(matrix: LazyTensor, numbers: Sequence[int], rows: int) -> LazyTensor:
    return LazyTensor.cat([matrix.rows(number * rows, (number + 1) * rows) for number in numbers])


def _drift_of_copies(kv: LazyTensor, head_of_slot: Sequence[int], rows: int) -> float:
    """The largest `replica_drift` of slots of so many rows that have the same head."""
    slots = [kv.rows(slot * rows, (slot + 1) * rows).read() for slot in range(len(head_of_slot))]
    return max(replica_drift(slots[head_of_slot.index(head)], slots[slot]) for slot, head in enumerate(head_of_slot))
