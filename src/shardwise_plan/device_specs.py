"""Devices as data: what a cluster that is not here can do, from a YAML file for each device, without torch.

A figure is `{value: NUMBER, source: TEXT}`, or in a user's own file a plain number. Rates are those of one device in
one direction; GB are 10^9 bytes. A user's file with `base: h100` takes all other figures from that device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.base import units
from shardwise.base.errors import ConfigError, listing, nearest_name
from shardwise.base.files import read_plain
from shardwise.base.hardware import torch_type
from shardwise.config import DtypeName, Matmul, parse_yaml
from shardwise.estimates.device_peaks import DEVICE_FILES
from shardwise_plan.device_files import dump, figure

_ALIASES = {"a100": "a100-80gb"}
# Each figure: the least and the most that a device can have.
_RANGES: dict[str, tuple[float, float]] = {
    "memory_gb": (0.1, 10_000),
    "memory_gb_per_second": (0.1, 100_000),
    "bfloat16_tflops": (1e-4, 100_000),
    "float32_tflops": (1e-4, 100_000),
    "matmul_share": (0.01, 1),
    "processors": (1, 100_000),
    "devices_per_node": (1, 100_000),
    "node_link.gb_per_second": (1e-3, 100_000),
    "node_link.latency_us": (0, 1e6),
}
_NETWORK: dict[str, tuple[float, float]] = {
    "network.gb_per_second": (1e-3, 100_000),
    "network.latency_us": (0, 1e6),
}
CONSTANTS: dict[str, tuple[float, float]] = {
    "matmul": (0.01, 10),
    "depth": (0, 1e5),
    "memory": (0.001, 10),
    "fused_attention": (1e-4, 10),
    "host": (0, 0.1),
    "step": (0, 10),
    "wait": (0, 10),
    "node": (1e-3, 10),
    "network": (1e-3, 10),
    "update": (1e-3, 10),
    "overlap": (0, 1),
    "action": (0, 1),
}
"""The constants that a file may give in place of the fitted `device_seconds.Constants`, with their ranges."""
_FP8 = "fp8_tflops"
_FP8_SHARE = "fp8_matmul_share"
_MXFP8_SHARE = "mxfp8_matmul_share"
_FP8_BACKWARD = "fp8_backward_share"
_PRICE = "price_per_hour"
_PRICED = ("device", "chip", "node")
_PER_CHIP = "devices_per_chip"
_MOST_PRICE = 1e6
MOST_FAILURES = 1e4
"""Largest number of failures of a device in a year."""
_WATTS = "watts"
_FAILURES = "failures_per_year"
_RESTART = "restart_seconds"
_STORAGE = "storage_gb_per_second"
_COMPARED = "compared_runs"
_CONSTANT = "constants."
_OPTIONAL = {
    _FP8: _RANGES["bfloat16_tflops"],
    _FP8_SHARE: _RANGES["matmul_share"],
    _MXFP8_SHARE: _RANGES["matmul_share"],
    _FP8_BACKWARD: _RANGES["matmul_share"],
    _PER_CHIP: (1, 1000),
    _WATTS: (0, 100_000),
    _FAILURES: (0, MOST_FAILURES),
    _RESTART: (0, 100_000),
    _STORAGE: (1e-6, 100_000),
    _COMPARED: (0, 1e6),
    **{_CONSTANT + key: limits for key, limits in CONSTANTS.items()},
}
_WHOLE = ("processors", "devices_per_node", _PER_CHIP, _COMPARED)
_BESIDE_STEPS = {"name", "accuracy", _PRICE, _PER_CHIP, _WATTS, _FAILURES, _RESTART, _STORAGE, _COMPARED}
"""Figures of a file with which a step takes as long as on its base."""
_TEXTS = ("name", "node_link.topology")
_NETWORK_TOPOLOGY = "network.topology"
_CUDA = torch_type("nvidia")
_TYPES = ("cpu", _CUDA, "accelerator")
_LINKS = ("node_link", "network")
_OTHER_KEYS = ("type", "accuracy", _PRICE)


@dataclass(frozen=True)
class Price:
    """The price of a device, a chip of several devices, or a node, for an hour."""

    amount: float
    currency: str
    unit: str = "device"

    @staticmethod
    def of(text: str, named: str) -> Price:
        """Return the price that a text such as `2.50 USD` or `40 USD/node` gives; `named` names the text in errors.

        Raises:
            ConfigError: it is no price, or has no currency.
        """
        units_of = f"(?:/({'|'.join(_PRICED)}))?(?:/hour)?"
        match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([A-Za-z]{{3}})?{units_of}", text.strip())
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


@dataclass(frozen=True)
class Reliability:
    """The failures of a cluster of such devices, and what a failure and a checkpoint cost.

    The defaults are assumptions. Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100
    (arXiv:2407.21783, section 3.3.4), which is 0.17 for each device and year; OPT-175B had about 105 restarts in two
    months on 992 A100 (arXiv:2205.01068, section 2.5), which is 0.6. MegaScale finds and diagnoses a fault in less than
    10 minutes on average, and has repeated the work since its last checkpoint within 15 (arXiv:2402.15627, section
    6.3).

    Attributes:
        failures_per_year: failures of one device, with its part of the machine and the network, that end the run.
        restart: seconds until the run trains again after a failure, without reading its checkpoint.
        storage: bytes a second that one node writes to, or reads from, the store of checkpoints.
    """

    failures_per_year: float = 0.17
    restart: float = 900.0
    storage: float = 2e9

    def text(self) -> str:
        """Return the assumptions as a sentence's parts."""
        return (
            f"{self.failures_per_year:g} failures for each device and year, {units.duration(self.restart)} for a "
            f"restart, and {self.storage / 1e9:g} GB/s from each node to the store of checkpoints"
        )


