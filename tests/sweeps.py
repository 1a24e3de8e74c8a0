"""Sweeps of which `make test` runs a few cells, and `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *often: Any) -> list[Any]:
    """Parameters of all cases, a tuple of them several values; what is not among `often` is slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in often else pytest.mark.slow)
        for case in cases
    ]
