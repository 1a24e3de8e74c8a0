"""Devices as data: what a cluster that is not here can do, from a YAML file for each device, without torch.

A figure is `{value: NUMBER, source: TEXT}`, or in a user's own file a plain number. Rates are those of one device in
one direction; GB are 10^9 bytes. A user's file with `base: h100` takes all other figures from that device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from shardwise.base import units
from shardwise.base.errors import ConfigError, listing, nearest_name
from shardwise.base.files import read_plain
from shardwise.base.hardware import torch_type
from shardwise.base.prices import Price
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.config import DtypeName, Matmul
from shardwise.estimates.device_peaks import DEVICE_FILES

_ALIASES = {"a100": "a100-80gb"}
_SUFFIXES = (".yaml", ".yml")
MOST_FAILURES = 1e4


@dataclass(frozen=True)
class _Figure:
    """A number of a device file.

    least, most: range that a device can have.
    """

    place: str  # field of `Device`, or of its `node`, `network`, `reliability` or `constants`
    least: float
    most: float
    unit: float = 1  # one of the file in the unit of the field
    is_whole: bool = False  # True for a whole number
    is_needed: bool = False  # False if a file may leave it out

    def allows(self, value: Any) -> bool:
        """Return whether a device can have this value."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.least <= value <= self.most


CONSTANTS: dict[str, tuple[float, float]] = {
    "matmul": (0.01, 10), "depth": (0, 1e5), "memory": (0.001, 10), "fused_attention": (1e-4, 10), "host": (0, 0.1),
    "step": (0, 10), "wait": (0, 10), "node": (1e-3, 10), "network": (1e-3, 10), "update": (1e-3, 10),
    "overlap": (0, 1), "action": (0, 1),
}  # fmt: skip
"""The constants that a file may give in place of the fitted `device_seconds.DeviceConstants`, with their ranges."""
FIGURES: dict[str, _Figure] = {
    "memory_gb": _Figure("memory", 0.1, 10_000, 1e9, is_needed=True),
    "memory_gb_per_second": _Figure("memory_bandwidth", 0.1, 100_000, 1e9, is_needed=True),
    "bfloat16_tflops": _Figure("bfloat16", 1e-4, 100_000, 1e12, is_needed=True),
    "float32_tflops": _Figure("float32", 1e-4, 100_000, 1e12, is_needed=True),
    "matmul_share": _Figure("matmul_share", 0.01, 1, is_needed=True),
    "processors": _Figure("processors", 1, 100_000, is_whole=True, is_needed=True),
    "devices_per_node": _Figure("per_node", 1, 100_000, is_whole=True, is_needed=True),
    "node_link.gb_per_second": _Figure("node.bandwidth", 1e-3, 100_000, 1e9, is_needed=True),
    "node_link.latency_us": _Figure("node.latency", 0, 1e6, 1e-6, is_needed=True),
    "network.gb_per_second": _Figure("network.bandwidth", 1e-3, 100_000, 1e9),
    "network.latency_us": _Figure("network.latency", 0, 1e6, 1e-6),
    "fp8_tflops": _Figure("fp8", 1e-4, 100_000, 1e12),
    "fp8_matmul_share": _Figure("fp8_matmul_share", 0.01, 1),
    "mxfp8_matmul_share": _Figure("mxfp8_matmul_share", 0.01, 1),
    "fp8_backward_share": _Figure("fp8_backward_share", 0.01, 1),
    "devices_per_chip": _Figure("per_chip", 1, 1000, is_whole=True),
    "watts": _Figure("watts", 0, 100_000),
    "failures_per_year": _Figure("reliability.failures_per_year", 0, MOST_FAILURES),
    "restart_seconds": _Figure("reliability.restart", 0, 100_000),
    "storage_gb_per_second": _Figure("reliability.storage", 1e-6, 100_000, 1e9),
    "compared_runs": _Figure("compared_runs", 0, 1e6, is_whole=True),
    "compared_error": _Figure("compared_error", 0, 0.99),
    **{f"constants.{name}": _Figure(f"constants.{name}", *limits) for name, limits in CONSTANTS.items()},
}
"""All numbers of a device file, those of a link and the constants with its name before."""
_PRICE = "price_per_hour"
_TEXTS = ("name", "node_link.topology")
_NETWORK = ("network.gb_per_second", "network.latency_us", "network.topology")
_LINKS = ("node_link", "network")
_OTHER_KEYS = ("type", "accuracy", _PRICE)
_COMPARED = ("accuracy", "compared_runs", "compared_error")
_BESIDE_STEPS = {
    "name", _PRICE, "devices_per_chip", "watts", "failures_per_year", "restart_seconds", "storage_gb_per_second",
    *_COMPARED,
}  # fmt: skip
"""Keys of a file with which a step takes as long as on its base."""
_CUDA = torch_type("nvidia")
_TYPES = ("cpu", _CUDA, "accelerator")


