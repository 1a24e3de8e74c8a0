from collections.abc import Callable
from typing import Any

import pytest

from shardwise.base import units


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (
            units.count,
            {999: "999", 1_000: "1.0 k", 5_300_000: "5.3 M", 124_439_808: "124 M", 999_950: "1.0 M",
             999.4e12: "999 trillion", 3.2e23: "3.20e23", -1_500: "-1.5 k"},
        ),
        (units.size, {0: "0 B", 1023: "1023 B", 3 * 2**29: "1.5 GiB", 2**20 - 1: "1.0 MiB", 2**60: "1024 PiB"}),
        (
            units.duration,
            {0.0: "0 ms", 0.9999: "1.0 s", 59.96: "1 min 00 s", 245: "4 min 05 s", 3599.9: "1 h 00 min",
             3 * 86_400 + 4 * 3600: "3 d 04 h", -5: "-5.0 s"},
        ),
        (
            units.parse_size,
            {"5GB": 5 * 10**9, "2GiB": 2 * 2**30, "500 MB": 500 * 10**6, "1.5k": 1500, 400 * "9": None, "-1GB": None,
             "5 apples": None},
        ),
    ],
    ids=["count", "size", "duration", "parse_size"],
)  # fmt: skip
def test_texts(function: Callable[[Any], Any], texts: dict[Any, Any]) -> None:
    assert {value: function(value) for value in texts} == texts
