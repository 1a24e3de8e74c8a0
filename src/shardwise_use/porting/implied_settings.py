"""What a program does where its file leaves settings out, if that depends on others in the file.

Sources: DeepSpeed 0.19.8 (`runtime/lr_schedules.py`, `runtime/engine.py`, `runtime/zero/muon/original_muon.py`),
Megatron-LM of Megatron Core 0.20 (`training/config/training_config.py`, `training/arguments.py`), transformers 5.24
(`optimization.py`), trl 1.16 (`trainer/sft_config.py`), axolotl 0.19 (`core/builders/base.py`), litgpt 0.5.13
(`pretrain.py`), LLaMA-Factory 0.9.5 (`hparams`, `model/model_utils/checkpointing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.base.yaml_and_json import json_value

_SCHEDULE = "scheduler.params."
_RULE = "optimizer.params."
_KWARGS = "lr_scheduler_kwargs"
_PEAK = f"{_SCHEDULE}warmup_max_lr"
_OF_TRL = frozenset(
    ("activation_offloading", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eval_packing",
     "loss_type", "max_length", "packing", "packing_strategy", "padding_free", "trl", "truncation_mode")
)  # fmt: skip
"""The command `trl sft`, and names of its SFTConfig, whose defaults are not those of the Trainer's arguments."""

_OF_LLAMA_FACTORY = frozenset(("finetuning_type", "cutoff_len", "disable_gradient_checkpointing", "neat_packing"))
"""Names of LLaMA-Factory beside those of the Trainer."""


def implied_settings(program: str, settings: Mapping[str, Any], steps: int | None = None) -> dict[str, Any]:
    """The settings that others of the file imply, where it has none; a schedule of DeepSpeed replaces `adam_lr`.

    `steps`: those of the training, if they are given beside the file.
    """
    rules = _RULES.get(program)
    if program == "axolotl" and steps is not None:
        settings = {**settings, "max_steps": steps}
    return rules(settings) if rules else {}


def with_scheduler_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which arguments of a Trainer's schedule, as the JSON text of a command line, stand by their names."""
    text = settings.get(_KWARGS)
    try:
        values = json_value(text) if isinstance(text, str) else text
    except ValueError:
        return settings
    if not isinstance(values, dict):
        return settings
    return {
        **{name: value for name, value in settings.items() if name != _KWARGS},
        **{f"{_KWARGS}.{name}": value for name, value in values.items()},
    }


def with_scheduler_first(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of DeepSpeed in the order in which they count: a schedule sets the rates of its optimizer anew."""
    first = [name for name in (_PEAK, f"{_RULE}muon_lr") if settings.get(name, "auto") != "auto"]
    return {**{name: settings[name] for name in first}, **settings}


def _of_deepspeed(settings: Mapping[str, Any]) -> dict[str, Any]:
    schedule = str(settings.get("scheduler.type")).lower()
    rule = str(settings.get("optimizer.type")).lower()
    implied: dict[str, Any] = {}
    if schedule == "warmupdecaylr":
        implied[_PEAK] = 0.001  # whatever the optimizer's rate is
    if schedule in ("warmuplr", "warmupdecaylr", "warmupcosinelr"):
        implied |= {f"{_SCHEDULE}warmup_num_steps": 1000, f"{_SCHEDULE}warmup_type": "log"}
    if schedule == "warmupcosinelr":
        implied[f"{_SCHEDULE}cos_min_ratio"] = 0.0001
    if rule in ("adam", "adamw", "lamb", "muon") and not settings.get(f"{_RULE}torch_adam"):
        implied[f"{_RULE}weight_decay"] = 0.0
    if rule == "muon":
        rate = settings.get(f"{_RULE}lr")
        implied |= {f"{_RULE}muon_lr": rate or 0.02, f"{_RULE}adam_lr": rate or 3e-4}
        implied |= {f"{_RULE}betas": [0.9, 0.95], f"{_RULE}eps": 1e-10}
    implied = _left_out(implied, settings)
    peak = {**settings, **implied}.get(_PEAK)
    if rule == "muon" and peak not in (None, "auto"):
        implied[f"{_RULE}adam_lr"] = peak  # the schedule sets the rate of all parameters
    return implied


def _of_megatron(settings: Mapping[str, Any]) -> dict[str, Any]:
    implied: dict[str, Any] = {}
    if settings.get("lr_decay_style") == "WSD":
        implied["lr_wsd_decay_style"] = "exponential"
    if str(settings.get("optimizer")).endswith("muon"):
        implied |= {"muon_momentum": 0.9, "muon_scale_mode": "spectral"}
        # Up to Megatron Core 0.16 the name is muon_use_nesterov.
        implied |= {} if settings.get("muon_use_nesterov") else {"muon_nesterov": False}
        if settings.get("muon_scale_mode", "spectral") == "spectral":
            implied["muon_extra_scale_factor"] = 1.0
    return _left_out(implied, settings)


def _of_trainer(settings: Mapping[str, Any]) -> dict[str, Any]:
    implied: dict[str, Any] = {}
    if settings.get("lr_scheduler_type") == "warmup_stable_decay":
        implied[f"{_KWARGS}.decay_type"] = "cosine"
    if _OF_LLAMA_FACTORY & settings.keys():
        implied["cutoff_len"] = 2048
        if not settings.get("disable_gradient_checkpointing"):
            implied["gradient_checkpointing"] = True
    elif _OF_TRL & settings.keys():
        implied |= {"learning_rate": 2e-5, "gradient_checkpointing": True, "logging_steps": 10}
        # null cuts no sequence, and up to trl 0.19 the name is max_seq_length.
        implied |= {} if {"max_length", "max_seq_length"} & settings.keys() else {"max_length": 1024}
        implied |= {} if settings.get("fp16") else {"bf16": True}
    return _left_out(implied, settings)


def _of_axolotl(settings: Mapping[str, Any]) -> dict[str, Any]:
    implied: dict[str, Any] = {}
    steps = settings.get("max_steps")
    if isinstance(steps, int) and steps > 0 and settings.get("warmup_ratio") is None:
        warmup = min(int(0.03 * steps), 100)
        implied["warmup_steps"] = 2 if warmup == 1 else warmup
    implied = _left_out(implied, settings)
    if settings.get("bf16", "auto") == "auto" and not settings.get("fp16"):
        implied["bf16"] = True  # as on each GPU since Ampere
    return implied


def _of_litgpt(settings: Mapping[str, Any]) -> dict[str, Any]:
    implied: dict[str, Any] = {"precision": "bf16-mixed", "optimizer.init_args.lr": 0.001}
    implied["optimizer.init_args.weight_decay"] = 0.01
    if "train.max_tokens" in settings:
        implied |= {"train.global_batch_size": 512, "train.micro_batch_size": 4, "train.max_norm": 1.0}
        implied |= {"train.min_lr": 4e-5, "seed": 42}
        # null is no warmup by steps, which train.lr_warmup_fraction needs.
        implied |= {} if "train.lr_warmup_steps" in settings else {"train.lr_warmup_steps": 2000}
    return _left_out(implied, settings)


def _left_out(implied: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in implied.items() if settings.get(name) is None}


_RULES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "deepspeed": _of_deepspeed,
    "megatron": _of_megatron,
    "hf": _of_trainer,
    "axolotl": _of_axolotl,
    "litgpt": _of_litgpt,
}
