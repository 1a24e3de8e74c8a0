"""What a dry run asks of data and tokenizer: whether they are there, and of a kind that is read. Little of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from shardwise import hub
from shardwise.config import BUILT_IN_TEXTS, Config
from shardwise.data.formats.common import in_pairs, require_bert, without_tokenizer
from shardwise.data.formats.hdf5 import shard_paths
from shardwise.data.formats.text import DataKind, kind_of_data
from shardwise.data.reading.datasets import open_dataset, reads_datasets, require_library
from shardwise.data.reading.hdf5 import Shard
from shardwise.data.reading.megatron import count_sequences
from shardwise.data.reading.sources import FileSource, open_source
from shardwise.data.reading.text import Kind, documents, kind_of
from shardwise.data.tokens.tokenizer import open_user_tokenizer, trained_special_tokens
from shardwise.errors import ConfigError, DataError
from shardwise.units import size

_SHARDS_OPENED = 8
_ON_HUB = "on the hub, which was not asked: fetched when the run starts"


@dataclass
class Glance:
    """What was found.

    Attributes:
        rows: names and what they are, for the user. problems: why a run could not start.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, look: Callable[[], str]) -> None:
        try:
            self.rows.append((name, look()))
        except ConfigError as error:
            self.problems += error.problems


def glance(config: Config) -> Glance:
    """Look at what `config` names, without the network and without preparing anything."""
    found = Glance()
    try:
        kind = kind_of_data(config)
    except ConfigError as error:
        return Glance(problems=error.problems)
    found.add("data", lambda: f"{config.data.name}: {_of_data(config, kind)}")
    found.add("tokenizer", lambda: _of_tokenizer(config, kind))
    return found


def _of_data(config: Config, kind: DataKind) -> str:
    data = config.data
    if kind == "indexed":
        sequences = [count_sequences(prefix) for _, prefix in data.weighted_prefixes]
        return f"{_number(sum(sequences), 'sequence')} in Megatron's format, as the headers of .idx files say"
    if kind == "shards":
        return _of_shards(config)
    if data.is_hub_dataset:
        require_library(data)
        hub.place_of_dataset(data.dataset, BUILT_IN_TEXTS)
        return _ON_HUB
    then = "read while training goes on" if data.streaming else "prepared when the run starts, unless the cache has it"
    if reads_datasets(data):
        require_library(data)
        dataset = open_dataset(data)
        dataset.stamp()
        files = [file for each in dataset.files().values() for file in each]
        return f"a data set of {_number(len(files), 'file')}, {then}"
    source = open_source(data)
    if not isinstance(source, FileSource):
        return f"built-in, {then}"
    _read_beginnings(source)
    total = sum(file.stat().st_size for file in source.files)
    return f"{_number(len(source.files), 'file')}, {size(total)}, {then}"


def _of_shards(config: Config) -> str:
    require_bert(config)
    paths = shard_paths(config.data)
    opened = [Shard.open(path, config.train.sequence_length) for path in paths[:_SHARDS_OPENED]]
    more = f", of which {len(opened)} were opened" if len(opened) < len(paths) else ""
    return f"{_number(len(paths), 'HDF5 shard')}{more}"


def _read_beginnings(source: FileSource) -> None:
    """The first document of the first file of each kind."""
    firsts: dict[Kind, Path] = {}
    for file in source.files:
        firsts.setdefault(source.kind or kind_of(file), file)
    for kind, file in firsts.items():
        for _, blocks in islice(documents(file, kind, source.text_key), 1):
            next(iter(blocks), None)


def _of_tokenizer(config: Config, kind: DataKind) -> str:
    named, vocabulary = config.data.tokenizer, config.model.vocab_size
    if named is not None:
        if not isinstance(hub.place_of_tokenizer(named), Path):
            return f"{named}: {_ON_HUB}"
        tokenizer = open_user_tokenizer(named, vocabulary, pairs=in_pairs(config))
        return f"{named}: {tokenizer.vocab_size:,} tokens, of model.vocab_size ({vocabulary:,})"
    if kind in ("indexed", "shards"):
        if kind == "indexed" and (problems := without_tokenizer(config)):
            raise DataError(problems)
        return "none, as the data hold tokens"
    if kind == "datasets":
        return "where the data hold text, one is trained on them"
    trained_special_tokens(vocabulary, pairs=in_pairs(config))
    return f"byte-level BPE of {vocabulary:,} tokens, trained on the data when the run starts"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
