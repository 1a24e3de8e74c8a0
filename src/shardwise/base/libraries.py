"""Libraries that only some commands and formats need, and the messages of libraries."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.base.errors import DataError


def first_line(error: BaseException) -> str:
    """The first line of a library's message, without a period."""
    return str(error).partition("\n")[0].rstrip(".")


def optional_library(module: str, who_needs: str, extra: str) -> Any:
    """The imported module of a library that is no dependency.

    Args:
        who_needs: beginning of the message, such as "parquet files need".
        extra: extra of this package that installs the library.

    Raises:
        DataError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise DataError(f"{who_needs} {library} ({error}): pip install 'shardwise[{extra}]'") from None
