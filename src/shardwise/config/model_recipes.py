"""A model in place of a recipe: what a hub id, a folder or a `config.json` stands for, with weights that are new.

The model and its tokenizer are those of the place. Batch, rate and length are defaults by the width of the model: a
batch of 1,024 tokens for each of its dimensions, and a rate of 3e-4 at 4,096 of them that falls as they rise, as Llama
2's and 3's (arXiv:2307.09288, arXiv:2407.21783) do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.base import hub
from shardwise.base.errors import ConfigError
from shardwise.base.files import user_path
from shardwise.base.yaml_and_json import json_value
from shardwise.config.hugging_face import UnsupportedError, read_hugging_face
from shardwise.config.run_config import Config
from shardwise.config.token_counts import parse_tokens, tokens_text

CONFIG = "config.json"
_SHOWN = (
    "train.sequence_length", "train.global_batch", "train.steps", "optimizer.lr", "optimizer.warmup_steps",
    "optimizer.zero",
)  # fmt: skip
"""Keys with the defaults that a user is told."""
_LONGEST = 4096
_MOST_TOKENS = 1 << 22
_STEPS = 100_000
_WIDE = 2048  # width from which a model has about a billion parameters, so that ranks divide its weights
_FETCHED: dict[str, Path] = {}  # the file of each hub id that this process asked for, so that it asks once
_VERSIONS = r"[-_.](base|it|pt|hf|instruct|chat|think|uncased|\d{4}|v[\d.]+)(?=[-_.]|$)|^meta-"
"""Parts of a repository's name that do not change the shape of a model."""


def _place_of_model(named: str, recipes: Iterable[str]) -> Path | hub.HubFiles:
    """The `config.json` that `named` leads to, or the files on the hub; no request is sent.

    Args:
        recipes: names of recipes, of which one may be named where the hub does not answer.

    Raises:
        ConfigError: it is neither a path nor a hub id.
    """
    path = user_path(named)
    if path.exists():
        return path / CONFIG if path.is_dir() else path
    key = f"RECIPE ({named})"
    repository, revision = hub.split_revision(named, key)
    same = next((name for name in recipes if _shape(name) == _shape(Path(repository).name)), None)
    return hub.HubFiles(
        "RECIPE", repository, revision, (CONFIG,),
        lacking=lambda names: None if CONFIG in names else f"{key} must hold {CONFIG}, and it has none",
        verified=True,
        hint=f"; the recipe {same} has the shape of this model" if same else "",
    )  # fmt: skip


def comment_and_sections(
    named: str, name: str, recipes: Iterable[str], *, cached: bool = False
) -> tuple[str, dict[str, Any]]:
    """The comment and the sections of the recipe that a model stands for; of a hub id `config.json` alone is fetched.

    Args:
        recipes: as in `_place_of_model`.

    Raises:
        ConfigError: it cannot be fetched, or is of a class of the user's own.
    """
    place = _place_of_model(named, recipes)
    tokenizer: str | None = named
    if isinstance(place, Path):
        file = place
        tokenizer = str(file.parent) if hub.holds_tokenizer([entry.name for entry in file.parent.iterdir()]) else None
    else:
        if named not in _FETCHED:
            _FETCHED[named] = hub.fetch_or_open(place, cached=cached) / CONFIG
        file = _FETCHED[named]
    section = _section(file)
    # Text for a trial fills a small vocabulary alone.
    trial = "" if tokenizer is not None or section.get("vocab_size", 0) <= 1 << 15 else " model.vocab_size=32768"
    own_tokenizer = "" if tokenizer is not None else " data.tokenizer=YOUR_TOKENIZER_FOLDER"
    comment = (
        f"# {name}: the shape of {named}, with new weights; the training is ours.\n"
        f"# From its weights:     {_keys_of_weights(named)}\n"
        f"# Your own data:        data.path=YOUR_TEXT.jsonl{own_tokenizer}\n"
        f"# For a trial:          data.dataset=python{trial}\n"
    )
    return comment, _values(file, section, tokenizer)


def model_recipe_remark(named: str, config: Config) -> str:
    """The remark on the recipe that a model stands for: what is taken of the model, and the defaults."""
    values = config.model_dump(mode="json")
    keys = (key.partition(".") for key in _SHOWN)
    shown = " ".join(f"{section}.{key}={values[section][key]:.10g}" for section, _, key in keys)
    tokenizer = "" if config.data.tokenizer is None else f" and the tokenizer is that of {config.data.tokenizer}"
    if config.checkpoint.load is None:
        tokenizer += f"; its weights are new ({_keys_of_weights(named)} starts from those there)"
    return (
        f"the model has the shape of {named}{tokenizer}, and the training is {shown}: `shardwise recipes {named}` "
        "prints all keys"
    )


def default_warmup(steps: object) -> int | str:
    """The warmup in the recipe of a model, for so many steps, or tokens such as `1T`: one part in fifty."""
    if isinstance(steps, int):
        return max(0, steps) // 50
    tokens = parse_tokens(steps)
    return 0 if tokens is None else tokens_text(tokens // 50)


def _keys_of_weights(named: str) -> str:
    if user_path(named).exists():
        return f"checkpoint.load={Path(named).parent if Path(named).suffix == '.json' else named}"
    return f"checkpoint.load={named.replace('@', ' checkpoint.revision=', 1)}"


def _section(file: Path) -> Mapping[str, Any]:
    """The `model` section of a file; what is wrong with it is told when its recipe is read."""
    try:
        return read_hugging_face(file)
    except UnsupportedError as error:
        return error.section
    except ConfigError as refused:
        try:
            described = json_value(file.read_bytes())
        except (OSError, ValueError):
            raise refused from None
        family = described.get("family") if isinstance(described, dict) else None
        if isinstance(family, str) and ":" in family:
            raise ConfigError(
                f"{file} describes a class of its own, {family}, whose code would run: name a recipe with "
                f"model.family={family} in its place"
            ) from None
        raise


def _values(file: Path, section: Mapping[str, Any], tokenizer: str | None) -> dict[str, Any]:
    width = section["hidden_size"]
    length = min(_LONGEST, section["max_position_embeddings"])
    tokens = min(_MOST_TOKENS, 1024 * width)
    rate = float(f"{min(6e-4, 3e-4 * 4096 / width):.1e}")
    optimizer: dict[str, Any] = {
        "lr": rate, "min_lr": float(f"{rate / 10:.1e}"), "warmup_steps": default_warmup(_STEPS), "schedule": "cosine",
        "weight_decay": 0.1, "betas": [0.9, 0.95], "zero": 3 if width >= _WIDE else 1,
    }  # fmt: skip
    # A router with a correction bias balances loads by that.
    if "num_experts_per_tok" in section and "n_routed_experts" not in section:
        optimizer["router_batch_loss"] = 1e-3
    batch = 2 ** max(0, round(math.log2(tokens / length)))
    return {
        "model": {"config": str(file)},
        "train": {"steps": _STEPS, "global_batch": batch, "sequence_length": length, "recompute": "auto"},
        "optimizer": optimizer,
        "precision": {"mode": "mixed"},
        "data": {} if tokenizer is None else {"tokenizer": tokenizer},
    }


def _shape(name: str) -> str:
    """The name of a model without what does not change its shape, to compare repositories with recipes."""
    return re.sub("[-_.]", "", re.sub(_VERSIONS, "", name.lower()))