@dataclass(frozen=True)
class Link:
    """A link from a device to another one.

    Attributes:
        bandwidth: bytes a second in one direction.
        latency: seconds before the first byte.
        topology: the way in which devices are linked, in words.
    """

    bandwidth: float
    latency: float
    topology: str


@dataclass(frozen=True)
class Device:
    """The device that one rank computes with.

    Attributes:
        key: name that the user gave.
        name: name that is shown.
        memory: bytes.
        memory_bandwidth: bytes a second.
        bfloat16: FLOP/s of matrix products in bfloat16, without sparsity.
        float32: FLOP/s of matrix products in float32.
        fp8: FLOP/s of matrix products in fp8, without sparsity; None if the device has none.
        matmul_share: part of the peak that the largest matrix products reach.
        fp8_matmul_share: likewise of the peak in fp8.
        mxfp8_matmul_share: likewise of the peak in fp8, where each 32 numbers have a scale.
        fp8_backward_share: part of the rate in fp8 that products of the backward pass reach, which add with all bits.
        processors: number of units that each take a tile of a matrix product.
        per_node: number of devices of a machine, which `node` links; `network` links the machines.
        node: link to a device of the same machine.
        network: link to a device of another machine; None if its rate is unknown.
        sources: source of each figure.
        is_accelerator: True if it computes while the host goes on; a rank on a CPU does one after the other.
        is_cuda: True if it is a CUDA device, one kernel of which multiplies bfloat16 matrices and adds the product to a
            float32 one.
        constants: constants of `device_seconds.Constants` that were measured on this device.
        price: price for an hour; None if it is unknown.
        per_chip: number of devices of a chip, which has one price.
        watts: power of one device under load, without its host; None if it is unknown.
        reliability: failures, and what they and checkpoints cost.
        accuracy: how far predictions were from measured steps on this device; empty if none was measured.
        compared_runs: number of published runs on this device that were compared with their predictions.
    """

    key: str
    name: str
    memory: float
    memory_bandwidth: float
    bfloat16: float
    float32: float
    fp8: float | None
    matmul_share: float
    processors: int
    per_node: int
    node: Link
    network: Link | None
    sources: tuple[tuple[str, str], ...] = ()
    is_accelerator: bool = True
    is_cuda: bool = False
    constants: tuple[tuple[str, float], ...] = ()
    price: Price | None = None
    per_chip: int = 1
    watts: float | None = None
    reliability: Reliability = Reliability()
    accuracy: str = ""
    compared_runs: int = 0
    fp8_matmul_share: float | None = None
    mxfp8_matmul_share: float | None = None
    fp8_backward_share: float = 1.0

    def peak(self, dtype: DtypeName) -> float:
        """FLOP/s of matrix products without sparsity."""
        return self.bfloat16 if dtype == "bfloat16" else self.float32

    @property
    def file_text(self) -> str:
        """What to do with a file to give the device another figure; the figure follows."""
        if self.key in device_names():
            return f"write a device file with base: {self.key} and"
        return "add to its device file"

    def require_fp8(self) -> float:
        """Return the FLOP/s of products in fp8.

        Raises:
            ConfigError: the device has none.
        """
        if self.fp8 is None:
            raise ConfigError(
                f"precision.matmul (fp8) must be left out on {self.name}, whose device file has no fp8_tflops: "
                "shardwise multiplies in fp8 on NVIDIA GPUs of compute capability 8.9 or higher and on CPUs"
            )
        return self.fp8

    def require_network(self) -> Link:
        """Return the link to a device of another machine.

        Raises:
            ConfigError: its rate is unknown.
        """
        if self.network is None:
            raise ConfigError(
                f"network.gb_per_second of {self.name} (unknown) must be given for several nodes: {self.file_text} "
                "network: {gb_per_second: …, latency_us: …, topology: rail}"
            )
        return self.network

    def matmul_peak(self, dtype: DtypeName, matmul: Matmul | None, *, block_scales: bool = False) -> float:
        """Return the FLOP/s of which products of weights reach `matmul_share`.

        Raises:
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
    """So many machines with so many devices each."""

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
        chips = self.nodes * math.ceil(self.per_node / self.device.per_chip)
        return {"device": self.world, "chip": chips, "node": self.nodes}[unit]

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices for an hour; None if it is unknown."""
        return None if self.device.price is None else self.device.price.amount * self.priced_units

    def __str__(self) -> str:
        machines = f"{self.nodes:,} node{'s' * (self.nodes > 1)}"
        return f"{self.world:,} × {self.device.name} ({machines} × {self.per_node})"


