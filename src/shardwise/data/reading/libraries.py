"""Libraries that only some formats need: extras of the package, imported where such data are read."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.errors import DataError


def optional_library(module: str, who_needs: str, extra: str) -> Any:
    """The imported module.

    Args:
        who_needs: the beginning of the message, such as "parquet files need".
        extra: the extra of this package that installs it.

    Raises:
        DataError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = module.partition(".")[0]
        raise DataError(f"{who_needs} {needed} ({error}): pip install 'shardwise[{extra}]'") from None
