"""Peak speeds of devices by the names that their drivers report: the denominator of MFU; and the shipped device files.

`shardwise_plan` reads the whole files, of which the peaks here are two figures.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.base.yaml_and_json import parse_yaml
from shardwise.config import DtypeName

DEVICE_FILES = Path(__file__).parent / "devices"
"""Folder of a YAML file for each device, whose figures are `{value: NUMBER, source: TEXT}`."""

_PEAKS = Path(__file__).parent / "peaks.yaml"
_SAME_SPEED = re.compile(r"NVIDIA|TESLA|GEFORCE|AMD|INSTINCT|VF|\d+GB?|HBM3E?")
"""Words that say nothing about the speed: makers, a whole GPU in a virtual machine, sizes and kinds of memory."""


def peak_flops(device_name: str, dtype: DtypeName) -> float | None:
    """Peak dense FLOP/s of one rank's device for matrix products in `dtype`; None if it is unknown.

    All words of the name must be known. One more may be a slower device: a slice of a GPU (MIG or vGPU), a card for
    laptops, or another form such as PCIe.
    """
    entry = _entry(device_name)
    name = entry.get("device")
    if name is None:
        tera = entry.get(dtype)
        return None if tera is None else float(tera) * 1e12
    figures = parse_yaml((DEVICE_FILES / f"{name}.yaml").read_text(encoding="utf-8"), name)
    peak = float(figures[f"{dtype}_tflops"]["value"]) * 1e12
    # The files of trn2 and trn3 have a logical core of two physical ones, as the runtime makes them by default.
    cores = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
    return peak / 2 if name in ("trn2", "trn3") and cores == "1" else peak


def devices_per_chip(device_name: str) -> int:
    """The devices on one chip, which has one price, by a name as `peak_flops` takes it; 1 for one that is a chip."""
    name = _entry(device_name).get("device")
    figures = parse_yaml((DEVICE_FILES / f"{name}.yaml").read_text(encoding="utf-8"), name) if name else {}
    return int(figures.get("devices_per_chip", {"value": 1})["value"])


def _entry(device_name: str) -> dict[str, Any]:
    words = re.findall(r"[A-Z0-9]+", device_name.upper())
    return _peaks().get(" ".join(word for word in words if not _SAME_SPEED.fullmatch(word)), {})


@cache
def _peaks() -> dict[str, dict[str, Any]]:
    peaks: dict[str, dict[str, Any]] = parse_yaml(_PEAKS.read_text(encoding="utf-8"), _PEAKS.name)
    return peaks
