"""The price of devices for an hour, as `--price`, `log.price` and a device's file give it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.base.errors import ConfigError

_MOST_PRICE = 1e6
_FORM = r"(\d+(?:\.\d+)?)\s*([A-Za-z]{3})?(?:/(device|chip|node))?(?:/hour)?"


@dataclass(frozen=True)
class Price:
    """A price with its currency and unit: of a device, a chip of several devices, or a node, for an hour."""

    amount: float
    currency: str
    unit: str = "device"

    @staticmethod
    def of(text: str, named: str) -> Price:
        """Return the price that a text such as `40 USD/node` gives; a ConfigError calls the text `named`."""
        match = re.fullmatch(_FORM, text.strip())
        if match is None or float(match[1]) > _MOST_PRICE:
            raise ConfigError(
                f"{named} ({text}) must be a price of a device, a chip or a node for an hour, from 0 to "
                f"{_MOST_PRICE:,.0f}, with its currency, such as '2.50 USD/device' or '40 USD/node'"
            )
        if match[2] is None:
            raise ConfigError(f"{named} ({text}) must name its currency, as in '{text.strip()} USD'")
        return Price(float(match[1]), match[2].upper(), match[3] or "device")

    def __str__(self) -> str:
        return f"{self.amount:.10g} {self.currency}/{self.unit}"
