"""The record of a format: all that commands ask of it. Each module of a format has one, `FORMAT`.

A format is one module here and its name in `shardwise.config.data.DataFormatName`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shardwise.config import DataConfig
from shardwise.data.formats.common import Announce, PreparedData
from shardwise.data.formats.inspecting import FirstDocuments, Inspection
from shardwise.data.request import DataRequest

Contents = Literal["tokens", "masked pairs", "text", "text or tokens", "conversations"]
"""Kinds of samples: tokens in a row, sentence pairs whose tokens are masked already, text that becomes tokens, or
conversations whose answers are learned."""


class OpenData(Protocol):
    """Opens the data of a run; results that take long to make are kept in the cache `root`."""

    def __call__(self, request: DataRequest, root: Path, announce: Announce, *, any_size: bool) -> PreparedData: ...


@dataclass(frozen=True)
class DataFormat:
    """A format of data, as `data.format` names it. Each function raises a DataError with every problem of the data.

    Attributes:
        name: value of `data.format`; "text" stands for jsonl and parquet too.
        contents: kind of the samples.
        open_data: opens the data for a run.
        glance: describes the data to the user of a dry run in a moment. Of the network, only the hub is asked.
        inspect: describes the data, with the first samples, whose number is given.
        is_at: True if names at a path show that data of the format lie there. No file is opened; an OSError means that
            the system refuses the path.
        has_splits: True if the data may have splits with names.
        manifests: the files that may say which tokenizer made tokens; they need not be there.
        most_tokens: the number that the tokens of the data cannot exceed, in a moment; None if it takes longer, or if
            the number is above a limit, which is given.
        first_documents: the first documents, whose packed samples an inspection shows; None if it shows no samples of
            the model.
    """

    name: str
    contents: Contents
    open_data: OpenData
    glance: Callable[[DataRequest], str]
    inspect: Callable[[DataConfig, int], Inspection]
    is_at: Callable[[Path], bool] = lambda _path: False
    has_splits: bool = False
    manifests: Callable[[DataConfig], Sequence[Path]] = lambda _data: ()
    most_tokens: Callable[[DataRequest, int], int | None] = lambda _request, _limit: None
    first_documents: Callable[[DataConfig], FirstDocuments] | None = None

    @property
    def holds_tokens(self) -> bool:
        """True if the data are tokens in any case, which are read as they are."""
        return self.contents in ("tokens", "masked pairs")
