"""Checkpoints of OLMo-core: OLMo 2 and 3, Llama and Qwen 3 models, with the state of AdamW, as its trainer writes them.

    SOURCE/stepN/model_and_optim/.metadata, __R_T.distcp     torch's distributed checkpoint: thread T of rank R
    SOURCE/stepN/train/rank0.pt                              steps, tokens, place in the data
    SOURCE/stepN/config.json                                 by ConfigSaverCallback: "model", "train_module", …

Weights are named `model.blocks.0.attention.w_q.weight`, the optimizer's state `optim.state.NAME.exp_avg`. A block of
OLMo 2 norms what attention and MLP give (`reordered_norm`); OLMo 3 has windows too. The optimizer's own count of
updates can be one more than the step: to save step 0, torch makes its state by an update without gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.config import FamilyConfig, checked_model_section
from shardwise.config.hugging_face import from_hugging_face
from shardwise.runs.json_records import read_record
from shardwise_use.importing import dcp_models, pickled
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress, imported_points
from shardwise_use.importing.torch_dcp import DcpFolder, LazyTensor

_TENSORS = "model_and_optim"
_MODULES = {
    "model.embed_tokens": "embeddings", "model.norm": "lm_head.norm", "lm_head": "lm_head.w_out",
    "self_attn.q_proj": "attention.w_q", "self_attn.k_proj": "attention.w_k", "self_attn.v_proj": "attention.w_v",
    "self_attn.o_proj": "attention.w_out", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
    "post_feedforward_layernorm": "feed_forward_norm",
}  # fmt: skip
"""Canonical module → OLMo-core's, but for the norm after attention."""
_MODEL_TYPES = {
    ("default", "none", False): "llama", ("default", "by head", False): "qwen3",
    ("reordered_norm", "whole", False): "olmo2", ("reordered_norm", "whole", True): "olmo3",
}  # fmt: skip
"""Name of the blocks, norms of queries and keys, and if there are windows → the model in Hugging Face's word."""
_RMS = ("rms", "qwen_rms", "nemotron_rms", "fused_rms", "cute_rms")  # norms that differ in rounding alone
_BLOCK: Mapping[str, tuple[Any, ...]] = {
    "name": ("default", "reordered_norm"), "dropout": (None, 0.0), "feed_forward_moe": (None,),
    "attention_residual_alpha": (None, 1.0), "feed_forward_residual_alpha": (None, 1.0),
    "attention.type": (None, "attention"), "attention.name": ("default",), "attention.bias": (False,),
    "attention.gate": (None,), "attention.clip_qkv": (None,), "attention.dropout": (None, 0.0),
    "attention.scalable_softmax": (None, False), "attention.attention_sinks": (None, False),
    "attention.qk_norm_per_head_gains": (None, False), "attention.qk_norm.name": (None, *_RMS),
    "attention.rope.name": ("default", "complex"),
    "attention.rope.no_global_rope": (None, False), "attention.rope.partial_rotary_factor": (None, 1.0),
    "feed_forward.name": ("default",), "feed_forward.bias": (False,), "feed_forward.activation": (None, "silu"),
    "layer_norm.name": _RMS, "layer_norm.bias": (False,), "layer_norm.elementwise_affine": (None, True),
}  # fmt: skip
"""Fields of a block → the values that a family here has; None: it is absent."""
_MODEL: Mapping[str, tuple[Any, ...]] = {
    "name": ("default",), "embedding_norm": (None,), "embed_scale": (None, 1.0), "block_pattern": (None,),
    "freeze_params": (None, []), "lm_head.name": ("default",), "lm_head.bias": (False,),
    "lm_head.layer_norm.name": _RMS,
}  # fmt: skip


def open_olmo_core(source: Path, *, weights_only: bool = False) -> ImportedModel:
    """The model of a checkpoint of OLMo-core, with its progress; `source`: a step's folder, or that of several."""
    step = source.parent if source.name == _TENSORS else dcp_models.newest_step_folder(source, _TENSORS)
    inner = step / _TENSORS
    folder = dcp_models.open_dcp_folder(inner if inner.is_dir() else step, "olmo-core")
    described = _record(step / "config.json")
    where = str(step / "config.json")
    with pickled.content_errors(f"{where} is no configuration as OLMo-core writes it"):
        config, in_pairs = _model_of(described, where)
    stored = {name[6:]: tensor for name, tensor in folder.tensors.items() if name.startswith("model.")}
    if config.tie_word_embeddings:
        dcp_models.drop_tied_copy(folder.where, stored, "embeddings.weight", "lm_head.w_out.weight")
    weights = dcp_models.named_weights(folder.where, config, _tensors(config, in_pairs, stored), stored)
    told = (None, []) if weights_only else _progress(folder, step, described["train_module"], config, in_pairs)
    progress, notes = told
    return ImportedModel(config, weights, notes=notes, progress=progress)


def _record(path: Path) -> Mapping[str, Any]:
    try:
        return read_record(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}, which ConfigSaverCallback writes with the model's configuration, cannot be read ({error}): put "
            "it beside the checkpoint"
        ) from None