def device_names() -> list[str]:
    """The devices that are described here."""
    return sorted(path.stem for path in DEVICE_FILES.glob("*.yaml"))


def cluster(text: str, nodes: int = 1) -> Cluster:
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


def load_device(name: str) -> Device:
    """The device of that name, or of that YAML file.

    Raises:
        ConfigError: there is no such device or file, or the file is wrong.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        try:
            text = read_plain(path).decode()
        except OSError as error:
            raise ConfigError(f"--device {name}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--device {name} must be a text file in UTF-8") from None
        return parse_device(path.stem, text, name)
    return _shipped(_shipped_key(name))


def shipped_text(name: str) -> str:
    """The file of a device of that name, as it is shipped.

    Raises:
        ConfigError: there is no such device.
    """
    return (DEVICE_FILES / f"{_shipped_key(name)}.yaml").read_text(encoding="utf-8")


def _shipped_key(name: str) -> str:
    key = _ALIASES.get(name.lower(), name.lower())
    names = device_names()
    if key not in names:
        near = _with_count(key) or nearest_name(key, names, cutoff=0.3)
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            f"unknown device {name!r}: {hint}devices are {listing(names)}; a file with the figures of your own ends "
            "with .yaml"
        )
    return key


def _with_count(name: str) -> str | None:
    """`h100:8` of `h100x8` or `8xh100`; None where the name is no device with a count."""
    matched = re.fullmatch(r"(?P<before>\d+)[x×*](?P<a>.+)|(?P<b>.+)[x×*](?P<after>\d+)", name)
    if matched is None:
        return None
    device = str(matched["a"] or matched["b"])
    is_known = _ALIASES.get(device, device) in device_names()
    return f"{device}:{matched['before'] or matched['after']}" if is_known else None


@cache
def _shipped(key: str) -> Device:
    return parse_device(key, shipped_text(key), f"{key}.yaml")


def parse_device(device_key: str, text: str, where: str) -> Device:
    """Return the device that a YAML text describes; `where` names the text in errors.

    Raises:
        ConfigError: it is no YAML; or with every figure that is missing, unknown or impossible.
    """
    values = parse_yaml(text, where)
    flat = _with_base(_flat(values if isinstance(values, dict) else {}), device_key, where)
    network_keys = (*_NETWORK, _NETWORK_TOPOLOGY)
    has_network = any(key in flat for key in network_keys)
    needed = (*_RANGES, *_TEXTS, *(network_keys if has_network else ()))
    known = {*_RANGES, *_TEXTS, *network_keys, *_OPTIONAL, *_OTHER_KEYS}
    problems = [_unknown_key(key, value, where) for key, value in flat.items() if key not in known]
    problems += [f"{where}: {key} is missing" for key in needed if key not in flat]
    kind = flat.get("type", "accelerator")
    problems += [] if kind in _TYPES else [f"{where}: type ({kind}) must be {listing(_TYPES, 'or')}"]
    given = {key: limits for key, limits in _OPTIONAL.items() if key in flat}
    ranges = _RANGES | (_NETWORK if has_network else {}) | given
    numbers = {key: _number(flat.get(key)) for key in ranges}
    problems += _range_problems({key: numbers[key] for key in ranges if key in flat}, ranges, where)
    sourced = {key: flat[key] for key in ranges if isinstance(flat.get(key), dict)}
    sources = [(key, str(entry["source"])) for key, entry in sourced.items() if "source" in entry]
    price = _price(flat, where, problems)
    if problems:
        raise ConfigError(problems)

    def link(key: str) -> Link:
        return Link(
            bandwidth=numbers[f"{key}.gb_per_second"] * 1e9,
            latency=numbers[f"{key}.latency_us"] * 1e-6,
            topology=str(flat[f"{key}.topology"]),
        )

    return Device(
        key=device_key,
        name=str(flat["name"]),
        memory=numbers["memory_gb"] * 1e9,
        memory_bandwidth=numbers["memory_gb_per_second"] * 1e9,
        bfloat16=numbers["bfloat16_tflops"] * 1e12,
        float32=numbers["float32_tflops"] * 1e12,
        fp8=numbers[_FP8] * 1e12 if _FP8 in numbers else None,
        matmul_share=numbers["matmul_share"],
        processors=numbers["processors"],
        per_node=numbers["devices_per_node"],
        node=link("node_link"),
        network=link("network") if has_network else None,
        sources=tuple(sources),
        is_accelerator=kind != "cpu",
        is_cuda=kind == _CUDA,
        constants=tuple((key[len(_CONSTANT) :], float(numbers[key])) for key in given if key.startswith(_CONSTANT)),
        price=price,
        per_chip=numbers.get(_PER_CHIP, 1),
        watts=numbers.get(_WATTS),
        reliability=_reliability(numbers),
        accuracy=str(flat.get("accuracy", "")),
        compared_runs=numbers.get(_COMPARED, 0),
        fp8_matmul_share=numbers.get(_FP8_SHARE),
        mxfp8_matmul_share=numbers.get(_MXFP8_SHARE),
        fp8_backward_share=numbers.get(_FP8_BACKWARD, 1.0),
    )


def _unknown_key(key: str, value: Any, where: str) -> str:
    if key in _LINKS:
        return f"{where}: {key} ({value}) must be a mapping with gb_per_second, latency_us and topology"
    return f"{where}: {key} is no figure of a device: leave it out"


def _number(entry: Any) -> Any:
    """The number of a figure, which may have a source beside it."""
    return entry.get("value") if isinstance(entry, dict) else entry


def _range_problems(numbers: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]], where: str) -> list[str]:
    """Every number that no device can have."""
    problems = []
    for key, value in numbers.items():
        least, most = ranges[key]
        is_whole = key in _WHOLE
        if not _possible(value, least, most, whole=is_whole):
            number = "whole number" if is_whole else "number"
            problems.append(f"{where}: {key} ({value}) must be a {number} from {least:g} to {most:,g}")
    return problems


def _price(flat: Mapping[str, Any], where: str, problems: list[str]) -> Price | None:
    """Return the price of a file; None if it has none, or one that is wrong, which is added to the problems."""
    if _PRICE not in flat:
        return None
    try:
        return Price.of(str(_number(flat[_PRICE])), f"{where}: {_PRICE}")
    except ConfigError as error:
        problems += error.problems
        return None


def _reliability(numbers: Mapping[str, Any]) -> Reliability:
    """Return what interrupts a training, by default as usual."""
    usual = Reliability()
    return Reliability(
        failures_per_year=numbers.get(_FAILURES, usual.failures_per_year),
        restart=numbers.get(_RESTART, usual.restart),
        storage=numbers[_STORAGE] * 1e9 if _STORAGE in numbers else usual.storage,
    )


def _with_base(flat: dict[str, Any], device_key: str, where: str) -> dict[str, Any]:
    """The figures of a file, with those of the shipped device that its `base` names where the file has none.

    Raises:
        ConfigError: no device of that name is shipped.
    """
    if "base" not in flat:
        return flat
    changes = {key: value for key, value in flat.items() if key != "base"}
    name = str(flat["base"])
    try:
        base = _with_base(_flat(parse_yaml(shipped_text(name), name)), name, name)
    except ConfigError as error:
        raise ConfigError([f"{where}: base: {problem}" for problem in error.problems]) from None
    if not changes.keys() <= _BESIDE_STEPS:
        # Another device's steps were measured.
        base = {key: value for key, value in base.items() if key not in ("accuracy", _COMPARED)}
    return {**base, "name": f"{base['name']} ({device_key})", **changes}


def _possible(value: Any, least: float, most: float, *, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return math.isfinite(value) and least <= value <= most


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """The figures by their names; those of links with the link's name before."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key in (*_LINKS, "constants"):
            flat |= {f"{key}.{inner}": figure for inner, figure in value.items()}
        else:
            flat[key] = value
    return flat


