"""Numbers as texts, and texts as numbers."""

import pytest

from shardwise.base import units
from tests.rows import rows_of

ROWS = rows_of(__file__)


@pytest.mark.parametrize("function", ROWS)
def test_texts(function: str) -> None:
    assert {value: getattr(units, function)(value) for value in ROWS[function]} == ROWS[function]
    assert units.parse_size(400 * "9") is None
