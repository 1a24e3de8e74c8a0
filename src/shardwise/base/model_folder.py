"""The files of a model's folder, as Hugging Face names them: weights, tokenizer, settings of generation, licences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from shardwise.base.errors import ConfigError, listing
from shardwise.base.files import name_problem, reason_of
from shardwise.base.parsing import json_value

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZERS = (
    (TOKENIZER,), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",),
    ("gpt2-vocab.json", "gpt2-merges.txt"),
)  # fmt: skip
"""Sets of files that are a tokenizer, in the order in which they are looked for; the last is Megatron-LM's names."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The folder of the chat templates that have names."""
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", *TOKENIZERS[-1],
    "chat_template.jinja", "chat_template.json", f"{CHAT_TEMPLATES}/*.jinja",
)  # fmt: skip
"""Patterns of a tokenizer's files."""
LICENCES = tuple(
    f"{spelling}*"
    for word in ("license", "licence", "notice", "copying", "use_policy")
    for spelling in (word, word.upper(), word.capitalize())
)
"""Patterns of the files with the terms of use, as repositories spell them: LICENSE, license.txt, USE_POLICY.md."""
BESIDE_WEIGHTS = (GENERATION, *TOKENIZER_FILES, *LICENCES)
"""Patterns of the files that a model's folder holds in addition to its weights and config.json."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files of weights that are pickled, which are never opened."""
_SHOWN = 6


def is_url(load: str) -> bool:
    """True if `checkpoint.load` names a checkpoint by a URL, such as s3://bucket/run/step-00000100."""
    return "://" in load


def holds_tokenizer(names: Collection[str]) -> bool:
    """True if files with these names include a tokenizer."""
    return any(set(kind) <= set(names) for kind in TOKENIZERS)


def tokenizer_names() -> str:
    """The files that can be a tokenizer, for messages."""
    return listing([" with ".join(kind) for kind in TOKENIZERS], "or")


def without_tokenizer(shown: str, names: Iterable[str]) -> str:
    """The message for a folder, called `shown`, whose files `names` include no tokenizer."""
    contents = f"it has {listing(sorted(names), most=_SHOWN)}" if names else "it is empty"
    return f"{shown} must hold a tokenizer, which is {tokenizer_names()}: {contents}"


def without_weights(shown: str, names: Iterable[str]) -> str:
    """The message for a folder or repository whose files `names` include no weights that can be loaded."""
    names = sorted(names)
    if not names:
        return f"checkpoint.load ({shown}) must hold {SINGLE}: it is empty"
    if pickled := listing([name for name in names if name.endswith(PICKLED)], most=_SHOWN):
        return (
            f"checkpoint.load ({shown}) must hold safetensors, and its weights are pickled ({pickled}): opening a "
            "pickle can run any code that its author put there. If you trust it, convert it by transformers: "
            "from_pretrained(…), then save_pretrained(…)"
        )
    return f"checkpoint.load ({shown}) must hold {SINGLE} or {INDEX}: it has {listing(names, most=_SHOWN)}"


def check_weights(folder: Path) -> None:
    """Checks that a folder has safetensors weights.

    Raises:
        ConfigError: there are none (for pickled weights, how to convert them), or the index is broken.
    """
    try:
        names = [file.name for file in folder.iterdir()]
        index = (folder / INDEX).read_bytes() if INDEX in names and SINGLE not in names else None
    except OSError as error:
        raise ConfigError(f"checkpoint.load ({folder}) must be a folder with weights: {reason_of(error)}") from None
    if index is not None:
        indexed(index, folder, lambda name: name in names)
    elif SINGLE not in names:
        raise ConfigError(without_weights(str(folder), names))


def indexed(index: bytes, folder: object, is_there: Callable[[str], bool]) -> list[str]:
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
        raise ConfigError(f"{folder} lacks {listing(absent)}: its index says that they hold weights")
    return names
