"""Megatron-LM's checkpoints made from Hugging Face models, by its own layouts: written from them, not from our reader.

Layouts: megatron/core/transformer/attention.py (`get_query_key_value_tensors`), mlp.py (`torch.chunk` of a rank's
output), training/checkpointing.py (names of files, and `fix_query_key_value_ordering` of the old versions).
"""

import argparse
import json
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

State = dict[str, Any]


def fuse(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, tp: int, version: int) -> list[Tensor]:
    """Each rank's query_key_value, weights or biases."""
    if version >= 2:  # [groups, (heads / groups + 2) · d]
        per_group = [t.reshape(groups, -1, *t.shape[1:]) for t in (q, k, v)]
        return list(torch.cat(per_group, dim=1).reshape(-1, *q.shape[1:]).chunk(tp))
    ranks = []
    for parts in zip(q.chunk(tp), k.chunk(tp), v.chunk(tp), strict=True):
        if version == 0:  # [3, n, d]
            ranks.append(torch.cat(parts))
        else:  # [n, d, 3]
            local = [t.reshape(heads // tp, -1, *t.shape[1:]) for t in parts]
            ranks.append(torch.stack(local, dim=2).reshape(-1, *q.shape[1:]))
    return ranks


def padded(weight: Tensor, multiple: int) -> Tensor:
    extra = -len(weight) % multiple
    return torch.cat([weight, torch.full((extra, weight.shape[1]), 7.0, dtype=weight.dtype)])


def layer_of_gpt2(weights: State, i: int, heads: int, tp: int, version: int) -> list[State]:
    """One layer's tensors by rank, by the role that they have in Megatron."""
    at = f"transformer.h.{i}."
    hidden = weights[at + "ln_1.weight"].shape[0]
    ranks: list[State] = [{} for _ in range(tp)]
    for kind in ("weight", "bias"):
        fused = weights[f"{at}attn.c_attn.{kind}"]
        q, k, v = (fused.t() if kind == "weight" else fused).contiguous().split(hidden)
        up = weights[f"{at}mlp.c_fc.{kind}"]
        for rank, (qkv, fc1) in enumerate(
            zip(
                fuse(q, k, v, heads, heads, tp, version),
                (up.t() if kind == "weight" else up).contiguous().chunk(tp),
                strict=True,
            )
        ):
            ranks[rank][f"input.{kind}"] = weights[f"{at}ln_1.{kind}"]
            ranks[rank][f"post.{kind}"] = weights[f"{at}ln_2.{kind}"]
            ranks[rank][f"qkv.{kind}"] = qkv
            ranks[rank][f"fc1.{kind}"] = fc1
    for role, name in (("proj", "attn.c_proj"), ("fc2", "mlp.c_proj")):
        for rank, part in enumerate(weights[f"{at}{name}.weight"].t().chunk(tp, dim=1)):
            ranks[rank][f"{role}.weight"] = part.contiguous()
            ranks[rank][f"{role}.bias"] = weights[f"{at}{name}.bias"]
    return ranks


def layer_of_llama(weights: State, i: int, heads: int, groups: int, tp: int) -> list[State]:
    at = f"model.layers.{i}."
    ranks: list[State] = [{} for _ in range(tp)]
    for kind in ("weight", "bias"):
        if f"{at}self_attn.q_proj.{kind}" not in weights:
            continue
        qkv = fuse(*(weights[f"{at}self_attn.{n}_proj.{kind}"] for n in "qkv"), heads, groups, tp, 3)
        gates, ups = (weights[f"{at}mlp.{n}_proj.{kind}"].chunk(tp) for n in ("gate", "up"))
        for rank in range(tp):
            ranks[rank][f"qkv.{kind}"] = qkv[rank]
            ranks[rank][f"fc1.{kind}"] = torch.cat([gates[rank], ups[rank]])
    for role, name in (("proj", "self_attn.o_proj"), ("fc2", "mlp.down_proj")):
        for rank, part in enumerate(weights[f"{at}{name}.weight"].chunk(tp, dim=1)):
            ranks[rank][f"{role}.weight"] = part.contiguous()
            if f"{at}{name}.bias" in weights:
                ranks[rank][f"{role}.bias"] = weights[f"{at}{name}.bias"]
    for rank in range(tp):
        ranks[rank]["input.weight"] = weights[f"{at}input_layernorm.weight"]
        ranks[rank]["post.weight"] = weights[f"{at}post_attention_layernorm.weight"]
    return ranks


def layer_of_mixtral(weights: State, i: int, heads: int, groups: int, tp: int) -> list[State]:
    """As of a Llama, with a router in the place of its MLP, and the matrices of an MLP for each expert."""
    at = f"model.layers.{i}.mlp."
    ranks: list[State] = [{} for _ in range(tp)]
    both, down = (weights[f"{at}experts.{name}_proj"] for name in ("gate_up", "down"))
    for expert, (gate_up, out) in enumerate(zip(both, down, strict=True)):
        own = dict(zip(("gate", "up", "down"), (*gate_up.chunk(2), out), strict=True))
        mlp = {f"{at}{name}_proj.weight": tensor for name, tensor in own.items()}
        for rank, state in enumerate(layer_of_llama(weights | mlp, i, heads, groups, tp)):
            fcs = {f"{fc}_of_{expert}.weight": state.pop(f"{fc}.weight") for fc in ("fc1", "fc2")}
            ranks[rank] |= {**state, **fcs, "router.weight": weights[f"{at}gate.weight"]}
    return ranks


_OF_EXPERTS = {
    f"{fc}_of_{expert}": f"mlp.experts.local_experts.{expert}.linear_{fc}"
    for expert in range(4)
    for fc in ("fc1", "fc2")
}
OTHERS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
NAMES: dict[str, dict[str, str]] = OTHERS["megatron"]
NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))["megatron"]
NAMES["core"] |= _OF_EXPERTS
NAMES["te"] |= _OF_EXPERTS


