"""Sparse models in the files of other programs: what they call the experts of a block, and how they keep them.

Importers and the export to GGUF ask this file for all that models with experts alone have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.config import FamilyConfig
from shardwise.config.hugging_face_names import ROUTER_BIAS

_NUMBERED = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
NEMO_ARGUMENTS = {"num_moe_experts": "num_experts"}
"""Keys of NeMo's configuration → Megatron-LM's arguments."""
MEGATRON_NUMBERS = {"num_experts": None, "expert_model_parallel_size": 1}
"""Arguments of Megatron-LM that models with gates may have → values that change nothing."""
MEGATRON_ARGUMENTS = {
    "moe_shared_expert_intermediate_size": None, "moe_router_enable_expert_bias": None,
    "moe_router_score_function": "softmax", "moe_router_num_groups": None, "moe_router_topk_scaling_factor": None,
    "moe_apply_probs_on_input": None, "moe_latent_size": None,
}  # fmt: skip
"""Arguments of Megatron-LM that make a model which no family covers, unless they have these values."""
MEGATRON_NAMES = (
    (r"mlp\.router\.(weight)", "router"),
    (r"mlp\.experts\.(?:local_|)experts\.(\d+)\.linear_(fc[12])\.(weight)", r"experts.\1.\2"),
)
"""Megatron Core's names in a layer, and the roles of such weights (`importing/megatron_model.py`)."""
MEGATRON_MODULES = dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), ("router", "copies"))
"""Hugging Face's modules of these roles, and the way in which tensor-parallel ranks hold them."""
MEGATRON_STACKED = re.compile(r"(decoder\.layers\.(?:\d+\.mlp\.experts\.experts\.)?)([a-z].*)")
"""Its names of tensors that are stacked: what stands before a number, and behind it."""
_MEGATRON_BALANCE = {"aux_loss": "batch", "global_aux_loss": "batch", "seq_aux_loss": "sequence"}
TORCHTITAN_NAMES = {"mlp.gate": "moe.router.gate"} | {
    f"mlp.experts.{name}_proj": f"moe.routed_experts.inner_experts.{stacked}"
    for name, stacked in (("gate", "w1_EFD"), ("down", "w2_EDF"), ("up", "w3_EFD"))
}
"""Canonical modules `split_sparse_name` → torchtitan's tensors of all experts."""
TORCHTITAN_BIAS = re.compile(r"layers\.\d+\.moe\.expert_bias_E")


def split_sparse_name(name: str) -> tuple[str, int | None]:
    """For another program's files, a canonical name without the number of its expert, and this number or None."""
    match = _NUMBERED.fullmatch(name)
    return (f"{match[1]}{match[3]}", int(match[2])) if match else (name, None)


# ---- the Trainer of transformers


