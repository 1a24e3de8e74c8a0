"""Writing device files: a figure on each line, each with its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.devices import Device
from shardwise.errors import ConfigError
from shardwise.files import reason_of


def described(device: Device, constants: Mapping[str, float], source: str) -> str:
    """The text of a device with other constants, which have this source; its own ones stay where none replaces them."""
    sources = dict(device.sources)

    def own(name: str, value: float) -> dict[str, Any]:
        return figure(value, sources.get(name, f"as in {device.key}"))

    kept = {name: own(f"constants.{name}", value) for name, value in device.constants if name not in constants}
    values: dict[str, Any] = {
        "name": device.name,
        "type": "accelerator" if device.is_accelerator else "cpu",
        "memory_gb": own("memory_gb", device.memory / 1e9),
        "memory_gb_per_second": own("memory_gb_per_second", device.memory_bandwidth / 1e9),
        "bfloat16_tflops": own("bfloat16_tflops", device.bfloat16 / 1e12),
        "float32_tflops": own("float32_tflops", device.float32 / 1e12),
        "matmul_share": own("matmul_share", device.matmul_share),
        "processors": {**own("processors", 0), "value": device.processors},
        "devices_per_node": {**own("devices_per_node", 0), "value": device.per_node},
    }
    for name, link in (("node_link", device.node), ("network", device.network)):
        values[name] = {
            "gb_per_second": own(f"{name}.gb_per_second", link.bandwidth / 1e9),
            "latency_us": own(f"{name}.latency_us", link.latency * 1e6),
            "topology": link.topology,
        }
    values["constants"] = kept | {name: figure(value, source) for name, value in constants.items()}
    return dump(values)


def figure(value: float, source: str) -> dict[str, Any]:
    """A figure to four digits, with its source."""
    return {"value": float(f"{value:.4g}"), "source": source}


def dump(values: Mapping[str, Any]) -> str:
    """The values as a device file: a figure on each line."""
    lines = ["# Written by shardwise. Rates are those of one rank and one direction; GB are 10^9 bytes."]
    for key, value in values.items():
        if isinstance(value, Mapping) and "value" not in value:
            lines += [f"{key}:", *(f"  {inner}: {_inline(one)}" for inner, one in value.items())]
        else:
            lines.append(f"{key}: {_inline(value)}")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        number = repr(value["value"])
        if "e" in number and "." not in number:
            number = number.replace("e", ".0e")  # YAML takes 2e-05 for a text
        return f"{{value: {number}, source: {_quoted(value['source'])}}}"
    return _quoted(value)


def _quoted(text: Any) -> str:
    return json.dumps(str(text), ensure_ascii=False)


def require_suffix(path: Path, option: str) -> None:
    """Refuse a name by which `--device` would not know a file.

    Raises:
        ConfigError: it has another ending than .yaml.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option} ({path}) must end in .yaml, by which --device knows a file")


def write_new(path: Path, text: str, option: str) -> None:
    """Write a file that is not there yet.

    Raises:
        ConfigError: it is there, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{option} {path}: the file exists already; choose another name or remove it") from None
    except OSError as error:
        raise ConfigError(f"{option} {path}: {reason_of(error)}") from None
