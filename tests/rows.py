"""Rows of tests, in a YAML file beside them of the same name."""

from pathlib import Path
from typing import Any

import yaml


def rows_of(test: str) -> Any:
    """What the file beside `test`, its `__file__`, holds; strings, numbers, lists and mappings."""
    return yaml.safe_load(Path(test).with_suffix(".yaml").read_text(encoding="utf-8"))
