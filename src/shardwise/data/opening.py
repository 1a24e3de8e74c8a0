"""How commands reach data of any format: opened for a run, glanced at by a dry run, or inspected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.base.errors import ConfigError, DataError, see
from shardwise.base.files import cache_root
from shardwise.config import Config, DataConfig, data_from
from shardwise.data import hub
from shardwise.data.formats import datasets, hdf5, megatron, own, stream, text
from shardwise.data.formats.common import (
    Announce,
    PreparedData,
    document_marks,
    in_pairs,
    mark_problems,
    without_tokenizer,
)
from shardwise.data.formats.inspection import Inspection
from shardwise.data.reading.dataset_tables import is_saved
from shardwise.data.reading.detect import DataFormat, detect
from shardwise.data.samples.sentence_pairs import chunk_room
from shardwise.data.tokens.tokenizer import open_user_tokenizer, trained_special_tokens


class _Format(Protocol):
    """What a module of `formats` has. Each function raises a DataError with every problem of the data."""

    def open_data(self, config: Config, root: Path, announce: Announce, *, any_size: bool) -> PreparedData:
        """The data that `config` names, made ready for a run; what takes long to make is kept in the cache `root`."""

    def glance(self, config: Config) -> str:
        """What the data are, for the user of a dry run; found in a moment. Of the network, only the hub is asked."""

    def inspect(self, data: DataConfig, samples: int) -> Inspection:
        """What the data hold, and their first `samples`."""


FORMATS: Mapping[DataFormat, _Format] = {"megatron": megatron, "hdf5": hdf5, "datasets": datasets, "text": text}
_OF_TOKENS = ("megatron", "hdf5")
"""Formats that hold tokens and are read where they lie."""


def prepare(
    config: Config, cache_dir: Path | None = None, announce: Announce = None, *, any_size: bool = False
) -> PreparedData:
    """Opens the data of `config`, tokenizing it first where the cache has none.

    Any number of processes may call it at once: one builds and the others wait.

    Args:
        announce: is called with one line when something is built.
        any_size: the parts need not hold a sample each, as they must for training.

    Raises:
        DataError: when the text or the tokenizer is missing, unreadable or too small, or the cache cannot be written.
    """
    if config.hooks.data is not None:
        return own.open_data(config, cache_root(cache_dir), announce, any_size=any_size)
    format = checked_format(config)
    opener = stream if config.data.streaming else FORMATS[format]
    return opener.open_data(config, cache_root(cache_dir), announce, any_size=any_size)


def checked_format(config: Config) -> DataFormat:
    """The format of the data of `config`, which are not read; DataError where other keys ask what it cannot give."""
    data = config.data
    _, eval_weight, test_weight = data.split_weights
    if eval_weight == 0 and config.train.eval_every > 0:
        raise DataError(
            f"data.split ({data.split}) holds nothing out, and train.eval_every ({config.train.eval_every}) "
            "asks for evaluations: give the second part a weight, such as data.split=95,5, or set train.eval_every=0"
            f"{see('data#no-evaluation-part')}"
        )
    if in_pairs(config):
        chunk_room(config.train.sequence_length)
    format = detect(data)
    if data.split_names and format != "datasets":
        raise DataError(
            f"data.split ({data.split}) must be weights such as 95,5 where {data.key} ({data.name}) is no data set "
            "with splits"
        )
    holds_tokens = format in _OF_TOKENS
    if holds_tokens and (problems := mark_problems(data)):
        raise DataError(problems)
    if data.streaming and holds_tokens:
        raise DataError(
            f"data.streaming (true) must be false with {data.key} ({data.name}), whose tokens are read where they lie"
        )
    if data.streaming and in_pairs(config):
        raise DataError(
            f"data.streaming (true) must be false with model.family ({config.model.family}): pairs of sentences are "
            "made of prepared text"
        )
    if test_weight and not holds_tokens and not data.split_names:
        raise DataError(
            f"data.split ({data.split}) must be two weights, training and evaluation, where {data.key} "
            f"({data.name}) is text: only Megatron data, HDF5 shards and splits with names have a test part"
        )
    return format


@dataclass(frozen=True)
class Glance:
    """What a glance at data and tokenizer finds.

    Attributes:
        rows: names and what they are, for the user.
        problems: why a run could not start.
    """

    rows: Sequence[tuple[str, str]]
    problems: Sequence[str]


def glance(config: Config) -> Glance:
    """What a dry run says of the data and the tokenizer of `config`; nothing is fetched or prepared.

    Only a hub id that the cache lacks is looked up on the hub.
    """
    rows: list[tuple[str, str]] = []
    problems: list[str] = []
    looks: dict[str, Callable[[], str]] = {}
    format: DataFormat
    if config.hooks.data is not None:
        format = "megatron"  # as those, its samples are tokens
        looks["data"] = lambda: own.glance(config)
    elif config.data.is_named:
        try:
            format = checked_format(config)
        except ConfigError as error:
            return Glance(rows, error.problems)
        looks["data"] = lambda: f"{config.data.name}: {FORMATS[format].glance(config)}"
    else:
        format = "text"
        rows.append(("data", "none is named: a run needs data.path, data.blend or data.dataset"))
    if config.data.is_named or config.data.tokenizer is not None:
        looks["tokenizer"] = lambda: _glance_at_tokenizer(config, format)
    for name, describe in looks.items():
        try:
            rows.append((name, describe()))
        except ConfigError as error:
            problems += error.problems
    return Glance(rows, problems)


def _glance_at_tokenizer(config: Config, format: DataFormat) -> str:
    named, vocabulary = config.data.tokenizer, config.model.vocab_size
    if named is not None:
        place = hub.place_of_tokenizer(named)
        if not isinstance(place, Path) and (found := hub.find(place)) != "cache":
            return f"{named}: {hub.FOUND[found]}"
        tokenizer = open_user_tokenizer(named, vocabulary, pairs=in_pairs(config))
        document_marks(config.data, tokenizer)
        note = "" if tokenizer.note is None else f"; {tokenizer.note}"
        return f"{named}: {tokenizer.vocab_size:,} tokens, of model.vocab_size ({vocabulary:,}){note}"
    if format in _OF_TOKENS:
        if format == "megatron" and (problems := without_tokenizer(config)):
            raise DataError(problems)
        return "none, as the data hold tokens"
    if format == "datasets":
        return "where the data hold text, one is trained on them"
    trained_special_tokens(vocabulary, pairs=in_pairs(config))
    return f"byte-level BPE of {vocabulary:,} tokens, trained on the data when the run starts"


def inspect(path: str, samples: int, keys: Mapping[str, Any]) -> Inspection:
    """What the data at a path hold, of any format; DataError where there are none, or they are damaged.

    Args:
        samples: how many of the first ones are shown.
        keys: other keys of the section `data`.
    """
    place = Path(path).expanduser()
    folder = place.parent if place.suffix == ".arrow" else place
    if is_saved(folder, damaged=True):
        return datasets.inspect(data_from({"path": str(folder), **keys}), samples)
    data = data_from({"path": path, **keys})
    format = detect(data)
    if format in _OF_TOKENS and (problems := mark_problems(data)):
        raise DataError(problems)
    if format == "text" and not place.exists():
        where = "" if place.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"PATH ({path}) does not exist{where}: name Megatron's PREFIX, HDF5 shards, an arrow folder or text"
        )
    return FORMATS[format].inspect(data, samples)
