"""neuronx-distributed's checkpoints made from Hugging Face models, by its layouts and not from our reader.

Layouts: examples/training/llama/modeling_llama_nxd.py, modules/qkv_linear.py, scripts/checkpoint_converter.py
(`convert_full_state_to_tp`: copies of key/value heads and the order of query heads that goes with them),
trainer/checkpoint.py (files, 0.17), optimizer/zero_redundancy_optimizer.py (`save_sharded_state_dict`, of the older
scripts); of BERT examples/training/tp_dp_bert_hf_pretrain, which cuts the attention, and
test/integration/parallel_layers/test_bert_pretraining.py, which cuts the padded vocabulary too.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.use.importing import zero_shards

State = dict[str, Tensor]


def shards_of(weights: State, config: Any, style: str, tp: int, copies: int, adjacent: bool) -> list[State]:
    """Every rank's tensors, all layers."""
    ranks: list[State] = [{} for _ in range(tp)]

    def put(name: str, parts: Any) -> None:
        for rank, part in enumerate(parts):
            ranks[rank][name] = part.contiguous().clone()

    for name, tensor in weights.items():
        if re.search(r"(q|k|v|o|gate|up)_proj\.", name):
            continue
        if re.search(r"embed_tokens|lm_head|embed_in|embed_out|query_key_value|dense_h_to_4h", name):
            put(name, tensor.chunk(tp))
        elif re.search(r"(down_proj|attention\.dense|dense_4h_to_h)\.weight", name):
            put(name, tensor.chunk(tp, dim=1))
        else:
            put(name, [tensor] * tp)
    for i in range(config.num_hidden_layers if config.model_type == "llama" else 0):
        mlp, attention = f"model.layers.{i}.mlp", f"model.layers.{i}.self_attn"
        gates, ups = (weights[f"{mlp}.{part}_proj.weight"].chunk(tp) for part in ("gate", "up"))
        if style == "separate":
            put(f"{mlp}.gate_proj.weight", gates)
            put(f"{mlp}.up_proj.weight", ups)
        else:
            put(f"{mlp}.gate_up_proj.weight", [torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        q, k, v, o = (weights[f"{attention}.{part}_proj.weight"] for part in "qkvo")
        if style.startswith("grouped"):
            q, k, v, o = replicated(q, k, v, o, config, copies, adjacent)
        parts = [each.chunk(tp) for each in (q, k, v)]
        joined = [torch.cat(three) for three in zip(*parts, strict=True)]
        if style == "fused":
            put(f"{attention}.qkv_proj.weight", joined)
        elif style == "grouped-fused":
            put(f"{attention}.qkv_proj.weight_qkv", joined)
        else:
            names = "qkv_proj.weight_{}" if style == "grouped" else "{}_proj.weight"
            for letter, part in zip("qkv", parts, strict=True):
                put(f"{attention}.{names.format(letter)}", part)
        put(f"{attention}.o_proj.weight", o.chunk(tp, dim=1))
    return ranks


def shards_of_bert(weights: State, tp: int, *, vocabulary_cut: bool) -> list[State]:
    """Every rank's tensors. transformers of that time saved the positions too, and the decoder beside the embedding."""
    ranks: list[State] = [{"bert.embeddings.position_ids": torch.arange(24)[None]} for _ in range(tp)]
    for name, tensor in weights.items():
        parts = [tensor] * tp
        if ".attention.self." in name:
            parts = list(tensor.chunk(tp))
        elif name.endswith("attention.output.dense.weight"):
            parts = list(tensor.chunk(tp, dim=1))
        elif vocabulary_cut and re.search(r"word_embeddings|cls\.predictions\.(bias|decoder)", name):
            padding = tensor.new_full((tp - len(tensor) % tp, *tensor.shape[1:]), 7.0)
            padded = torch.cat([tensor, padding])
            parts = [padded] * tp if name.endswith("bias") else list(padded.chunk(tp))
        for rank, part in enumerate(parts):
            ranks[rank][name] = part.contiguous().clone()
    return ranks


def replicated(q: Tensor, k: Tensor, v: Tensor, o: Tensor, config: Any, copies: int, adjacent: bool) -> list[Tensor]:
    """K and V with each head `copies` times, and the query heads, rows of q and columns of o, in the order for it."""
    d, kv = config.head_dim, config.num_key_value_heads
    if adjacent:
        k, v = (each.unflatten(0, (kv, d)).repeat_interleave(copies, dim=0).flatten(0, 1) for each in (k, v))
        return [q, k, v, o]
    # Query heads: group by group there, copy by copy here.
    heads = torch.arange(config.num_attention_heads).view(kv, copies, -1).transpose(0, 1).flatten()
    q = q.unflatten(0, (-1, d))[heads].flatten(0, 1)
    o = o.unflatten(1, (-1, d))[:, heads].flatten(1, 2)
    return [q, k.repeat(copies, 1), v.repeat(copies, 1), o]


def by_stage(ranks: list[State], layers: int, pp: int) -> dict[tuple[int, int], State]:
    """Layers keep their numbers; what comes before and after them is on the first and the last stage."""
    states: dict[tuple[int, int], State] = {(t, p): {} for t in range(len(ranks)) for p in range(pp)}
    for rank, state in enumerate(ranks):
        for name, tensor in state.items():
            layer = re.search(r"layers\.(\d+)\.", name)
            ends = 0 if "embed_tokens" in name or "embed_in" in name else pp - 1
            states[rank, int(layer[1]) * pp // layers if layer else ends][name] = tensor
    return states


class TensorReference:
    """As torch_xla has it."""

    __slots__ = ("tid",)

    def __init__(self, tid: int) -> None:
        self.tid = tid


REFERENCE = ("torch_xla.utils.serialization", TensorReference, lambda number, _: TensorReference(number))
Moments = tuple[State, State]


def write(
    model: Any, folder: Path, *, tp: int = 1, pp: int = 1, style: str = "separate", copies: int = 1,
    adjacent: bool = False, xser: bool = False, old: bool = False, vocabulary_cut: bool = False,
    moments: Moments | None = None, beside: State | None = None, **options: Any,
) -> Path:  # fmt: skip
    """A whole checkpoint; `old`: as releases before 0.6, and BERT's script, named files.

    Args:
        moments: the optimizer's state, of each tensor of the model by its name; `options` as of `state_dicts`.
        beside: scheduler and user content; of old checkpoints what the file of weights has beside them.
    """
    weights = {name.replace("lm_head", "embed_out") if model.config.model_type == "gpt_neox" else name: tensor.detach()
               for name, tensor in model.state_dict().items()}  # fmt: skip
    if model.config.tie_word_embeddings:
        weights = {name: each for name, each in weights.items() if name not in ("lm_head.weight", "embed_out.weight")}

    def cut(tensors: State) -> dict[tuple[int, int], State]:
        if model.config.model_type == "bert":
            ranks = shards_of_bert(tensors, tp, vocabulary_cut=vocabulary_cut)
        else:
            ranks = shards_of(tensors, model.config, style, tp, copies, adjacent)
        return by_stage(ranks, model.config.num_hidden_layers, pp)

    reference = REFERENCE if xser else None
    masters = cut(options.pop("masters")) if options.get("masters") else None
    both = None if moments is None else [cut(moment) for moment in moments]
    for (rank, stage), state in cut(weights).items():
        saved: Any = {"model": state, **(beside or {})} if old else state
        states: list[Any] = []
        if both is not None:
            # BERT's decoder is its embedding, and its positions are a buffer.
            names = [name for name in state if not re.search(r"decoder\.(weight|bias)|position_ids", name)]
            pairs = {name: (both[0][rank, stage][name], both[1][rank, stage][name]) for name in names}
            own = None if masters is None else masters[rank, stage]
            states = zero_shards.state_dicts(pairs, own, **options)
        if old and "dp" in options and options["dp"] is None:
            saved["optimizer"] = states.pop()
        for data, each in enumerate(states):
            name = f"dp_rank_{data:02d}_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            place = folder / f"optim.dp_rank_{data:02d}.tp_rank_{rank:02d}" if old else folder / "optim" / name
            zero_shards.save(each, place, None if old else reference)
        if not old:
            path = folder / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
        else:
            path = folder / f"tp_rank_{rank:02d}_pp_rank_{stage:02d}"
            path = path if xser else path / "checkpoint.pt"
        zero_shards.save(saved, path, reference)
    for name, content in (beside or {}).items():
        if not old:
            torch.save(content, folder / f"{name}.pt")
    return folder
