"""The weights of a model's folder, by path or hub id: their files' names, which of them lack, and the index.

Weights are safetensors, and a pickle is never opened. They may be in one file, in the files that an index names, or in
those that each rank of torch's Hugging Face writer saved.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable
from fnmatch import filter as names_like
from fnmatch import fnmatch
from pathlib import Path, PurePath

from shardwise.base.errors import ConfigError, listing, raise_problems
from shardwise.base.files import name_problem, reason_of, user_path
from shardwise.base.hub import LICENCES, TOKENIZER_FILES, HubFiles, fetch_or_open, require_hub_id
from shardwise.base.units import size
from shardwise.base.yaml_and_json import json_value
from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.storage.root import Root

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "shard-*-model-*.safetensors"
"""Pattern of the files of torch's Hugging Face writer that no program has consolidated: each has parts of tensors."""
_PART = re.compile(r"(shard-\d{5}-)?model-\d{5}-of-(\d{5})\.safetensors")
GENERATION = "generation_config.json"
BESIDE_WEIGHTS = (GENERATION, *TOKENIZER_FILES, *LICENCES)
"""Patterns of the files that a model's folder holds in addition to its weights and config.json."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files of weights that are pickled, which are never opened."""
MAX_INDEX_BYTES = 2**26
"""Enough for 600,000 tensors of 100 bytes each: a longer file is no index, and is not read into memory."""
_SHOWN = 6


def resolve_weights(
    load: str, revision: str | None = None, *, cached: bool = False, announce: Callable[[str], None] | None = None
) -> Path:
    """The folder with the weights that `checkpoint.load` and `checkpoint.revision` name, here or on the hub."""
    return fetch_or_open(place_of_weights(load, revision), cached=cached, announce=announce)


def place_of_weights(load: str, revision: str | None = None) -> Path | HubFiles:
    """The folder with weights that `checkpoint.load` names, else its files on the hub; ConfigError if it is neither."""
    folder = user_path(load)
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"checkpoint.revision ({revision}) must be left out: checkpoint.load ({load}) is a folder, "
                "and only a hub id has revisions"
            )
        check_weights(folder)
        return folder
    if folder.exists():
        if folder.suffix in PICKLED:
            raise ConfigError(no_weights_text(load, [folder.name]))
        raise ConfigError(
            f"checkpoint.load ({load}) must be a folder, it is a file: set checkpoint.load={folder.parent}"
        )
    require_hub_id(load, folder, f"checkpoint.load ({load}) must be a folder with weights")
    return HubFiles(
        "checkpoint.load", load, revision,
        ("config.json", SINGLE, INDEX, "model-*.safetensors", SHARDS, *BESIDE_WEIGHTS),
        lacking=lambda names: None if has_weights(names) else no_weights_text(load, names),
        check=check_weights,
    )  # fmt: skip


def no_weights_text(shown: str, names: Iterable[str]) -> str:
    """The message for a folder or repository whose files `names` include no safetensors weights."""
    names = sorted(names)
    if not names:
        return f"checkpoint.load ({shown}) must hold {SINGLE}: it is empty"
    if way := conversion_hint(shown, names):
        return f"checkpoint.load ({shown}) must be the folder of a model, and {way}"
    if pickled := listing([name for name in names if name.endswith(PICKLED)], most=_SHOWN):
        return (
            f"checkpoint.load ({shown}) must hold safetensors, and its weights are pickled ({pickled}): opening a "
            "pickle can run any code that its author put there. If you trust it, convert it by transformers: "
            "from_pretrained(…), then save_pretrained(…)"
        )
    absent = absent_parts(names)
    fix = f"; fetch or copy {listing([INDEX, *absent], most=4)} too" if absent else ""
    if not {".metadata", "model_and_optim"}.isdisjoint(names):
        fix = ", a distributed checkpoint of torch: import it by `shardwise checkpoint import --from torchtitan`, "
        fix += "`olmo-core` or `megatron`"
    return f"checkpoint.load ({shown}) must hold {SINGLE} or {INDEX}: it has {listing(names, most=_SHOWN)}{fix}"


def unconsolidated_files(names: Iterable[str]) -> list[str]:
    """The files of torch's Hugging Face writer among `names`, in order."""
    return sorted(name for name in names if fnmatch(name, SHARDS))


