"""Data of any format, opened for a run. What a user is told of data is in `preview.py`."""

from __future__ import annotations

import functools
import importlib
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import get_args

from shardwise.base.errors import ConfigError, DataError, raise_problems, see
from shardwise.base.files import user_path
from shardwise.config import CHAT, Config, DataConfig
from shardwise.config.data import DataFormatName
from shardwise.data.formats import prepared_data
from shardwise.data.formats.data_format import DataFormat
from shardwise.data.request import Announce, DataRequest, seed_of_source
from shardwise.data.rows import Part, json_digest
from shardwise.data.samples.batch import Batches, BlendedBatches
from shardwise.data.samples.order import MixtureStage

FORMATS = tuple(name for name in get_args(DataFormatName) if name not in ("auto", "jsonl", "parquet"))
"""The names of all formats, in the order in which they are looked for at a path; jsonl and parquet are text too."""


@functools.cache
def data_format_named(name: str) -> DataFormat:
    """The record of a data format: `FORMAT` of its module, which is imported when it is asked for."""
    record: DataFormat = importlib.import_module(f"shardwise.data.formats.{name}").FORMAT
    return record


def data_format_of(data: DataConfig) -> DataFormat:
    """The format of the data that the `data` section names: as keys say, else names and first rows.

    A path that the system refuses counts as text: opening it will report the reason.
    """
    if data.blend is not None:  # of prefixes
        return data_format_named("megatron")
    if data.is_chat:
        return data_format_named(CHAT)
    if data.path is None:
        return data_format_named("datasets" if data.is_hub_dataset else "text")
    if data.format in FORMATS:
        return data_format_named(data.format)
    path = user_path(data.path)
    records = [data_format_named(name) for name in FORMATS]
    try:
        named = (record for record in records if data.format == "auto" and record.is_at(path))
        seen = (record for record in records if record.is_in(data))
        return next(chain(named, seen), data_format_named("text"))
    except OSError:
        return data_format_named("text")


def trains_tokenizer(config: Config) -> bool:
    """True if the data are text, for which a tokenizer is trained where `data.tokenizer` names none."""
    data = config.data
    if data.mixture:
        return any(trains_tokenizer(_config_of_source(config, name)) for name in data.sources_read)
    is_read = data.is_named and config.hooks.data is None
    return is_read and data_format_of(data).contents in ("text", "conversations")


def prepare_data(
    config: Config, cache_dir: Path | None = None, announce: Announce = None, *, any_size: bool = False
) -> prepared_data.PreparedData:
    """Opens the training data of `config`, tokenizing them first if the data cache has none.

    Any number of processes may call it at once: one builds and the others wait.

    Args:
        any_size: True if parts may hold less than a sample each, which training needs.

    Raises:
        DataError: the text or the tokenizer is missing, unreadable or too small, or the cache cannot be written.
    """
    if config.data.mixture:
        return _prepare_sources(config, cache_dir, announce, any_size=any_size)
    request = DataRequest.of(config, cache_dir, announce, any_size=any_size)
    if request.hook is not None:
        from shardwise.data.formats import user_samples

        return user_samples.open_user_samples(config, request)
    return checked_data_format(request).open_data(request)


def _prepare_sources(config: Config, cache_dir: Path | None, announce: Announce, *, any_size: bool) -> _PreparedMixture:
    """Opens all sources of a mixture; DataError with every problem of each.

    Without `data.tokenizer` one is trained on the first source of text in the alphabet, and the others have it too.
    """
    sources: dict[str, prepared_data.PreparedData] = {}
    problems = []
    tokenizer = config.data.tokenizer
    for name in config.data.sources_read:
        source = _config_of_source(config, name)
        # Nobody knows which tokenizer made tokens, unless data.tokenizer says it.
        if source.hooks.data is None and not data_format_of(source.data).holds_tokens:
            source = source.model_copy(update={"data": source.data.model_copy(update={"tokenizer": tokenizer})})
        try:
            sources[name] = prepare_data(source, cache_dir, announce, any_size=any_size)
        except ConfigError as error:
            problems += [f"data.mixture.{name}: {problem}" for problem in error.problems]
            continue
        trained = sources[name].tokenizer_path
        if tokenizer is None and trained is not None:
            tokenizer = str(trained)
    tokens = [name for name, data in sources.items() if data.tokenizer_path is None]
    if tokens and len(tokens) < len(sources):
        problems.append(
            f"data.tokenizer must be the one that made the tokens of data.mixture.{tokens[0]}, as other sources of the "
            "mixture are text"
        )
    raise_problems(DataError, problems)
    return _PreparedMixture(
        tokenizer_path=next((data.tokenizer_path for data in sources.values() if data.tokenizer_path), None),
        fingerprint=json_digest({name: data.fingerprint for name, data in sources.items()}),
        summary="; ".join(f"{name}: {data.summary}" for name, data in sources.items()),
        sources=sources,
    )


