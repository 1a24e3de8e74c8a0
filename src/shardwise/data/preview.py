"""Descriptions of data of any format for a user: by a dry run in a moment, and by `shardwise data inspect`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base import hub
from shardwise.base.errors import ConfigError, DataError, Problems
from shardwise.base.files import user_path
from shardwise.config import CHAT, Config, checked_data_section, tokens_of_run
from shardwise.data.evaluation_sets import evaluation_set_config, evaluation_set_problem
from shardwise.data.evaluation_tasks import require_lm_eval
from shardwise.data.formats import inspections, prepared_data, user_samples
from shardwise.data.formats.data_format import DataContents, Inspection
from shardwise.data.open_data import checked_data_format, data_format_named, data_format_of
from shardwise.data.reading import dataset_tables
from shardwise.data.request import DataRequest
from shardwise.data.samples.batch import MANY_EPOCHS, REPEATED_TEXT
from shardwise.data.tokens.chat_template import ChatTemplate
from shardwise.data.tokens.encoding import document_marks
from shardwise.data.tokens.tokenizer import trained_special_tokens
from shardwise.data.tokens.tokenizer_files import place_of_tokenizer, resolve_tokenizer

_UNUSED = 0.1  # share of the vocabulary that a tokenizer may leave without a token, as padding and reserved tokens do
TRAINED_AT_START = "trained on the data when the run starts"
"""The end of the row on a tokenizer that nothing names."""


@dataclass(frozen=True)
class DataPreview:
    """The rows of a dry run on data and tokenizer, and their problems."""

    rows: Sequence[tuple[str, str]]
    problems: Sequence[str]


def preview_data(config: Config) -> DataPreview:
    """The rows of a dry run about the data and the tokenizer of `config`; nothing is fetched or prepared.

    Only a hub id that the cache lacks is looked up on the hub.
    """
    request = DataRequest.of(config)
    data = request.data
    preview = _preview_sources(request) if data.mixture else _preview_source(request)
    if preview.problems or not data.is_named or request.hook is not None:
        return preview
    rows = [*preview.rows, ("held out", config.held_out_text)]
    needed = tokens_of_run(config)
    most = None if data.mixture else data_format_of(data).most_tokens(request, needed // MANY_EPOCHS)
    if most and needed > MANY_EPOCHS * most:
        warning = (
            f"train.steps ({config.train.steps:,}) read {needed:,} tokens, and the data have at most {most:,}: each is "
            f"read at least {needed // most:,} times, and {REPEATED_TEXT}: lower train.steps, or give more data"
        )
        rows.append(("warning", warning))
    return DataPreview(rows, [])


def _preview_source(request: DataRequest) -> DataPreview:
    rows: list[tuple[str, str]] = []
    problems = Problems()
    looks: dict[str, Callable[[], str]] = {}
    contents: DataContents = "text"
    data = request.data
    if request.hook is not None:
        contents = "tokens"
        looks["data"] = lambda: user_samples.preview_user_samples(request)
    elif data.is_named:
        try:
            record = checked_data_format(request)
        except ConfigError as error:
            return DataPreview(rows, error.problems)
        contents = record.contents
        looks["data"] = lambda: f"{data.name}: {record.preview(request)}"
    else:
        rows.append(("data", "none is named: a run needs data.path, data.blend or data.dataset"))
    warnings: list[str] = []
    if data.is_named or data.tokenizer is not None:
        looks["tokenizer"] = lambda: _tokenizer_text(request, contents, warnings)
    # A problem of the data must not hide one of the tokenizer.
    for name, describe in looks.items():
        with problems:
            rows.append((name, describe()))
    return DataPreview([*rows, *(("warning", text) for text in warnings)], [*dict.fromkeys(problems)])


def preview_evaluation(config: Config) -> DataPreview:
    """The rows of a dry run about the sets and the tasks of `evaluation`; nothing is fetched or prepared."""
    rows = []
    problems = Problems()
    for name in config.evaluation.sets:
        request = DataRequest.of(evaluation_set_config(config, name, None))
        try:
            rows.append((f"set, {name}", f"{request.data.name}: {checked_data_format(request).preview(request)}"))
        except ConfigError as error:
            problems += [evaluation_set_problem(text, name) for text in error.problems]
    if config.evaluation.tasks_every:
        with problems:
            require_lm_eval(config.evaluation)
    return DataPreview(rows, problems)


def _preview_sources(request: DataRequest) -> DataPreview:
    rows: dict[str, str] = {}
    problems: list[str] = []
    for name in request.data.sources_read:
        source = request.of_source(name)
        preview = _preview_source(source)
        rows |= {row if row in ("tokenizer", "warning") else f"data, {name}": text for row, text in preview.rows}
        problems += [f"data.mixture.{name}: {problem}" for problem in preview.problems]
    # The sources share their tokenizer.
    last = {name: rows.pop(name) for name in ("tokenizer", "warning") if name in rows}
    return DataPreview([*rows.items(), *last.items()], problems)


def _tokenizer_text(request: DataRequest, contents: DataContents, warnings: list[str]) -> str:
    vocabulary = request.vocab_size
    if request.data.tokenizer is not None:
        return _user_tokenizer_text(request, request.data.tokenizer, contents, warnings)
    if request.weights is not None:
        return f"that of the weights in {request.weights}"
    if contents in ("text", "conversations"):
        trained_special_tokens(vocabulary, pairs=request.in_pairs, chat=contents == "conversations")
        return f"byte-level BPE of {vocabulary:,} tokens if the text yields as many, {TRAINED_AT_START}"
    if contents == "text or tokens":
        return "where the data hold text, one is trained on them"
    # Pairs of shards have their special tokens; the samples of other tokens may need some.
    if contents == "tokens" and (problems := prepared_data.missing_tokenizer_problems(request, has_documents=True)):
        raise DataError(problems)
    return "none, as the data hold tokens"


def _user_tokenizer_text(request: DataRequest, name: str, contents: DataContents, warnings: list[str]) -> str:
    place = place_of_tokenizer(name)
    if not isinstance(place, Path) and (location := hub.find_on_hub(place)) != "cache":
        return f"{name}: {hub.FOUND[location]}"
    problems: list[str] = []
    manifests = data_format_of(request.data).manifests(request.data)
    tokenizer = prepared_data.tokenizer_of_tokens(request, manifests, problems)
    if tokenizer is None or problems:
        raise DataError(problems)
    note = "" if tokenizer.note is None else f"; {tokenizer.note}"
    if contents == "conversations":
        template = ChatTemplate.or_built_in(resolve_tokenizer(name, cached=True), name)
        note += f"; chat template: {template.name}"
    else:
        document_marks(request.data, tokenizer)
    unused = request.vocab_size - tokenizer.vocab_size
    # Loaded weights have the vocabulary that they have.
    if unused > _UNUSED * request.vocab_size and request.weights is None:
        warnings.append(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, so that {unused / request.vocab_size:.0%} of the rows "
            f"of model.vocab_size ({request.vocab_size:,}) are trained for nothing: set model.vocab_size="
            f"{tokenizer.vocab_size}, whose rows parallel.vocab_multiple pads"
        )
    return f"{name}: {tokenizer.vocab_size:,} tokens, of model.vocab_size ({request.vocab_size:,}){note}"


def inspect_data(path: str, samples: int, keys: Mapping[str, Any], packed_length: int | None = None) -> Inspection:
    """What `data inspect` tells of the data at a path, of any format.

    Args:
        packed_length: sequence length of the packed samples that are shown in place of documents; None for documents.

    Raises:
        DataError: there are no data at the path, or they are damaged.
    """
    place = user_path(path)
    folder = place.parent if place.suffix == ".arrow" else place
    if keys.get("format") != CHAT and dataset_tables.is_saved_data_set(folder):
        data = checked_data_section({"path": str(folder), **keys})
        record = data_format_named("datasets")
    else:
        data = checked_data_section({"path": path, **keys})
        record = data_format_of(data)
    if record.holds_tokens and (problems := prepared_data.document_mark_problems(data)):
        raise DataError(problems)
    if record.name in ("text", CHAT) and not place.exists():
        where = "" if place.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"PATH ({path}) does not exist{where}: name Megatron's PREFIX, HDF5 shards, an arrow folder or text"
        )
    if packed_length is not None and record.first_documents is None:
        raise DataError(
            f"--sequence-length must be left out with PATH ({path}): only of text and of Megatron's files packed "
            "samples are shown"
        )
    inspection = record.inspect(data, samples)
    if packed_length is None or record.first_documents is None:
        return inspection
    return inspections.inspection_with_packing(
        inspection, data.tokenizer, record.first_documents(data), packed_length, samples
    )