@dataclass(frozen=True)
class Reliability:
    """The assumed failures of a planned cluster, and what a failure and a checkpoint cost.

    The defaults are assumptions. Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100
    (arXiv:2407.21783, section 3.3.4), which is 0.17 for each device and year; OPT-175B had about 105 restarts in two
    months on 992 A100 (arXiv:2205.01068, section 2.5), which is 0.6. MegaScale finds and diagnoses a fault in less than
    10 minutes on average, and has repeated the work since its last checkpoint within 15 (arXiv:2402.15627, section
    6.3).
    """

    # Failures of one device, with its part of the machine and the network, that end the run.
    failures_per_year: float = 0.17
    restart: float = 900.0  # seconds until the run trains again after a failure, without reading its checkpoint
    storage: float = 2e9  # bytes a second that one node writes to, or reads from, the store of checkpoints

    def text(self) -> str:
        """Return the assumptions as a sentence's parts."""
        return (
            f"{self.failures_per_year:g} failures for each device and year, {units.duration(self.restart)} for a "
            f"restart, and {self.storage / 1e9:g} GB/s from each node to the store of checkpoints"
        )


@dataclass(frozen=True)
class DeviceLink:
    """The specs of a device's link to another one: bandwidth, latency and topology."""

    bandwidth: float  # bytes a second in one direction
    latency: float  # seconds before the first byte
    topology: str  # the way in which devices are linked, in words


@dataclass(frozen=True)
class Device:
    """The figures of a device to plan for, with which one rank computes."""

    key: str  # name that the user gave
    name: str  # name that is shown
    memory: float  # bytes
    memory_bandwidth: float  # bytes a second
    bfloat16: float  # FLOP/s of matrix products in bfloat16, without sparsity
    float32: float  # FLOP/s of matrix products in float32
    matmul_share: float  # part of the peak that the largest matrix products reach
    processors: int  # number of units that each take a tile of a matrix product
    per_node: int  # number of devices of a machine, which `node` links; `network` links the machines
    node: DeviceLink  # link to a device of the same machine
    network: DeviceLink | None  # link to a device of another machine; None if its rate is unknown
    # What its file says, by the keys of `FIGURES`.
    figures: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    is_accelerator: bool = True  # True if it computes while the host goes on; a rank on a CPU does one after the other
    # True if it is a CUDA device, one kernel of which multiplies bfloat16 matrices and adds the product to a float32
    # one.
    is_cuda: bool = False
    # Constants of `device_seconds.DeviceConstants` that were measured on this device.
    constants: tuple[tuple[str, float], ...] = ()
    price: Price | None = None  # price for an hour; None if it is unknown
    per_chip: int = 1  # number of devices of a chip, which has one price
    watts: float | None = None  # power of one device under load, without its host; None if it is unknown
    reliability: Reliability = Reliability()  # failures, and what they and checkpoints cost
    accuracy: str = ""  # how far predictions were from measured steps on this device; empty if none was measured
    compared_runs: int = 0  # number of published runs on this device that were compared with their predictions
    # Relative error that nine in ten of the compared runs do not exceed; 0: that of all devices counts.
    compared_error: float = 0.0
    fp8: float | None = None  # FLOP/s of matrix products in fp8, without sparsity; None if the device has none
    fp8_matmul_share: float | None = None  # part of the peak in fp8 that the largest products reach
    mxfp8_matmul_share: float | None = None  # likewise, where each 32 numbers have a scale
    # Part of the rate in fp8 that products of the backward pass reach, which add with all bits.
    fp8_backward_share: float = 1.0

    def peak(self, dtype: DtypeName) -> float:
        """FLOP/s of matrix products without sparsity."""
        return self.bfloat16 if dtype == "bfloat16" else self.float32

    @property
    def file_text(self) -> str:
        """The change of a file that gives the device another figure; the figure follows."""
        if self.key in device_names():
            return f"write a device file with base: {self.key} and"
        return "add to its device file"

    def require_fp8(self) -> float:
        """Return the FLOP/s of products in fp8; ConfigError: the device has none."""
        if self.fp8 is None:
            raise ConfigError(
                f"precision.matmul (fp8) must be left out on {self.name}, whose device file has no fp8_tflops: "
                "shardwise multiplies in fp8 on NVIDIA GPUs of compute capability 8.9 or higher and on CPUs"
            )
        return self.fp8

    def require_network(self) -> DeviceLink:
        """Return the link to a device of another machine; ConfigError: its rate is unknown."""
        if self.network is None:
            raise ConfigError(
                f"network.gb_per_second of {self.name} (unknown) must be given for several nodes: {self.file_text} "
                "network: {gb_per_second: …, latency_us: …, topology: rail}"
            )
        return self.network

    def matmul_peak(self, dtype: DtypeName, matmul: Matmul | None, *, block_scales: bool = False) -> float:
        """Return the FLOP/s of which products of weights reach `matmul_share`.

        ConfigError: the products are in fp8, and the device has none.
        """
        if matmul is None:
            return self.peak(dtype)
        share = self.mxfp8_matmul_share if block_scales else self.fp8_matmul_share
        if share is None:
            return self.require_fp8()
        return self.require_fp8() * share / self.matmul_share