def named(style: str, role_and_kind: str) -> str:
    role, kind = role_and_kind.split(".")
    name = NAMES[style][role]
    return name + kind if name.endswith("_") else f"{name}.{kind}"


class Source:
    """A model to be cut. `vocabulary`: rows are padded to a multiple of it, as --make-vocab-size-divisible-by does."""

    def __init__(self, model: Any, args: argparse.Namespace, *, multiple: int = 32) -> None:
        config = model.config
        self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.args, self.multiple = args, multiple
        self.is_gpt2 = config.model_type == "gpt2"
        self.heads, self.layers = config.num_attention_heads, config.num_hidden_layers
        self.groups = getattr(config, "num_key_value_heads", self.heads)
        self.tied = config.tie_word_embeddings

    def word(self, tp: int) -> list[Tensor]:
        name = "transformer.wte.weight" if self.is_gpt2 else "model.embed_tokens.weight"
        return list(padded(self.weights[name], self.multiple * tp).chunk(tp))

    def head(self, tp: int) -> list[Tensor]:
        return list(padded(self.weights["lm_head.weight"], self.multiple * tp).chunk(tp))

    def layer(self, i: int, tp: int, version: int) -> list[State]:
        if self.is_gpt2:
            return layer_of_gpt2(self.weights, i, self.heads, tp, version)
        layer_of = layer_of_mixtral if "num_experts" in self.args else layer_of_llama
        return layer_of(self.weights, i, self.heads, self.groups, tp)

    def final(self) -> State:
        prefix = "transformer.ln_f" if self.is_gpt2 else "model.norm"
        return {
            f"final.{k}": self.weights[f"{prefix}.{k}"] for k in ("weight", "bias") if f"{prefix}.{k}" in self.weights
        }


def stage_states(
    source: Source, style: str, tp: int, pp: int, virtual: int, version: int
) -> dict[tuple[int, int], State]:
    """(rank, stage) → what a file has beside arguments: `model`, or `model0` and so on."""
    per_block = source.layers // (pp * virtual)
    states: dict[tuple[int, int], State] = {(t, p): {} for t in range(tp) for p in range(pp)}
    for stage in range(pp):
        for chunk in range(virtual):
            first = (chunk * pp + stage) * per_block
            layers = [source.layer(i, tp, version) for i in range(first, first + per_block)]
            begins = stage == 0 and chunk == 0
            ends = stage == pp - 1 and chunk == virtual - 1
            for rank in range(tp):
                block = {
                    f"layers.{i}.{named(style, role)}": tensor
                    for i, by_rank in enumerate(layers)
                    for role, tensor in by_rank[rank].items()
                }
                if ends:
                    block |= {named(style, role): tensor for role, tensor in source.final().items()}
                build = {"core": core_model, "te": core_model, "nemo": nemo_model}.get(style, legacy_model)
                key = "model" if virtual == 1 else f"model{chunk}"
                states[rank, stage][key] = build(source, style, block, rank, tp, begins, ends)
    return states