def _tensors(
    config: FamilyConfig, in_pairs: bool, stored: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, str, LazyTensor]]:
    is_reordered = config.family in ("olmo2", "olmo3")
    norm = "attention_norm" if is_reordered else "feed_forward_norm"
    modules = {**_MODULES, "post_attention_layernorm": norm}
    for name in canonical_shapes(config):
        there = dcp_models.foreign_name(name, "blocks", modules)
        if there in stored:
            is_rotated = in_pairs and re.search(r"\.[qk]_proj\.", name)
            tensor = stored[there]
            yield name, there, tensor.by_rows(config.head_dim, dcp_models.pairs_to_halves) if is_rotated else tensor


# ---- config.json


def _get(fields: Any, path: str) -> Any:
    for name in path.split("."):
        fields = fields.get(name) if isinstance(fields, Mapping) else None
    return fields


def _model_of(described: Mapping[str, Any], where: str) -> tuple[FamilyConfig, bool]:
    """The model of a config.json, and True if it rotates neighbours; ConfigError with all fields that do not fit."""
    model = described["model"]
    blocks = [_block(model["block"])] * model["n_layers"]
    for number, block in (model.get("block_overrides") or {}).items():
        blocks[int(number)] = _block(block)
    first = blocks[0]
    for prefix, part, table in (("model.", model, _MODEL), ("model.block.", first, _BLOCK)):
        if problems := [
            f"{where}: its {prefix}{path} ({_get(part, path)!r}) must be {listing(map(repr, allowed), 'or')}: no "
            "family here has another"
            for path, allowed in table.items()
            if _get(part, path) not in allowed
        ]:
            raise ConfigError(problems)
    heads, qk_norm = first["attention"], first["attention"].get("qk_norm")
    norms = "none" if not qk_norm else "by head" if heads.get("use_head_qk_norm") else "whole"
    epsilons = {
        norm.get("eps", 1e-5) for norm in (first["layer_norm"], model["lm_head"]["layer_norm"], qk_norm) if norm
    }
    windows = _windows(heads.get("sliding_window"), len(blocks))
    model_type = _MODEL_TYPES.get((first["name"], norms, any(windows)))
    # Rotary positions are scaled in all blocks without a window, or in none.
    expected = [_scaled(first, None if window else _scaling(blocks, windows)) for window in windows]
    if model_type is None or len(epsilons) > 1 or len({*windows} - {0}) > 1 or blocks != expected:
        raise ConfigError(
            f"{where} must be a model of Llama, Qwen 3, OLMo 2 or OLMo 3: no family here has blocks {first['name']!r} "
            f"with norms of queries and keys {norms}, windows {sorted({*windows} - {0})}, eps {sorted(epsilons)} and "
            "model.block_overrides of more than the scaling of rotary positions"
        )
    fields = {
        "model_type": model_type, "vocab_size": model["vocab_size"], "hidden_size": model["d_model"],
        "num_hidden_layers": len(blocks), "num_attention_heads": heads["n_heads"],
        "num_key_value_heads": heads.get("n_kv_heads") or heads["n_heads"],
        "intermediate_size": first["feed_forward"]["hidden_size"], "hidden_act": "silu", "rms_norm_eps": epsilons.pop(),
        "max_position_embeddings": int(described["train_module"]["max_sequence_length"]),
        "rope_theta": heads["rope"]["theta"], "rope_scaling": _rope_scaling(_scaling(blocks, windows)),
        "tie_word_embeddings": bool(model.get("tie_word_embeddings")),
    }  # fmt: skip
    if heads.get("head_dim"):
        fields["head_dim"] = heads["head_dim"]
    if any(windows):
        types = ("full_attention", "sliding_attention")
        fields |= {"sliding_window": max(windows), "layer_types": [types[bool(window)] for window in windows]}
    return checked_model_section(from_hugging_face(fields, where), where), heads["rope"]["name"] == "complex"


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block's fields; earlier releases have `attention` for `sequence_mixer`."""
    fields = {name: value for name, value in block.items() if name != "sequence_mixer"}
    return {**fields, "attention": block.get("sequence_mixer") or block.get("attention") or {}}


def _scaling(blocks: Sequence[Mapping[str, Any]], windows: Sequence[int]) -> Mapping[str, Any] | None:
    full = (block for block, window in zip(blocks, windows, strict=True) if not window)
    scaling: Mapping[str, Any] | None = _get(next(full, None), "attention.rope.scaling")
    return scaling