@dataclass(frozen=True)
class Cluster:
    device: Device
    nodes: int
    per_node: int

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def priced_units(self) -> int:
        """Number of devices, chips or nodes, whichever the price is of; a chip in use is paid as a whole."""
        unit = "device" if self.device.price is None else self.device.price.unit
        chips = self.nodes * -(-self.per_node // self.device.per_chip)
        return {"device": self.world, "chip": chips, "node": self.nodes}[unit]

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices for an hour; None if it is unknown."""
        return None if self.device.price is None else self.device.price.amount * self.priced_units

    def __str__(self) -> str:
        machines = f"{self.nodes:,} node{'s' * (self.nodes > 1)}"
        return f"{self.world:,} × {self.device.name} ({machines} × {self.per_node})"


def device_names() -> list[str]:
    """The names of the devices whose files the planner has."""
    return sorted(path.stem for path in DEVICE_FILES.glob("*.yaml"))


def parse_cluster(text: str, nodes: int = 1) -> Cluster:
    """The cluster that `--device NAME[:N]` and `--nodes` name: N devices on each node, by default a whole machine's."""
    match = re.fullmatch(r"(.+?)(?::(\d{1,9}))?", text)
    if match is None:
        known = listing(device_names())
        raise ConfigError(f"--device must name a device, such as h100:8, or a YAML file; known are {known}")
    device = load_device(match[1])
    per_node = int(match[2]) if match[2] else device.per_node
    if per_node < 1 or nodes < 1:
        raise ConfigError(f"--device {text} and --nodes ({nodes}) must name at least one device")
    if nodes > 1:
        device.require_network()
    return Cluster(device, nodes, per_node)


def pipeline_warnings(device: str, pipeline: int) -> list[tuple[str, str]]:
    """A warning of a plan if devices of that name, or SLURM's resources such as `neuron:16`, may refuse pipelines."""
    if pipeline == 1 or not re.search(r"neuron|trainium|\btrn\d", device, re.IGNORECASE):
        return []
    text = (
        f"parallel.pipeline ({pipeline}) is refused by TorchNeuron's copy of April 2026, which sends no messages from "
        "rank to rank; documents of Neuron 2.33 claim pipelines (docs/devices.md#trainium)"
    )
    return [("warning", text)]


def load_device(name: str) -> Device:
    """The planner's device of that name, or of that YAML file.

    ConfigError: there is no such device or file, or the file is wrong.
    """
    path = Path(name)
    if path.suffix in _SUFFIXES:
        try:
            text = read_plain(path).decode()
        except OSError as error:
            raise ConfigError(f"--device {name}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--device {name} must be a text file in UTF-8") from None
        return parse_device(path.stem, text, name)
    return _shipped(_shipped_key(name))


def shipped_device_text(name: str) -> str:
    """The file of a device of that name, as it is shipped; ConfigError: there is no such device."""
    return (DEVICE_FILES / f"{_shipped_key(name)}.yaml").read_text(encoding="utf-8")


def _shipped_key(name: str) -> str:
    key = _ALIASES.get(name.lower(), name.lower())
    names = device_names()
    if key not in names:
        near = nearest_name(key, names, cutoff=0.3)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"unknown device {name!r}: {hint}devices are {listing(names)}, and with :8 there are 8 of them on a node; "
            "a file with the figures of your own ends with .yaml"
        )
    return key


@cache
def _shipped(key: str) -> Device:
    return parse_device(key, shipped_device_text(key), f"{key}.yaml")