def described(device: Device, constants: Mapping[str, float], source: str) -> str:
    """The text of a device with other constants, which have this source; its own ones stay where none replaces them."""
    sources = dict(device.sources)

    def own(name: str, value: float) -> dict[str, Any]:
        return figure(value, sources.get(name, f"as in {device.key}"))

    kept = {name: own(f"constants.{name}", value) for name, value in device.constants if name not in constants}
    values: dict[str, Any] = {
        "name": device.name,
        "type": _CUDA if device.is_cuda else "accelerator" if device.is_accelerator else "cpu",
        "memory_gb": own("memory_gb", device.memory / 1e9),
        "memory_gb_per_second": own("memory_gb_per_second", device.memory_bandwidth / 1e9),
        "bfloat16_tflops": own("bfloat16_tflops", device.bfloat16 / 1e12),
        "float32_tflops": own("float32_tflops", device.float32 / 1e12),
        "matmul_share": own("matmul_share", device.matmul_share),
        "processors": {**own("processors", 0), "value": device.processors},
        "devices_per_node": {**own("devices_per_node", 0), "value": device.per_node},
    }
    if device.fp8 is not None:
        values[_FP8] = own(_FP8, device.fp8 / 1e12)
    for key, share in (
        (_FP8_SHARE, device.fp8_matmul_share),
        (_MXFP8_SHARE, device.mxfp8_matmul_share),
        (_FP8_BACKWARD, device.fp8_backward_share if device.fp8_backward_share < 1 else None),
    ):
        if share is not None:
            values[key] = own(key, share)
    if device.price is not None:
        values[_PRICE] = str(device.price)
    if device.per_chip > 1:
        values[_PER_CHIP] = {**own(_PER_CHIP, 0), "value": device.per_chip}
    if device.watts is not None:
        values[_WATTS] = own(_WATTS, device.watts)
    usual = Reliability()
    for key, value, default in (
        (_FAILURES, device.reliability.failures_per_year, usual.failures_per_year),
        (_RESTART, device.reliability.restart, usual.restart),
        (_STORAGE, device.reliability.storage / 1e9, usual.storage / 1e9),
    ):
        if value != default:
            values[key] = own(key, value)
    for name, link in (("node_link", device.node), ("network", device.network)):
        if link is None:
            continue
        values[name] = {
            "gb_per_second": own(f"{name}.gb_per_second", link.bandwidth / 1e9),
            "latency_us": own(f"{name}.latency_us", link.latency * 1e6),
            "topology": link.topology,
        }
    values["constants"] = kept | {name: figure(value, source) for name, value in constants.items()}
    return dump(values)