def _scaled(block: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    rope = {name: value for name, value in block["attention"]["rope"].items() if name != "scaling"}
    rope |= {"scaling": scaling} if scaling else {}
    return {**block, "attention": {**block["attention"], "rope": rope}}


def _windows(config: Any, layers: int) -> list[int]:
    """Width of each layer's window; 0: none."""
    if not config:
        return [0] * layers
    skip = bool(config.get("force_full_attention_on_first_layer", True))
    pattern = config["pattern"]
    widths = [max(0, pattern[(layer - skip) % len(pattern)]) for layer in range(layers)]
    if skip:
        widths[0] = 0
    if config.get("force_full_attention_on_last_layer", True):
        widths[-1] = 0
    return widths


def _rope_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not scaling:
        return None
    kind = str(scaling["_CLASS_"]).rpartition(".")[2]
    fields = {"factor": scaling["factor"], "original_max_position_embeddings": scaling["old_context_len"]}
    if kind == "YaRNRoPEScalingConfig":
        return {"rope_type": "yarn", "beta_fast": scaling["beta_fast"], "beta_slow": scaling["beta_slow"], **fields}
    if kind == "StepwiseRoPEScalingConfig" and scaling["attention_rescale_factor"] == 1.0:
        low, high = 1.0 / (1 - scaling["low_freq_proportion"]), 1.0 / scaling["high_freq_proportion"]
        return {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high, **fields}
    raise ConfigError(
        f"the scaling of rotary positions by {kind} has no counterpart here: it must be YaRN's or Llama's"
    )


# ---- progress


def _progress(
    folder: DcpFolder, step_folder: Path, module: Mapping[str, Any], config: FamilyConfig, in_pairs: bool
) -> tuple[ImportedProgress | None, list[str]]:
    path = step_folder / "train" / "rank0.pt"
    if not path.is_file():
        raise ConfigError(f"{path}, which has the step, must be there: copy it, or give --weights-only")
    trained = pickled.load_pickled(path)
    step, tokens, steps = (_get(trained, name) for name in ("global_step", "global_train_tokens_seen", "max_steps"))
    if type(step) is not int or type(tokens) is not int or step < 1:
        raise ConfigError(f"{path} must have a global_step ({step!r}) from 1, and the tokens seen ({tokens!r})")
    progress = dcp_models.adamw_progress(folder, "optim.", step, config, partial(_tensors, config, in_pairs))
    if progress is None:
        return None, [f"{folder.where} has no state of AdamW: the weights alone are imported"]
    if _get(module, "optim.step_increment_bugfix") is False:
        raise ConfigError(
            f"{step_folder}: its optimizer does not count its updates (step_increment_bugfix: false), as every "
            "optimizer here does: --weights-only imports the weights alone"
        )
    schedule, notes = _schedule(module.get("scheduler"), progress.keys["optimizer.lr"], steps)
    length = _get(trained, "data_loader.sequence_length") or module["max_sequence_length"]
    keys = {**progress.keys, **schedule, "optimizer.max_norm": module.get("max_grad_norm")}
    keys["train.sequence_length"] = length
    samples = tokens // length if tokens % length == 0 else None
    if samples and samples % step == 0:
        keys["train.global_batch"] = samples // step
    if steps:
        keys["train.steps"] = steps
    if "SkipStep" in str(_get(module, "optim._CLASS_")):
        notes.append("SkipStepAdamW leaves out updates whose loss or norm stands out, and a run here makes all of them")
    if module.get("z_loss_multiplier"):
        notes.append(f"train_module.z_loss_multiplier ({module['z_loss_multiplier']}) has no counterpart here")
    return replace(progress, samples=samples, tokens=tokens, keys=keys), notes


def _schedule(scheduler: Mapping[str, Any] | None, lr: float, steps: Any) -> tuple[dict[str, Any], list[str]]:
    """The keys of a scheduler: update s has its rate at s; and sentences for the user."""
    kind = str(_get(scheduler, "_CLASS_")).rpartition(".")[2]
    if not scheduler or kind == "ConstantScheduler":
        return {"optimizer.schedule": "constant"}, []
    last = scheduler.get("t_max") or steps
    warmup = scheduler.get("warmup", scheduler.get("warmup_steps"))
    if warmup is None and scheduler.get("warmup_fraction") is not None and last:
        warmup = round(last * scheduler["warmup_fraction"])
    ends: dict[str, tuple[int, int, float, str]] = {"ConstantWithWarmup": (warmup, warmup, 1.0, "linear")}
    if last:
        ends["CosWithWarmup"] = (warmup, last, scheduler.get("alpha_f", 0.1), "cosine")
        ends["LinearWithWarmup"] = (warmup, last, scheduler.get("alpha_f", 0.1), "linear")
        decay = scheduler.get("decay", scheduler.get("decay_steps"))
        decay = round(last * scheduler.get("decay_fraction", 0.1)) if decay is None else decay
        ends["WSD"] = (last - decay, last, scheduler.get("decay_min_lr", 0.0) / lr, "linear")
    if kind not in ends or warmup is None or scheduler.get("units", "steps") != "steps":
        return {}, [f"the scheduler {kind} by {scheduler.get('units')} is not carried over: give optimizer.schedule"]
    if ends[kind][0] < warmup:
        text = f"{kind} begins to decay before its warmup ({warmup} steps) ends"
        return {}, [f"{text}, which is not carried over: give optimizer.schedule"]
    points = imported_points(scheduler.get("warmup_min_lr", 0.0) / lr, warmup, *ends[kind], lag=0)
    return {"optimizer.schedule": "points", "optimizer.points": points}, []