def parse_device(device_key: str, text: str, where: str) -> Device:
    """Return the device that a YAML text describes; `where` names the text in errors.

    ConfigError: it is no YAML; or with every figure that is missing, unknown or impossible.
    """
    flat = _with_base(_flat(text, where), device_key, where)
    has_network = any(key in flat for key in _NETWORK)
    needed = [key for key, figure in FIGURES.items() if figure.is_needed]
    needed += [*_TEXTS, *(_NETWORK if has_network else ())]
    known = {*FIGURES, *_TEXTS, *_NETWORK, *_OTHER_KEYS, *_LINKS}
    link = "must be a mapping with gb_per_second, latency_us and topology"
    problems = [f"{where}: {key} ({flat[key]}) {link}" for key in _LINKS if key in flat]
    problems += [f"{where}: {key} is no figure of a device: leave it out" for key in flat if key not in known]
    problems += [f"{where}: {key} is missing" for key in needed if key not in flat]
    kind = flat.get("type", "accelerator")
    problems += [] if kind in _TYPES else [f"{where}: type ({kind}) must be {listing(_TYPES, 'or')}"]
    fields: dict[str, dict[str, Any]] = {owner: {} for owner in ("", "node", "network", "constants", "reliability")}
    for key, figure in FIGURES.items():
        if key not in flat:
            continue
        value = _value(flat[key])
        if figure.allows(value):
            owner, _, name = figure.place.rpartition(".")
            fields[owner][name] = value * figure.unit
        else:
            number = "whole number" if figure.is_whole else "number"
            problems.append(f"{where}: {key} ({value}) must be a {number} from {figure.least:g} to {figure.most:,g}")
    if _PRICE in flat:
        try:
            fields[""]["price"] = Price.of(str(_value(flat[_PRICE])), f"{where}: {_PRICE}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Device(
        key=device_key,
        name=str(flat["name"]),
        **fields[""],
        node=DeviceLink(**fields["node"], topology=str(flat["node_link.topology"])),
        network=DeviceLink(**fields["network"], topology=str(flat["network.topology"])) if has_network else None,
        figures=flat,
        is_accelerator=kind != "cpu",
        is_cuda=kind == _CUDA,
        constants=tuple(fields["constants"].items()),
        reliability=Reliability(**fields["reliability"]),
        accuracy=str(flat.get("accuracy", "")),
    )


def _value(entry: Any) -> Any:
    return entry.get("value") if isinstance(entry, dict) else entry


def _with_base(flat: dict[str, Any], device_key: str, where: str) -> dict[str, Any]:
    """The figures of a file, with those of the shipped device that its `base` names where the file has none."""
    if "base" not in flat:
        return flat
    changes = {key: value for key, value in flat.items() if key != "base"}
    name = str(flat["base"])
    try:
        base = _with_base(_flat(shipped_device_text(name), name), name, name)
    except ConfigError as error:
        raise ConfigError([f"{where}: base: {problem}" for problem in error.problems]) from None
    if not changes.keys() <= _BESIDE_STEPS:
        # Another device's steps were measured.
        base = {key: value for key, value in base.items() if key not in _COMPARED}
    return {**base, "name": f"{base['name']} ({device_key})", **changes}


def _flat(text: str, where: str) -> dict[str, Any]:
    values = parse_yaml(text, where)
    flat: dict[str, Any] = {}
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict) and key in (*_LINKS, "constants"):
            flat |= {f"{key}.{inner}": figure for inner, figure in value.items()}
        else:
            flat[key] = value
    return flat


# ---- files that are written


def changed_device_text(device: Device, constants: Mapping[str, float], source: str) -> str:
    """The file of a device with other constants, which have this source; its own ones stay where none replaces them."""
    flat = {key: value for key, value in device.figures.items() if key not in _COMPARED}
    flat |= {f"constants.{name}": sourced_figure(value, source) for name, value in constants.items()}
    return device_yaml(flat)


def sourced_figure(value: float, source: str) -> dict[str, Any]:
    """A figure of a device file to four digits, with its source."""
    return {"value": float(f"{value:.4g}"), "source": source}


def device_yaml(flat: Mapping[str, Any]) -> str:
    """Figures by the keys of `FIGURES` as a device file, each on a line."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        owner, _, name = key.rpartition(".")
        (nested.setdefault(owner, {}) if owner else nested)[name] = value
    text: str = yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, default_flow_style=None, width=10**6)
    return f"# Written by shardwise. Rates are those of one rank and one direction; GB are 10^9 bytes.\n{text}"


def require_device_suffix(path: Path, option: str) -> None:
    """Refuse a name by which `--device` would not know a file; ConfigError: it has another ending than .yaml."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{option} ({path}) must end in .yaml, by which --device knows a file")