def core_model(source: Source, style: str, block: State, rank: int, tp: int, begins: bool, ends: bool) -> State:
    """Flat, as `GPTModel.state_dict_for_save_checkpoint`."""
    state = {f"decoder.{name}": tensor for name, tensor in block.items()}
    if begins:
        state["embedding.word_embeddings.weight"] = source.word(tp)[rank]
        if source.is_gpt2:
            state["embedding.position_embeddings.weight"] = source.weights["transformer.wpe.weight"]
    if ends and not (source.tied and begins):
        state["output_layer.weight"] = source.word(tp)[rank] if source.tied else source.head(tp)[rank]
        state["output_layer._extra_state"] = None
    if style == "te":
        state["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    return state


def nemo_model(source: Source, style: str, block: State, rank: int, tp: int, begins: bool, ends: bool) -> State:
    """Flat, as the `state_dict` of the module that PyTorch Lightning saves, with NeMo's list of buffers."""
    inside, inv_freq = "model.language_model.", "self_attention.core_attention.rotary_emb.inv_freq"
    state = {f"{inside}encoder.{name}": tensor for name, tensor in block.items()}
    if begins:
        state[f"{inside}embedding.word_embeddings.weight"] = source.word(tp)[rank]
        if source.is_gpt2:
            state[f"{inside}embedding.position_embeddings.weight"] = source.weights["transformer.wpe.weight"]
    if ends and not source.tied:
        state[f"{inside}output_layer.weight"] = source.head(tp)[rank]
    if ends and source.tied and not begins:
        state["model.word_embeddings.weight"] = source.word(tp)[rank]
    buffers = [] if source.is_gpt2 else [f"{inside}encoder.layers.0.{inv_freq}"]
    return state | {name: torch.ones(4) for name in buffers} | {"untrained_buffer_names": buffers}


def legacy_model(source: Source, style: str, block: State, rank: int, tp: int, begins: bool, ends: bool) -> State:
    """Nested, as `megatron.legacy`'s TransformerLanguageModel."""
    inner: State = {"transformer" if style == "old" else "encoder": block}
    state: State = {"language_model": inner}
    if begins:
        inner["embedding"] = {"word_embeddings": {"weight": source.word(tp)[rank]}}
        if source.is_gpt2:
            inner["embedding"]["position_embeddings"] = {"weight": source.weights["transformer.wpe.weight"]}
    if ends and not source.tied:
        inner["output_layer"] = {"weight": source.head(tp)[rank]}
    if ends and source.tied and not begins:
        state["word_embeddings_for_head"] = {"weight": source.word(tp)[rank]}
    return state


def write(
    source: Source, folder: Path, style: str, *, tp: int = 1, pp: int = 1, virtual: int = 1, version: int = 3
) -> Path:
    """The whole checkpoint of iteration 100, with what a training leaves in it beside weights."""
    args = argparse.Namespace(**vars(source.args))
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
    args.padded_vocab_size = tp * len(source.word(tp)[0])
    (folder / "iter_0000100").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    for (rank, stage), state in stage_states(source, style, tp, pp, virtual, version).items():
        args.rank = stage * tp + rank
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
        whole: State = {"args": args, "iteration": 100, **state}
        if version:  # version 0 is from before there was a number
            whole["checkpoint_version"] = float(version)
        whole["optimizer"] = {"param_groups": [{"lr": 0.1}], "state": {0: {"exp_avg": torch.zeros(3)}}}
        states = {"np_rng_state": np.random.RandomState(0).get_state(), "random_rng_state": random.Random(0).getstate()}
        whole["rng_state"] = [states]
        target = folder / "iter_0000100" / name
        target.mkdir()
        torch.save(whole, target / "model_optim_rng.pt")
    return folder


def settings_of(program: str, model: Any, **own: Any) -> State:
    """Settings of names.yaml, with these beside them."""
    config, table = model.config, OTHERS[program]
    return {
        name: getattr(config, value[7:]) if str(value).startswith("config.") else value for name, value in table.items()
    } | own


def gpt_args(model: Any, **changes: Any) -> argparse.Namespace:
    own = {"kv_channels": model.config.n_embd // model.config.n_head, "params_dtype": torch.bfloat16}
    own["untie_embeddings_and_output_weights"] = not model.config.tie_word_embeddings
    return argparse.Namespace(**settings_of("megatron gpt", model, **own) | changes)


def llama_args(model: Any, **changes: Any) -> argparse.Namespace:
    config = model.config
    own = {"kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}
    own["add_bias_linear"] = getattr(config, "attention_bias", False)
    own["untie_embeddings_and_output_weights"] = not config.tie_word_embeddings
    return argparse.Namespace(**settings_of("megatron llama", model, **own) | changes)


ORDERS = {
    "core": ("input", "proj", "qkv", "post", "fc1", "fc2", "router", *_OF_EXPERTS),
    "te": ("proj", "input", "qkv", "post", "fc1", "fc2", "router", *sorted(_OF_EXPERTS)),
}
"""Roles of a layer as its modules have their parameters; TransformerEngine has the experts in one module."""


def whole_tensors(source: Source, style: str, numbered: bool) -> State:
    """All tensors as `sharded_state_dict` names them: layers stacked, or numbered where they differ."""
    (state,) = stage_states(source, style, 1, 1, 1, 3).values()
    found = {name: tensor for name, tensor in state["model"].items() if "_extra_state" not in name}
    experts = sorted({name for name in found if "local_experts.0." in name})
    for name in experts:
        each = [found.pop(name.replace("experts.0.", f"experts.{expert}.")) for expert in range(4)]
        found[name.replace("local_experts.0.", "experts.")] = torch.stack(each)
    if numbered:
        return found
    roles = {name.removeprefix("decoder.layers.0.") for name in found if name.startswith("decoder.layers.0.")}
    stacked = {
        f"decoder.layers.{role}": torch.stack([found[f"decoder.layers.{i}.{role}"] for i in range(source.layers)])
        for role in roles
    }
    return stacked | {name: tensor for name, tensor in found.items() if not name.startswith("decoder.layers.")}


def buffer(state: State, style: str, sizes: tuple[int, ...]) -> list[Tensor]:
    """A rank's parameters as its distributed optimizer lays them out: reversed, each at a multiple of 64 elements.

    `sizes`: number of parameters in each bucket but the last.
    """
    outside = [f"embedding.{name}_embeddings.weight" for name in ("word", "position")]
    layers = sorted({int(name.split(".")[2]) for name in state if name.startswith("decoder.layers.")})
    inside = [f"decoder.layers.{i}.{named(style, f'{r}.{k}')}" for i in layers for r in ORDERS[style] for k in KINDS]
    last = [f"decoder.final_layernorm.{k}" for k in KINDS] + ["output_layer.weight"]
    names = [name for name in (*outside, *inside, *last) if name in state][::-1]
    buckets: list[Tensor] = []
    for first, stop in zip((0, *sizes), (*sizes, len(names)), strict=True):
        flat: list[Tensor] = []
        for name in names[first:stop]:
            flat.append(torch.full((-sum(map(len, flat)) % 64,), 99.0))
            flat.append(state[name].flatten().float())
        buckets.append(torch.cat(flat))
    return buckets


KINDS = ("weight", "bias")
MOMENTS = {"param": lambda weight: weight, "exp_avg": lambda weight: weight * 0.5, "exp_avg_sq": torch.square}
"""State → what it is of a weight, element by element."""
GROUPS = [
    {"lr": 5e-4, "max_lr": 1e-3, "weight_decay": 0.1, "step": 98},
    {"lr": 5e-4, "max_lr": 1e-3, "weight_decay": 0.0},
]
SCHEDULE, TRAINING = OTHERS["megatron schedule"], OTHERS["megatron training"]


def write_dist(
    source: Source, folder: Path, form: str = "by name", *, style: str = "core", tp: int = 1, pp: int = 1,
    virtual: int = 1, numbered: bool = False, sizes: tuple[int, ...] = (), common: State | None = None,
) -> Path:  # fmt: skip
    """A checkpoint of iteration 100 in the `torch_dist` format; `form` of the state: "by name", "buffers" or "none"."""
    args = argparse.Namespace(**{**TRAINING, **vars(source.args)})
    args.seq_length = TRAINING["seq_length"]
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
    tensors = whole_tensors(source, style, numbered)
    held: State = {"args": args, "iteration": 100, "checkpoint_version": 3.0, "opt_param_scheduler": SCHEDULE}
    if form == "by name":
        tensors |= {
            f"optimizer.state.{kind}.{name}": of(tensor.float())
            for name, tensor in tensors.items()
            for kind, of in MOMENTS.items()
        }
        held["optimizer"] = {"optimizer": {"param_groups": GROUPS}}
    elif form == "buffers":
        for (rank, stage), states in stage_states(source, style, tp, pp, virtual, 3).items():
            group = f"optimizer.distributed.dp_group_idx_{stage * tp + rank}"
            tensors[f"{group}.optimizer/shard_0_1"] = [{"param_groups": GROUPS}]
            for chunk, state in enumerate(states.values()):
                for number, bucket in enumerate(buffer(state, style, sizes)):
                    place = f"{group}.gbuf_idx_{chunk}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}"
                    tensors |= {f"{place}.{kind}": of(bucket) for kind, of in MOMENTS.items()}
        held["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    target = folder / "iter_0000100"
    target.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    with warnings.catch_warnings():  # one process alone is meant
        warnings.simplefilter("ignore")
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        objects = {"rng_state/shard_0_1": [{"np_rng_state": 1}]}
        dcp.save(tensors | objects, checkpoint_id=target, no_dist=True, planner=planner)
    # Megatron Core keeps the plans of its ranks in the list of tensors.
    listed = pickle.loads((target / ".metadata").read_bytes())
    plan = WriteItem(MetadataIndex("output_layer.weight"), WriteItemType.SHARD)
    listed.all_local_plans = [SavePlan([plan])]
    (target / ".metadata").write_bytes(pickle.dumps(listed))
    torch.save(held | (common or {}), target / "common.pt")
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (target / "metadata.json").write_text(json.dumps(described))
    return folder