def absent_parts(names: Collection[str], ranks: int = 0) -> list[str]:
    """The weight files of which the numbers in `names` tell, or a number of `ranks` that saved, and that are not there.

    A rank without files is named by its first one.
    """
    totals = {match[1] or "": int(match[2]) for name in names if (match := _PART.fullmatch(name))}
    last = max((max(ranks, int(writer[6:11])) for writer in totals if writer), default=0)
    numbered = [(writer, part, total) for writer, total in totals.items() for part in range(1, total + 1)]
    numbered += [(f"shard-{rank:05}-", 1, max(totals.values())) for rank in range(1, last + 1)]
    files = [f"{writer}model-{part:05}-of-{total:05}.safetensors" for writer, part, total in numbered]
    return sorted({*files} - {*names})


def absent_parts_problem(where: object, names: Iterable[str], ranks: int = 0) -> list[str]:
    """The problem of a folder of torch's Hugging Face writer that lacks files, as `absent_parts` finds them."""
    absent = listing(absent_parts(unconsolidated_files(names), ranks), most=3)
    must = f"{where} must have the files {SHARDS} of all ranks of one save, and lacks"
    return [f"{must} {absent}: fetch or copy what is missing"] if absent else []


def has_weights(names: Collection[str]) -> bool:
    """True if files with these names include safetensors weights."""
    return SINGLE in names or INDEX in names or bool(unconsolidated_files(names))


def check_weights(folder: Path) -> None:
    """Checks that a folder has safetensors weights; ConfigError if there are none, or the index is broken."""
    try:
        names = [file.name for file in folder.iterdir()]
        index = (folder / INDEX).read_bytes() if INDEX in names and SINGLE not in names else None
    except OSError as error:
        raise ConfigError(f"checkpoint.load ({folder}) must be a folder with weights: {reason_of(error)}") from None
    if index is not None:
        indexed_weight_files(index, folder, lambda name: name in names)
    elif not has_weights(names):
        raise ConfigError(no_weights_text(str(folder), names))


def indexed_weight_files(index: bytes, folder: object, is_there: Callable[[str], bool]) -> list[str]:
    """The weight files that the index of `folder` names; ConfigError if it is no index or a file is missing."""
    try:
        names = sorted(set(json_value(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{folder}/{INDEX} is no index of safetensors files ({error!r}): fetch or copy it again"
        raise ConfigError(text) from None
    wrong = [problem for name in names if (problem := name_problem(name))]
    if wrong or not names:
        problem = listing(wrong, most=_SHOWN) if wrong else "it names none"
        raise ConfigError(f"{folder}/{INDEX} must name files of its own folder, and {problem}")
    if absent := [name for name in names if not is_there(name)]:
        raise ConfigError(f"{folder} lacks {listing(absent, most=3)}: its index says that they hold weights: copy them")
    return names


def find_weight_files(folder: Root) -> tuple[str, ...]:
    """The safetensors files of a folder; ConfigError if there are none, or the index names what is not there."""
    if (folder / SINGLE).exists():
        return (SINGLE,)
    index = folder / INDEX
    if not index.exists():
        if files := unconsolidated_files(folder.names()):
            raise_problems(ConfigError, absent_parts_problem(folder, files))
            return tuple(files)
        names = listing(folder.names()[:6]) or "nothing"
        raise ConfigError(
            f"{folder} must be a checkpoint (with {MANIFEST}) or have safetensors weights ({SINGLE} or {INDEX}): "
            f"it has {names}"
        )
    length = index.size()
    if length > MAX_INDEX_BYTES:
        raise ConfigError(
            f"{index} ({size(length)}) must be an index of safetensors files, which has at most {size(MAX_INDEX_BYTES)}"
        )
    return tuple(indexed_weight_files(index.read(), folder, lambda name: (folder / name).exists()))


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
    """What a folder without readable weights is: its program, how it becomes a model's folder; or None."""
    for patterns, (kind, way) in _RECORDS.items():
        if all(names_like(names, pattern) for pattern in patterns):
            place = PurePath(shown)
            folder, parent = (shlex.quote(str(path)) for path in (place, place.parent))
            return f"it is {kind}: {way.format(path=shown, folder=folder, parent=parent, name=shlex.quote(place.name))}"
    return None
