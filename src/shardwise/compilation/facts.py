"""What decides the code of a graph: two runs whose graphs have the same facts share them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise import device as devices
from shardwise.compilation.units import BLOCK, HEAD, UNROTATED, backend_of
from shardwise.config import Config, FamilyConfig, Layout, OwnConfig
from shardwise.errors import ConfigError
from shardwise.graph_cache import Facts
from shardwise.models import check_own

_SOURCES = ("models/*.py", "parallel/*.py", "compilation/units.py", "comm.py", "random_bits.py", "_torch_private.py")
"""Of this package: what a graph is captured from."""


def planned_graphs(config: Config) -> list[tuple[str, bool]]:
    """(unit, whether it is trained) of all graphs that a training captures, on whichever rank.

    Their number depends neither on the layers nor on the ranks.
    """
    model = config.model
    units = [BLOCK]
    if not isinstance(model, OwnConfig):
        units = [*dict.fromkeys(unit_of_layer(model, layer) for layer in range(model.num_hidden_layers)), HEAD]
    modes = (True, False) if config.train.eval_every else (True,)
    return [(unit, training) for unit in units for training in modes]


def unit_of_layer(model: FamilyConfig, layer: int) -> str:
    """The unit that a block of a family's model is."""
    return BLOCK if not model.rotary_dim or model.rotates(layer) else UNROTATED


def graph_facts(config: Config, layout: Layout, device: torch.device, unit: str, training: bool) -> Facts:
    """The facts of one graph, by configuration key where there is one.

    Raises:
        ConfigError: the machine has no C++ compiler, and the backend needs one.
    """
    model, train, data, parallel = config.model, config.train, config.data, config.parallel
    facts: dict[str, Any] = {
        "unit": unit,
        "training": training,
        "parallel.tensor": layout.tensor,
        "parallel.sequence": layout.sequence,
        "parallel.vocab_multiple": parallel.vocab_multiple,
        "train.micro_batch": train.micro_batch,
        "train.sequence_length": train.sequence_length,
        "precision.mode": config.precision.resolved(device.type != "cpu").parameter,
        "data.reset_attention_mask": data.reset_attention_mask,
        "data.reset_position_ids": data.reset_position_ids,
        "data.masked_fraction": data.masked_fraction,
        "data.max_predictions": data.max_predictions,
        "compile.backend": backend_of(config.compile, device),
        "compile.options": config.compile.options,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": version("torch"),
        "python": sys.version.partition(" ")[0],
        "compiler": _compiler() if device.type == "cpu" and backend_of(config.compile, device) == "inductor" else None,
        "code": _code(config),
    }
    if training:
        facts["train.recompute"] = train.recompute
        facts["train.dropout_mode"] = train.dropout_mode
    described = model.model_dump(mode="json")
    described.pop("num_hidden_layers", None)
    return facts | {f"model.{key}": value for key, value in described.items()}


def _device_name(device: torch.device) -> str:
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else devices.name(device)


@functools.cache
def _compiler() -> str:
    """The C++ compiler that the backend runs on a CPU, with its version."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name)
    if path is None:
        raise ConfigError(
            f"compile.enabled (true) needs a C++ compiler on a CPU, and there is no {name}: install it "
            "(Debian: g++), name another one by CXX, or set compile.enabled=false"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return said.partition("\n")[0]


def _code(config: Config) -> str:
    """A hash of the sources that a graph is captured from; of a model of the user's own, those of its module too."""
    root = Path(shardwise.__file__).parent
    paths = [path for pattern in _SOURCES for path in root.glob(pattern)]
    if isinstance(config.model, OwnConfig):
        paths.append(Path(inspect.getfile(check_own(config))))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]