def trainer_balance(model: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The keys of the Trainer's balance of loads, and sentences on it, by the model's `config.json` and its weights."""
    keys: dict[str, Any] = {}
    notes = []
    if model.get("output_router_logits"):
        keys["optimizer.router_pooled_loss"] = float(model["router_aux_loss_coef"])
        notes.append(
            "the Trainer's loss contains the balance loss, of each micro-batch by itself; here it is of the global "
            "batch, and metrics.jsonl has it beside the loss"
        )
    if any(name.endswith(ROUTER_BIAS) for name in names):
        keys["optimizer.router_bias_rate"] = 0.0
        notes.append("the Trainer does not change the routers' correction biases, so optimizer.router_bias_rate is 0")
    return keys, notes


# ---- Megatron-LM


def megatron_section(
    section: dict[str, Any], args: Mapping[str, Any], biases: Mapping[str, bool], require: Callable[..., None]
) -> dict[str, Any]:
    """The keys of a Megatron-LM model with gates; with experts it is a Qwen3-MoE, whose heads have norms, or a Mixtral.

    `biases` are keys that neither of the two has. `require` is called with a model and with (name, value, value that
    the model needs), …, and raises ConfigError where these differ.
    """
    if not args.get("num_experts"):
        return section
    require("model with experts", ("biases", any(biases.values()), False))
    section = {key: section[key] for key in section.keys() - biases}
    every = args.get("moe_layer_freq") or 1
    is_sparse = every if isinstance(every, list) else [layer % every == 0 for layer in range(args["num_layers"])]
    width = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size") or 4 * args["hidden_size"]
    section["num_experts_per_tok"] = args.get("moe_router_topk") or 2
    softmax_first = bool(args.get("moe_router_pre_softmax"))
    if section["family"] == "qwen3":
        dense = tuple(layer for layer, sparse in enumerate(is_sparse) if not sparse)
        rule = {"norm_topk_prob": not softmax_first, "mlp_only_layers": dense, "moe_intermediate_size": width}
        return section | {"family": "qwen3_moe", "num_experts": args["num_experts"], **rule}
    softmax = ("moe_router_pre_softmax", softmax_first, False)
    require("Mixtral", ("add_qkv_bias", section["family"] == "qwen2", False), softmax, ("moe_layer_freq", every, 1))
    return section | {"family": "mixtral", "num_local_experts": args["num_experts"], "intermediate_size": width}


def megatron_module(name: str, config: FamilyConfig) -> tuple[str, str, int]:
    """The beginning of the role of a layer's module, its name as a module of an MLP, and the width of this MLP."""
    plain, number = split_sparse_name(name)
    if number is None:
        return "", name, config.intermediate_size
    return f"experts.{number}.", f"mlp.{plain.rpartition('.')[2]}", config.expert_width


def megatron_orders(args: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The roles in a sparse layer of Megatron-LM in the order of its modules: experts one by one, and grouped."""
    each = [(f"experts.{expert}.fc1", f"experts.{expert}.fc2") for expert in range(args.get("num_experts") or 0)]
    return ["router", *chain(*each)], ["router", *chain(*zip(*each, strict=True))]


def megatron_balance(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys of Megatron-LM's balance of expert loads, and sentences on what has no counterpart."""
    if not args.get("num_experts"):
        return {}, []
    names = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    kinds, rates = (value if isinstance(value, list) else [value] for value in map(args.get, names))
    if len(kinds) != len(rates):
        raise ConfigError(f"{names[1]} ({rates}) must have one value for each of {names[0]} ({kinds})")
    used = {"z": float(args.get("moe_z_loss_coeff") or 0)}
    for kind, rate in zip(kinds, rates, strict=True):
        if kind in _MEGATRON_BALANCE:
            used[_MEGATRON_BALANCE[kind]] = used.get(_MEGATRON_BALANCE[kind], 0.0) + float(rate or 0)
    is_local = any(kind == "aux_loss" and rate for kind, rate in zip(kinds, rates, strict=True))
    notes = ["aux_loss is of each micro-batch there, and of the global batch here"] if is_local else []
    unlike = [name for name in ("moe_expert_capacity_factor", "moe_input_jitter_eps") if args.get(name)]
    unlike += ["moe_router_load_balancing_type"] if "sinkhorn" in kinds else []
    notes += [f"{name} ({args[name]}) has no counterpart here" for name in unlike]
    return {f"optimizer.router_{kind}_loss": rate for kind, rate in used.items() if rate}, notes


# ---- GGUF


def add_gguf_keys(writer: Any, gguf: Any, model: Any) -> None:
    """Add the keys of a model's experts, if it has any, to a GGUF file."""
    routing = model.any_routing
    if routing is None:
        return
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_count(routing.experts)
    writer.add_expert_used_count(routing.per_token)
    writer.add_expert_feed_forward_length(model.expert_width)
    writer.add_expert_gating_func(gating.SIGMOID if routing.scores == "sigmoid" else gating.SOFTMAX)
    writer.add_expert_weights_norm(routing.normalized)
    writer.add_expert_weights_scale(routing.scale)
    if routing.groups > 1:
        writer.add_expert_group_count(routing.groups)
        writer.add_expert_group_used_count(routing.chosen_groups)
    if model.family == "glm4_moe":
        writer.add_expert_shared_count(model.n_shared_experts)
        writer.add_leading_dense_block_count(model.first_k_dense_replace)