@dataclass(frozen=True)
class _PreparedMixture(prepared_data.PreparedData):
    sources: Mapping[str, prepared_data.PreparedData]

    @property
    def source_fingerprints(self) -> dict[str, str]:
        return {name: data.fingerprint for name, data in self.sources.items()}

    def count(self, part: Part) -> int:
        return sum(data.count(part) for data in self.sources.values())

    def beginning(self, part: Part, tokens: int) -> list[int]:
        return next((row for data in self.sources.values() if (row := data.beginning(part, tokens))), [])

    def batches(
        self, request: DataRequest, part: Part, *, evaluation: bool = False, tail: bool = False
    ) -> Batches | None:
        """The batches of a part, see `PreparedData`; an evaluation leaves out sources with less than one sample."""
        by_name: dict[str, Batches] = {}
        for name, data in self.sources.items():
            batches = data.batches(request.of_source(name), part, evaluation=evaluation, tail=tail)
            if batches is not None:
                by_name[name] = batches
        if not by_name:
            return None
        if evaluation:  # by the weight of each source in the stage in which it is first read
            weights = ChainMap(*(dict(stage.weights) for stage in request.stages))
            read = [name for name in request.data.sources_read if name in by_name]
            return BlendedBatches(by_name, [MixtureStage(0, 0, {name: weights[name] for name in read})])
        return BlendedBatches(by_name, request.stages, request.samples_together)


def _config_of_source(config: Config, name: str) -> Config:
    data = config.data.source_section(name)
    train = {
        "seed": seed_of_source(config.train.seed, name),
        "eval_every": config.train.eval_every if data.split_weights[1] else 0,
    }
    return config.model_copy(
        update={
            "data": data,
            "hooks": config.hooks.model_copy(update={"data": config.data.mixture[name].hook}),
            "train": config.train.model_copy(update=train),
        }
    )


def checked_data_format(request: DataRequest) -> DataFormat:
    """The format of the data, which are not read; DataError if keys ask for what data of the format cannot give."""
    data = request.data
    _, eval_weight, test_weight = data.split_weights
    if eval_weight == 0 and request.eval_every > 0 and not request.has_sets:
        raise DataError(
            f"data.split ({data.split}) holds nothing out, and train.eval_every ({request.eval_every}) "
            "asks for evaluations: give the second part a weight, such as data.split=95,5, or set train.eval_every=0"
            f"{see('data#no-evaluation-part')}"
        )
    if request.in_pairs:  # a sample must have room for one
        from shardwise.data.samples import sentence_pairs

        sentence_pairs.pair_tokens_room(request.sequence_length)
    record = data_format_of(data)
    shown = f"{data.key} ({data.name})"
    if data.split_names and not record.has_splits:
        raise DataError(
            f"data.split ({data.split}) must be weights such as 95,5 where {shown} is "
            f"{'conversations' if record.name == CHAT else 'no data set with splits'}"
        )
    if record.holds_tokens and (
        problems := prepared_data.document_mark_problems(data, of_rows=record.name == "tokens")
    ):
        raise DataError(problems)
    if data.eod_token is not None and record.contents == "text" and not data.needs_document_ends:
        raise DataError(f"data.eod_token ({data.eod_token}) must be left out with text: the tokenizer's token ends it")
    if data.streaming and record.holds_tokens:
        raise DataError(f"data.streaming (true) must be false with {shown}, whose tokens are read where they lie")
    if data.streaming and request.in_pairs:
        raise DataError(
            f"data.streaming (true) must be false with model.family ({request.family}): pairs of sentences are made "
            "of prepared text"
        )
    if test_weight and not record.holds_tokens and not data.split_names:
        raise DataError(
            f"data.split ({data.split}) must be two weights, training and evaluation, where {shown} is text: only "
            "Megatron data, HDF5 shards and splits with names have a test part"
        )
    return record
