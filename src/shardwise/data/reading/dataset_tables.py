"""Data sets of the library `datasets`: a folder that its `save_to_disk` wrote, or a name on the Hugging Face hub.

A data set is an arrow table for each of its splits, mapped into memory. One column is read: text, or lists of token
ids. The library fetches data sets of the hub; it takes seconds to import, so only if the cache lacks the tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shardwise.base import hub
from shardwise.base.errors import ConfigError, DataError, first_line, listing, nearest_name, see
from shardwise.base.files import name_problem, user_path
from shardwise.base.registered import optional_library
from shardwise.base.yaml_and_json import json_value
from shardwise.config import BUILT_IN_TEXTS, CHAT, DataConfig
from shardwise.data.reading.content import read_errors
from shardwise.data.reading.jsonl_parquet import (
    TOKENS,
    batch_records,
    column_kind,
    require_sound_array,
    with_nested_column,
)

if TYPE_CHECKING:
    from shardwise.data.reading.token_rows import TokenRows

_STATE = "state.json"
_INFO = "dataset_info.json"
_SPLITS = "dataset_dict.json"
# Rows that are mapped at once.
_ROWS = 1000
# The name of the only split of a data set whose splits have no names.
_UNNAMED = ""
_T = TypeVar("_T")
_CONVERTED = "refs/convert/parquet"  # the branch of a data set's repository to which the hub converts its data
_NEEDED = "data sets of the hub need the library"
# Beginnings of the library's messages about a configuration that is not there, or that must be chosen.
_NO_CONFIG = ("BuilderConfig ", "Config name is missing")


@dataclass(frozen=True)
class _SavedTables:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

    path: Path

    @property
    def stamp(self) -> list[Any]:
        """Facts that change when the tables do, found without the library: its fingerprints, sizes and times."""
        stamp = []
        for folder in self._folders().values():
            facts: list[Any] = [str(folder.absolute()), _json(folder / _STATE).get("_fingerprint")]
            for path in self._files(folder):
                with read_errors(path):
                    status = path.stat()
                facts.append([path.name, status.st_size, status.st_mtime_ns])
            stamp.append(facts)
        return stamp

    def load(self) -> Mapping[str, Any]:
        """The table of each split, by its name, `_UNNAMED` if there are no splits; DataError if one is damaged."""
        tables = {}
        for name, folder in self._folders().items():
            files = self._files(folder)
            if not files:
                raise DataError(f"{folder} is a data set without rows: save one that has some")
            tables[name] = open_arrow_table(files)
        return tables

    def files(self) -> Mapping[str, list[str]]:
        """The files of each split, in their order."""
        return {
            name: [str(path.absolute()) for path in self._files(folder)] for name, folder in self._folders().items()
        }

    def _folders(self) -> dict[str, Path]:
        if (self.path / _SPLITS).is_file():
            return {name: self.path / name for name in self._names(self.path / _SPLITS, "splits")}
        if (self.path / _STATE).is_file():
            return {_UNNAMED: self.path}
        raise DataError(
            f"data.path ({self.path}) must be a folder that save_to_disk wrote (data.format=datasets), and it has "
            f"neither {_STATE} nor {_SPLITS}"
        )

    def _files(self, folder: Path) -> list[Path]:
        return [folder / name for name in self._names(folder / _STATE, "_data_files")]

    def _names(self, record: Path, key: str) -> list[str]:
        values = _json(record).get(key)
        if not isinstance(values, list) or (not values and key == "splits"):
            raise DataError(f"{record} must list the data set's {key.removeprefix('_data_')}: save it again")
        names: list[Any] = [value.get("filename") if isinstance(value, dict) else value for value in values]
        for problem in filter(None, map(name_problem, names)):
            raise DataError(f"{record} must name what lies in its own folder: {problem}")
        return names


@dataclass(frozen=True)
class _HubTables:
    """A configuration of a repository on the hub, at a commit."""

    repository: str
    config: str | None  # name of the configuration; None if the repository has one alone
    folder: Path
    converted: bool = False  # True if the commit is one of the hub's conversion, which has CONFIG/SPLIT/NUMBER.parquet

    @property
    def stamp(self) -> list[Any]:
        return ["hub", self.repository, self.folder.name, self.config]

    def load(self) -> Mapping[str, Any]:
        builder = self._builder(_datasets_library())
        if not Path(builder.cache_dir, "dataset_info.json").is_file():
            # The library makes its tables of the files in the hub's cache, whatever became of these.
            hub.drop_damaged_files(self.folder)
        try:
            builder.download_and_prepare()
        except Exception as error:  # noqa: BLE001  of the library's formats and of the hub's client: any
            raise self._refusal(error) from None
        try:
            tables: dict[str, Any] = {name: rows.data.table for name, rows in builder.as_dataset().items()}
            is_whole = all(len(table) == builder.info.splits[name].num_examples for name, table in tables.items())
        except Exception:  # noqa: BLE001  as above
            is_whole = False
        if not is_whole:
            raise DataError(f"the cache of datasets ({builder.cache_dir}) is damaged: remove this folder")
        return tables

    def files(self) -> Mapping[str, list[str]]:
        """The addresses (hf://…) of each split's files."""
        files = self._builder(_datasets_library()).config.data_files or {}
        return {str(name): list(addresses) for name, addresses in files.items()}

    def _builder(self, datasets: Any) -> Any:
        place = f"hf://datasets/{self.repository}"
        selection: dict[str, Any] = {"name": self.config}
        if self.converted:
            selection = {"data_files": self._converted_files()}
        try:
            builder = datasets.load_dataset_builder(place, **selection, revision=self.folder.name)
        except Exception as error:  # noqa: BLE001  as above
            names = []
            if str(error).startswith(_NO_CONFIG):
                with contextlib.suppress(Exception):
                    names = datasets.get_dataset_config_names(place, revision=self.folder.name)
            if not names:
                raise self._refusal(error) from None
            raise self._no_config(names) from None
        # Without access to the hub the library takes any commit that it has.
        if builder.hash != self.folder.name:
            raise DataError(
                f"data.dataset ({self.repository}) cannot be fetched at commit {self.folder.name}: there is no access "
                f"to the hub, and the cache of datasets has commit {builder.hash}"
            )
        self._require_own_files(f"{place}@{self.folder.name}/", builder.config.data_files or {})
        return builder

    def _converted_files(self) -> dict[str, str]:
        from huggingface_hub import HfApi

        try:
            names = HfApi().list_repo_files(self.repository, revision=self.folder.name, repo_type="dataset")
        except Exception as error:  # noqa: BLE001  as above
            raise self._refusal(error) from None
        by_config: dict[str, dict[str, str]] = {}
        for name in names:
            if name.count("/") == 2:
                config, split, _ = name.split("/")
                by_config.setdefault(config, {})[split] = f"{config}/{split}/*.parquet"
        if self.config in by_config:
            files = by_config[self.config]
        elif self.config is None and len(by_config) == 1:
            files = next(iter(by_config.values()))
        else:
            raise self._no_config(by_config)
        if partial := [split for split in files if split.startswith("partial-")]:
            raise DataError(
                f"data.dataset ({self.repository}) is a loading script, of whose data the hub has converted only the "
                f"beginning ({listing(partial)}): set data.path to a copy of its data"
                f"{see('data#loading-script')}"
            )
        return files

    def _no_config(self, names: Iterable[str]) -> DataError:
        key = f"data.config ({self.config})" if self.config else "data.config"
        return DataError(f"{key} must name a configuration of {self.repository}: {listing(names, 'or')}")

    def _require_own_files(self, place: str, data_files: Mapping[Any, list[str]]) -> None:
        """Raises DataError if the card names files elsewhere or of this machine, which old releases would read."""
        # The library reads any address that a card names, files of this machine too: only those of the repository pass.
        for address in [str(address) for addresses in data_files.values() for address in addresses]:
            *members, archive = address.split("::")  # a member of an archive is zip://MEMBER::ARCHIVE
            before, _, name = archive.partition(place)
            names = [*(member.partition("://")[2] for member in members), name]
            if before or any(name_problem(name, nested=True) for name in names):
                raise DataError(
                    f"the files of data.dataset ({self.repository}) must lie in its repository, and its card names "
                    f"{address}: set data.path to a copy of the files that you trust"
                )

    def _refusal(self, error: Exception) -> DataError:
        cause = error.__cause__ or error
        return DataError(
            f"data.dataset ({self.repository}) cannot be loaded at commit {self.folder.name}: {type(cause).__name__}: "
            f"{first_line(cause)}"
        )


@dataclass(frozen=True)
class DataSet:
    """A data set of the library `datasets`: a column of the splits that `data` names; `tables` are opened late."""

    data: DataConfig
    tables: _SavedTables | _HubTables

    @classmethod
    def open(cls, data: DataConfig) -> Self:
        """The data set that the `data` section names; on the hub, at the commit that `fetch_dataset` found."""
        if data.path is not None:
            return cls(data, _SavedTables(user_path(data.path)))
        try:
            return cls(data, _on_hub(data, cached=True))
        except ConfigError as error:
            raise DataError(error.problems) from None

    @property
    def name(self) -> str:
        if not self.data.config:
            return self.data.name
        return f"{self.data.name} {self.data.config}"

    @property
    def shown(self) -> str:
        """The name with its key, for messages."""
        return f"{self.data.key} ({self.name})"

    def stamp(self) -> str:
        """A digest that changes when the column may have changed, found without opening the data set."""
        identity = ["datasets", self.tables.stamp, list(self.data.split_names), self.data.text_key]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    @cached_property
    def _splits(self) -> Mapping[str, Any]:
        key = self.data.text_key
        return {name: with_nested_column(table, key) for name, table in self._chosen(self.tables.load()).items()}

    def files_by_split(self) -> dict[str, list[str]]:
        """The files of the splits that are read, which are not opened; DataError if there is no such split."""
        return self._chosen(self.tables.files())

    def _chosen(self, by_split: Mapping[str, _T]) -> dict[str, _T]:
        named = self.data.split_names
        names = [name for name in by_split if name != _UNNAMED]
        if named:
            if not set(named) <= set(names):
                has = f"it has {listing(names)}" if names else "it has none with names: give weights, such as 95,5"
                raise DataError(f"data.split ({self.data.split}) must name splits of {self.shown}: {has}")
            return {name: by_split[name] for name in named}
        if "train" in by_split:
            return {"train": by_split["train"]}
        if len(by_split) == 1:
            return dict(by_split)
        raise DataError(
            f"data.split ({self.data.split}) must name the splits of {self.shown} to read, it has {listing(names)}: "
            f"such as data.split={','.join(names[:2])}"
        )

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that are read; each is a part if `data.split` names them."""
        return tuple(self._splits)

    @cached_property
    def column(self) -> str:
        """The column that is read: `data.text_key`, or token ids if there is no text; DataError without either."""
        columns = next(iter(self._splits.values())).column_names
        for name in (self.data.text_key, TOKENS):
            if name in columns and (name == self.data.text_key or self.data.text_key == "text"):
                return name
        raise DataError(
            f"{self.shown} has no column {self.data.text_key!r}: set data.text_key to the column that holds the text "
            f"or the tokens ({listing(columns) or 'there is none'})"
            f"{see('data#no-such-field')}"
        )

    @cached_property
    def holds_tokens(self) -> bool:
        """True if the column holds token ids, False if text; DataError if neither, or not the same in all splits."""
        kinds: dict[str, list[str]] = {}
        for name, table in self._splits.items():
            if self.column not in table.column_names:
                raise DataError(f"{self.shown} has no column {self.column!r} in its split {name} (data.text_key)")
            kinds.setdefault(column_kind(table.schema.field(self.column).type), []).append(name)
        if len(kinds) == 1 and kinds.keys() <= {"text", "tokens"}:
            return "tokens" in kinds
        described = [kind if names == [_UNNAMED] else f"{kind} in {listing(names)}" for kind, names in kinds.items()]
        raise DataError(
            f"the column {self.column!r} of {self.shown} must hold text in all splits, or lists of integers in all, "
            f"and it holds {listing(described)} (data.text_key)"
        )

    def rows(self, split: str) -> Iterator[TokenRows]:
        """Rows of token ids, many at once; DataError if one is null."""
        from shardwise.data.reading.token_rows import TokenRows

        number = 0
        for array in self.arrays(split):
            yield TokenRows.of_arrow(array, self.where(split), number, self.column)
            number += len(array)

    @property
    def num_rows(self) -> int:
        """The rows of the splits that are read."""
        return sum(map(len, self._splits.values()))

    def where(self, split: str) -> str:
        """The beginning of messages about a row of a split."""
        if split == _UNNAMED:
            return self.shown
        return f"{self.shown}, split {split}"

    def column_names(self, split: str) -> list[str]:
        """The names of a split's columns."""
        names: list[str] = self._splits[split].column_names
        return names

    def records(self, split: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows of a split, of which these columns are read."""
        for batch in self._batches(split, columns):
            yield from batch_records(batch)

    def arrays(self, split: str) -> Iterator[Any]:
        """The values of the column: arrow arrays of many rows each."""
        for batch in self._batches(split, [self.column]):
            yield batch.column(self.column)

    def _batches(self, split: str, columns: Sequence[str]) -> Iterator[Any]:
        row = 0
        for batch in self._splits[split].select(columns).to_batches(max_chunksize=_ROWS):
            for name in columns:
                where = f"{self.where(split)}: rows {row} to {row + batch.num_rows - 1}"
                require_sound_array(batch.column(name), where, name)
            yield batch
            row += batch.num_rows


def is_saved_data_set(path: Path) -> bool:
    """True if `path` is a folder that `save_to_disk` wrote."""
    return (path / _SPLITS).is_file() or all((path / name).is_file() for name in (_STATE, _INFO))


def names_data_set(data: DataConfig) -> bool:
    """True if the `data` section names a data set of the library: on the hub, by `data.format` or by its files."""
    if data.path is None:
        return data.is_hub_dataset
    if data.format not in ("auto", CHAT):
        return data.format == "datasets"
    with contextlib.suppress(OSError):  # opening the path as text will report it
        return is_saved_data_set(user_path(data.path))
    return False


def fetch_dataset(data: DataConfig, announce: Callable[[str], None] | None) -> None:
    """Stores the commit of each data set of the hub, for all processes; ConfigError where one is not accessible."""
    for name in data.sources_read:
        fetch_dataset(data.source_section(name), announce)
    if data.is_hub_dataset:
        require_datasets_library(data)
        _on_hub(data, announce=announce)


def _on_hub(data: DataConfig, *, cached: bool = False, announce: Callable[[str], None] | None = None) -> _HubTables:
    """The repository that `data.dataset` names; of a loading script, the hub's conversion of its data."""
    files = place_of_dataset(data.name, BUILT_IN_TEXTS)
    folder = hub.fetch_or_open(files, cached=cached, announce=announce)
    key = f"data.dataset ({data.name})"
    converted = files.revision == _CONVERTED
    has_loading_script = (folder / files.patterns[-1]).exists()
    if has_loading_script:
        if files.revision is not None:
            raise ConfigError(
                f"{key} is a loading script, and the hub converts that of the main branch alone: leave out "
                f"@{files.revision}"
            )
        if announce is not None:
            announce(
                f"{data.name} is a loading script, which is not run: reading the hub's parquet files of it "
                f"({_CONVERTED})"
            )
        lacks = (
            f"{key} is a loading script, which is not run, and the hub has no parquet files of it ({_CONVERTED}): set "
            "data.path to a copy of its data"
        )
        files = replace(files, revision=_CONVERTED, no_revision=lacks)
        folder = hub.fetch_or_open(files, cached=cached, announce=announce)
        converted = True
    return _HubTables(files.repository, data.config, folder, converted)


def require_datasets_library(data: DataConfig) -> None:
    """Raises ConfigError if the library `datasets` is not installed; it is not imported."""
    if importlib.util.find_spec("datasets") is None:
        message = f"{_NEEDED} datasets, which is not installed: pip install 'shardwise[datasets]'"
        if data.is_hub_dataset and (near := nearest_name(data.name, BUILT_IN_TEXTS)):
            message += f"; did you mean data.dataset={near}?"
        raise ConfigError(message)


def _datasets_library() -> Any:
    """The module `datasets`, made quiet; it takes seconds to import. DataError if it is not installed."""
    datasets = optional_library("datasets", _NEEDED, "datasets")
    if not sys.stderr.isatty():  # in a log, a bar is a line for each of its states
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.ERROR)
    return datasets


def _json(path: Path) -> dict[str, Any]:
    with read_errors(path):
        content = path.read_bytes()
    try:
        values = json_value(content)
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}): save the data set again") from None
    return values if isinstance(values, dict) else {}


