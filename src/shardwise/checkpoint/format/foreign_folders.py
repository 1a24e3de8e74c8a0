"""Folders of other programs that are no model's folder: each is answered with the command that makes one of it."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from fnmatch import filter as names_like
from pathlib import PurePath

_SMALL_FILES = "copy the model's config.json and tokenizer into OUT, and give OUT"
_TO_FP32 = "run `python -m deepspeed.utils.zero_to_fp32 {place} --safe_serialization`, " + _SMALL_FILES
_ZERO = ("a checkpoint of DeepSpeed's ZeRO", _TO_FP32.replace("{place}", "{folder} OUT"))
_MEGATRON = (
    "a checkpoint of Megatron-LM",
    "run `shardwise checkpoint import {folder} DEST --from megatron`, and give DEST",
)

# The commands of DeepSpeed 0.19, litgpt 0.5, peft 0.21 and accelerate 1.15 are run by tests/interop.
_RECORDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("adapter_config.json",): (
        "an adapter of peft, such as LoRA, without the model that it changes",
        'run `python -c "from peft import AutoPeftModelForCausalLM as M; '
        "M.from_pretrained('{path}').merge_and_unload().save_pretrained('OUT')\"`, copy the tokenizer into OUT, "
        "and give OUT",
    ),
    ("zero_to_fp32.py",): _ZERO,
    ("latest", "global_step*"): _ZERO,
    ("*zero_pp_rank_*_optim_states.pt",): (
        "a step of a checkpoint of DeepSpeed's ZeRO",
        _TO_FP32.replace("{place}", "{parent} OUT --tag {name}"),
    ),
    ("latest_universal",): (
        "a universal checkpoint of DeepSpeed",
        "give the checkpoint that ds_to_universal.py made it from, which has a zero_to_fp32.py",
    ),
    ("lit_model.pth",): (
        "a checkpoint of litgpt",
        'run `litgpt convert_from_litgpt {folder} OUT` and `python -c "import torch, safetensors.torch as s; '
        "s.save_file(torch.load('OUT/model.pth'), 'OUT/model.safetensors')\"`, copy into OUT the tokenizer and a "
        "config.json of the model that model_config.yaml describes, and give OUT",
    ),
    ("pytorch_model_fsdp_0",): (
        "a sharded checkpoint of accelerate's FSDP",
        "run `accelerate merge-weights {folder}/pytorch_model_fsdp_0 OUT`, " + _SMALL_FILES,
    ),
    ("latest_checkpointed_iteration.txt",): _MEGATRON,
    ("mp_rank_0*",): _MEGATRON,
    ("common.pt", ".metadata"): _MEGATRON,
}
"""Names that a folder holds, all of them → what it is, and what to do. OUT and DEST are for the user to choose."""


def conversion_hint(shown: str, names: Collection[str]) -> str | None:
    """What a folder of another program is, and how it becomes a model's folder; None for any other."""
    for patterns, (kind, way) in _RECORDS.items():
        if all(names_like(names, pattern) for pattern in patterns):
            place = PurePath(shown)
            folder, parent = (shlex.quote(str(path)) for path in (place, place.parent))
            return f"it is {kind}: {way.format(path=shown, folder=folder, parent=parent, name=shlex.quote(place.name))}"
    return None
