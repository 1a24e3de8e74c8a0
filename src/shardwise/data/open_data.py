"""The way of every command to data of any format: opened for a run, glanced at by a dry run, or inspected.

`FORMATS` has one record for each format, which answers all that is asked of it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shardwise.base.errors import ConfigError, DataError, see
from shardwise.base.files import cache_root, user_path
from shardwise.config import CHAT, Config, DataConfig, data_from, tokens_of_run
from shardwise.data import hub
from shardwise.data.cache import digest_of
from shardwise.data.formats import (
    chat,
    common,
    datasets,
    hdf5,
    inspecting,
    megatron,
    mixture,
    stream,
    text,
    user_samples,
)
from shardwise.data.held_out import HeldOut, held_out_text
from shardwise.data.reading import dataset_tables, hdf5_files, megatron_files
from shardwise.data.samples.batch import MANY_EPOCHS, REPEATED_TEXT
from shardwise.data.samples.sentence_pairs import chunk_room
from shardwise.data.tokens.chat_template import ChatTemplate
from shardwise.data.tokens.tokenizer import trained_special_tokens

Contents = Literal["tokens", "masked pairs", "text", "text or tokens", "conversations"]
"""Kinds of samples: tokens in a row, sentence pairs whose tokens are masked already, text that becomes tokens, or
conversations whose answers are learned."""


class OpenData(Protocol):
    """Opens the data that `config` names for a run; results that take long to make are kept in the cache `root`."""

    def __call__(
        self, config: Config, root: Path, announce: common.Announce, *, any_size: bool
    ) -> common.PreparedData: ...


@dataclass(frozen=True)
class SampleSource:
    """Data that a run can be trained on.

    Each function raises a DataError with every problem of the data.

    Attributes:
        contents: kind of the samples.
        open_data: opens the data for a run.
        glance: describes the data to the user of a dry run in a moment. Of the network, only the hub is asked.
    """

    contents: Contents
    open_data: OpenData
    glance: Callable[[Config], str]

    @property
    def holds_tokens(self) -> bool:
        """True if the data are tokens in any case, which are read as they are."""
        return self.contents in ("tokens", "masked pairs")


@dataclass(frozen=True)
class DataFormat(SampleSource):
    """A format of files, as `data.format` names it.

    Attributes:
        name: value of `data.format`; "text" stands for jsonl and parquet too.
        is_at: True if names at a path show that data of the format lie there. No file is opened; an OSError means that
            the system refuses the path.
        inspect: describes the data, with the first samples, whose number is given.
        has_splits: True if the data may have splits with names.
        manifests: the files that may say which tokenizer made tokens; they need not be there.
        most_tokens: the number that the tokens of the data cannot exceed, in a moment; None if it takes longer, or if
            the number is above a limit, which is given.
        has_vocabulary: True if a tokenizer with the model's vocabulary can be trained on the data, which raises a
            DataError if it cannot; False if a glance cannot tell.
        held_out: the held-out part, as far as a glance can tell.
        first_documents: the first documents, whose packed samples an inspection shows; None if it shows no samples of
            the model.
    """

    name: str
    is_at: Callable[[Path], bool]
    inspect: Callable[[DataConfig, int], inspecting.Inspection]
    has_splits: bool = False
    manifests: Callable[[DataConfig], Sequence[Path]] = lambda _data: ()
    most_tokens: Callable[[Config, int], int | None] = lambda _config, _limit: None
    has_vocabulary: Callable[[Config], bool] = lambda _config: False
    held_out: Callable[[Config], HeldOut] = lambda _config: HeldOut()
    first_documents: Callable[[DataConfig], inspecting.FirstDocuments] | None = None


FORMATS: Mapping[str, DataFormat] = {
    format.name: format
    for format in (
        DataFormat(
            name="megatron",
            contents="tokens",
            is_at=megatron_files.is_indexed,
            open_data=megatron.open_data,
            glance=megatron.glance,
            inspect=megatron.inspect,
            manifests=megatron.manifests,
            most_tokens=megatron.most_tokens,
            first_documents=megatron.first_documents,
        ),
        DataFormat(
            name="hdf5",
            contents="masked pairs",
            is_at=hdf5_files.names_shards,
            open_data=hdf5.open_data,
            glance=hdf5.glance,
            inspect=hdf5.inspect,
            manifests=hdf5.manifests,
        ),
        DataFormat(
            name="datasets",
            contents="text or tokens",
            is_at=dataset_tables.is_saved,
            open_data=datasets.open_data,
            glance=datasets.glance,
            inspect=datasets.inspect,
            manifests=datasets.manifests,
            has_splits=True,
        ),
        DataFormat(
            name="chat",
            contents="conversations",
            is_at=lambda _path: False,  # its files are named as those of text are
            open_data=chat.open_data,
            glance=chat.glance,
            inspect=chat.inspect,
            has_vocabulary=chat.has_vocabulary,
            held_out=chat.held_out,
        ),
        DataFormat(
            name="text",
            contents="text",
            is_at=lambda _path: True,
            open_data=text.open_data,
            glance=text.glance,
            inspect=text.inspect,
            most_tokens=text.most_tokens,
            has_vocabulary=text.has_vocabulary,
            held_out=text.held_out,
            first_documents=text.first_documents,
        ),
    )
}
"""All formats, by their names, in the order in which they are looked for at a path."""

TRAINED_AT_START = "trained on the data when the run starts"
"""The end of the row on a tokenizer that nothing names."""
USER_SAMPLES = SampleSource(contents="tokens", open_data=user_samples.open_data, glance=user_samples.glance)
"""The object that `hooks.data` names."""


def format_of(data: DataConfig) -> DataFormat:
    """The format of the data that the `data` section names: as its keys say, else by the names at the path.

    No file is opened. A path that the system refuses counts as text: opening it will report the reason.
    """
    if data.blend is not None:  # of prefixes
        return FORMATS["megatron"]
    if data.is_chat:
        return FORMATS[CHAT]
    if data.path is None:
        return FORMATS["datasets" if data.is_hub_dataset else "text"]
    if data.format != "auto":
        return FORMATS.get(data.format, FORMATS["text"])
    path = user_path(data.path)
    try:
        return next(format for format in FORMATS.values() if format.is_at(path))
    except OSError:
        return FORMATS["text"]


def trains_tokenizer(config: Config) -> bool:
    """True if the data are text, for which a tokenizer is trained where `data.tokenizer` names none."""
    data = config.data
    if data.mixture:
        return any(trains_tokenizer(mixture.config_of_source(config, name)) for name in data.sources_read)
    is_read = data.is_named and config.hooks.data is None
    return is_read and format_of(data).contents in ("text", "conversations")


def prepare(
    config: Config, cache_dir: Path | None = None, announce: common.Announce = None, *, any_size: bool = False
) -> common.PreparedData:
    """Opens the data of `config`, tokenizing it first if the cache has none.

    Any number of processes may call it at once: one builds and the others wait.

    Args:
        announce: called with one line when something is built.
        any_size: True if parts may hold less than a sample each, which training needs.

    Raises:
        DataError: the text or the tokenizer is missing, unreadable or too small, or the cache cannot be written.
    """
    if config.data.mixture:
        return _prepare_sources(config, cache_dir, announce, any_size=any_size)
    if config.hooks.data is not None:
        open_data = USER_SAMPLES.open_data
    else:
        format = checked_format(config)
        open_data = stream.open_data if config.data.streaming else format.open_data
    return open_data(config, cache_root(cache_dir), announce, any_size=any_size)


def _prepare_sources(
    config: Config, cache_dir: Path | None, announce: common.Announce, *, any_size: bool
) -> mixture.PreparedMixture:
    """Opens all sources of a mixture; DataError with every problem of each.

    Without `data.tokenizer` one is trained on the first source of text in the alphabet, and the others have it too.
    """
    sources: dict[str, common.PreparedData] = {}
    problems = []
    tokenizer = config.data.tokenizer
    for name in config.data.sources_read:
        source = mixture.config_of_source(config, name)
        # Nobody knows which tokenizer made tokens, unless data.tokenizer says it.
        if source.hooks.data is None and not format_of(source.data).holds_tokens:
            source = source.model_copy(update={"data": source.data.model_copy(update={"tokenizer": tokenizer})})
        try:
            sources[name] = prepare(source, cache_dir, announce, any_size=any_size)
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
    if problems:
        raise DataError(problems)
    return mixture.PreparedMixture(
        tokenizer_path=next((data.tokenizer_path for data in sources.values() if data.tokenizer_path), None),
        fingerprint=digest_of({name: data.fingerprint for name, data in sources.items()}),
        summary="; ".join(f"{name}: {data.summary}" for name, data in sources.items()),
        sources=sources,
    )


def checked_format(config: Config) -> DataFormat:
    """The format of the data of `config`, which are not read.

    Raises:
        DataError: other keys ask for something that data of the format cannot give.
    """
    data = config.data
    _, eval_weight, test_weight = data.split_weights
    if eval_weight == 0 and config.train.eval_every > 0 and not config.evaluation.sets:
        raise DataError(
            f"data.split ({data.split}) holds nothing out, and train.eval_every ({config.train.eval_every}) "
            "asks for evaluations: give the second part a weight, such as data.split=95,5, or set train.eval_every=0"
            f"{see('data#no-evaluation-part')}"
        )
    if common.in_pairs(config):
        chunk_room(config.train.sequence_length)  # raises if it is too short for a pair
    format = format_of(data)
    if data.split_names and not format.has_splits:
        raise DataError(
            f"data.split ({data.split}) must be weights such as 95,5 where {data.key} ({data.name}) is "
            f"{'conversations' if format.name == CHAT else 'no data set with splits'}"
        )
    if format.holds_tokens and (problems := common.mark_problems(data)):
        raise DataError(problems)
    if data.streaming and format.holds_tokens:
        raise DataError(
            f"data.streaming (true) must be false with {data.key} ({data.name}), whose tokens are read where they lie"
        )
    if data.streaming and common.in_pairs(config):
        raise DataError(
            f"data.streaming (true) must be false with model.family ({config.model.family}): pairs of sentences are "
            "made of prepared text"
        )
    if test_weight and not format.holds_tokens and not data.split_names:
        raise DataError(
            f"data.split ({data.split}) must be two weights, training and evaluation, where {data.key} "
            f"({data.name}) is text: only Megatron data, HDF5 shards and splits with names have a test part"
        )
    return format


@dataclass(frozen=True)
class Glance:
    """The result of a glance at data and tokenizer.

    Attributes:
        rows: names and their descriptions, for the user.
        problems: reasons for which a run could not start.
    """

    rows: Sequence[tuple[str, str]]
    problems: Sequence[str]


def glance(config: Config) -> Glance:
    """The rows of a dry run about the data and the tokenizer of `config`; nothing is fetched or prepared.

    Only a hub id that the cache lacks is looked up on the hub.
    """
    if config.data.mixture:
        glanced = _glance_at_sources(config)
        return glanced if glanced.problems else Glance([*glanced.rows, ("held out", held_out_text(config))], [])
    glanced = _glance_at_source(config)
    if glanced.problems or not config.data.is_named or config.hooks.data is not None:
        return glanced
    format = format_of(config.data)
    held_out = held_out_text(config, format.held_out(config), is_cut=format.holds_tokens)
    rows = [*glanced.rows, ("held out", held_out)]
    repeats = _repeats(config)
    return Glance(rows if repeats is None else [*rows, ("warning", repeats)], [])


def _repeats(config: Config) -> str | None:
    """A warning if the training reads the data very often, as far as a glance can tell; else None."""
    train = config.train
    needed = tokens_of_run(config)
    most = format_of(config.data).most_tokens(config, needed // MANY_EPOCHS)
    if not most or needed <= MANY_EPOCHS * most:
        return None
    return (
        f"train.steps ({train.steps:,}) read {needed:,} tokens, and the data have at most {most:,}: each is read at "
        f"least {needed // most:,} times, and {REPEATED_TEXT}: lower train.steps, or give more data"
    )


def _glance_at_source(config: Config, *, may_train: bool = True) -> Glance:
    """The rows about the data and the tokenizer of a configuration without a mixture.

    Args:
        may_train: True if these are the data that a tokenizer is trained on, should none be named.
    """
    rows: list[tuple[str, str]] = []
    problems: list[str] = []
    looks: dict[str, Callable[[], str]] = {}
    source: SampleSource
    if config.hooks.data is not None:
        source = USER_SAMPLES
        looks["data"] = lambda: source.glance(config)
    elif config.data.is_named:
        try:
            source = checked_format(config)
        except ConfigError as error:
            return Glance(rows, error.problems)
        looks["data"] = lambda: _described(config, source)
    else:
        source = FORMATS["text"]
        rows.append(("data", "none is named: a run needs data.path, data.blend or data.dataset"))
    if config.data.is_named or config.data.tokenizer is not None:
        looks["tokenizer"] = lambda: _glance_at_tokenizer(config, source.contents, may_train=may_train and not problems)
    # A problem of the data must not hide one of the tokenizer.
    for name, describe in looks.items():
        try:
            rows.append((name, describe()))
        except ConfigError as error:
            problems += error.problems
    return Glance(rows, [*dict.fromkeys(problems)])


def glance_at_set(config: Config) -> str:
    """The row of a dry run about an evaluation set, by the configuration whose data are the set.

    Raises:
        DataError: the set cannot be read.
    """
    return _described(config, checked_format(config))


def _described(config: Config, source: SampleSource) -> str:
    return f"{config.data.name}: {source.glance(config)}"


def _glance_at_sources(config: Config) -> Glance:
    """The rows of each source of a mixture, and the tokenizer that they share."""
    rows: dict[str, str] = {}
    problems: list[str] = []
    may_train = True
    for name in config.data.sources_read:
        source = mixture.config_of_source(config, name)
        glanced = _glance_at_source(source, may_train=may_train)
        may_train &= source.hooks.data is not None or format_of(source.data).holds_tokens
        rows |= {"tokenizer" if row == "tokenizer" else f"data, {name}": text for row, text in glanced.rows}
        problems += [f"data.mixture.{name}: {problem}" for problem in glanced.problems]
    tokenizer = rows.pop("tokenizer", None)
    return Glance([*rows.items(), *([] if tokenizer is None else [("tokenizer", tokenizer)])], problems)


def _glance_at_tokenizer(config: Config, contents: Contents, *, may_train: bool) -> str:
    vocabulary = config.model.vocab_size
    if config.data.tokenizer is not None:
        return _glance_at_user_tokenizer(config, config.data.tokenizer, contents)
    if config.checkpoint.load is not None:
        return f"that of the weights in {config.checkpoint.load}"
    if contents in ("text", "conversations"):
        trained_special_tokens(vocabulary, pairs=common.in_pairs(config), chat=contents == "conversations")
        is_sure = may_train and format_of(config.data).has_vocabulary(config)
        condition = "" if is_sure else " if the text yields as many"
        return f"byte-level BPE of {vocabulary:,} tokens{condition}, {TRAINED_AT_START}"
    if contents == "text or tokens":
        return "where the data hold text, one is trained on them"
    # Pairs of shards have their special tokens; the samples of other tokens may need some.
    if contents == "tokens" and (problems := common.without_tokenizer(config, has_documents=True)):
        raise DataError(problems)
    return "none, as the data hold tokens"


def _glance_at_user_tokenizer(config: Config, name: str, contents: Contents) -> str:
    vocabulary = config.model.vocab_size
    place = hub.place_of_tokenizer(name)
    if not isinstance(place, Path) and (location := hub.find(place)) != "cache":
        return f"{name}: {hub.FOUND[location]}"
    problems: list[str] = []
    tokenizer = common.tokenizer_of_tokens(config, format_of(config.data).manifests(config.data), problems)
    if tokenizer is None or problems:
        raise DataError(problems)
    note = "" if tokenizer.note is None else f"; {tokenizer.note}"
    if contents == "conversations":
        template = ChatTemplate.or_built_in(hub.resolve_tokenizer(name, cached=True), name)
        note += f"; chat template: {template.name}"
    else:
        common.document_marks(config.data, tokenizer)
    return f"{name}: {tokenizer.vocab_size:,} tokens, of model.vocab_size ({vocabulary:,}){note}"


def inspect(
    path: str, samples: int, keys: Mapping[str, Any], packed_length: int | None = None
) -> inspecting.Inspection:
    """An inspection of the data at a path, of any format.

    Args:
        samples: number of the first samples that are shown.
        keys: other keys of the section `data`.
        packed_length: sequence length of the packed samples that are shown in place of documents; None for documents.

    Raises:
        DataError: there are no data at the path, or they are damaged.
    """
    place = user_path(path)
    # A folder without its description of columns is still inspected as a data set, whose reader says what is missing.
    folder = place.parent if place.suffix == ".arrow" else place
    if keys.get("format") != CHAT and dataset_tables.is_saved(folder, damaged=True):
        if packed_length is not None:
            raise _without_samples(path)
        return datasets.inspect(data_from({"path": str(folder), **keys}), samples)
    data = data_from({"path": path, **keys})
    format = format_of(data)
    if format.holds_tokens and (problems := common.mark_problems(data)):
        raise DataError(problems)
    if format.name in ("text", CHAT) and not place.exists():
        where = "" if place.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"PATH ({path}) does not exist{where}: name Megatron's PREFIX, HDF5 shards, an arrow folder or text"
        )
    if packed_length is None:
        return format.inspect(data, samples)
    if format.first_documents is None:
        raise _without_samples(path)
    inspection = format.inspect(data, samples)
    return inspecting.with_packing(inspection, data.tokenizer, format.first_documents(data), packed_length, samples)


def _without_samples(path: str) -> DataError:
    return DataError(
        f"--sequence-length must be left out with PATH ({path}): only of text and of Megatron's files packed samples "
        "are shown"
    )