def open_arrow_table(paths: Sequence[Path]) -> Any:
    """The arrow table in files that `datasets` wrote, mapped into memory; DataError if one cannot be read."""
    arrow = optional_library("pyarrow", "arrow files need", "parquet")
    tables = []
    for path in paths:
        try:
            tables.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
        except (OSError, arrow.ArrowException) as error:
            raise DataError(
                f"{path} is cut off or damaged ({first_line(error)}): copy or save the data set again"
            ) from None
    return arrow.concat_tables(tables)


def place_of_dataset(named: str, built_in: Iterable[str]) -> hub.HubFiles:
    """The files that `data.dataset` names on the hub; no request is sent. Raises ConfigError if it is no hub id."""
    key = f"data.dataset ({named})"
    repository, revision = hub.split_revision(named, key)
    near = nearest_name(repository, built_in)
    hint = f"; did you mean data.dataset={near}?" if near else ""
    must = f"{key} must be {listing(built_in, 'or')} or a hub id"
    if "/" in named and user_path(named).exists():
        raise ConfigError(f"{must}, it is a path: set data.path={named}")
    if not hub.HUB_ID.fullmatch(repository):
        raise ConfigError(f"{must}, and a path is named by data.path: {hub.HUB_ID_RULE}{hint}")
    # The card and the list of large files name the configurations; the last is its loading script, if it has one.
    patterns = ("README.md", ".gitattributes", f"{repository.rpartition('/')[2]}.py")
    return hub.HubFiles("data.dataset", repository, revision, patterns, repo_type="dataset", hint=hint, verified=True)
