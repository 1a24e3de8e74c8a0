"""The graphs that a training captures, and the facts of each: two runs whose graphs have the same facts share them.

A fact that is left out gives a run the code of another graph, and one too many compiles a graph once more.
"""

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
from shardwise.base.errors import ConfigError, see
from shardwise.config import Config, FamilyConfig, Layout
from shardwise.distributed import devices
from shardwise.models.user_model import check_user_model
from shardwise.train.compile.graph_cache import Facts
from shardwise.train.compile.units import BLOCK, HEAD, backend_of, block_unit, products_add_in_graphs

_SOURCES = (
    "models/*.py",
    "layers/*.py",
    "train/compile/units.py",
    "distributed/collectives.py",
    "distributed/random_bits.py",
    "distributed/torch_private.py",
)
"""Files of this package that a graph is captured from."""
_OUTSIDE_OF_GRAPHS = ("num_hidden_layers", "initializer_range", "ignore")
"""Fields of a model that no graph depends on."""


def planned_graphs(config: Config) -> list[tuple[str, bool]]:
    """Pairs (unit, is in training) of all graphs that a training captures, on any rank.

    Their number depends neither on the layers nor on the ranks.
    """
    model = config.shapes
    units = [BLOCK]
    if model is not None:
        units = [*dict.fromkeys(unit_of_layer(model, layer) for layer in range(model.num_hidden_layers)), HEAD]
    modes = (True, False) if config.train.eval_every else (True,)
    return [(unit, training) for unit in units for training in modes]


def unit_of_layer(model: FamilyConfig, layer: int) -> str:
    """The name of the unit to which a block of a family's model belongs."""
    return block_unit(
        is_rotated=not model.rotary_dim or model.rotates(layer), has_window=model.window(layer) is not None
    )


def graph_facts(config: Config, layout: Layout, device: torch.device, unit: str, training: bool) -> Facts:
    """The facts of one graph, by configuration key where there is one.

    Raises:
        ConfigError: the machine has no C++ compiler, and the backend needs one.
    """
    model = config.model
    train = config.train
    data = config.data
    parallel = config.parallel
    facts: dict[str, Any] = {
        "unit": unit,
        "training": training,
        "parallel.tensor": layout.tensor,
        "parallel.sequence": layout.sequence_parallel,
        "parallel.context": layout.context,
        "parallel.vocab_multiple": parallel.vocab_multiple,
        "train.micro_batch": train.micro_batch,
        "train.sequence_length": train.sequence_length,
        "train.bitwise": train.bitwise,
        "precision.mode": config.precision.resolved(device.type != "cpu").parameter,
        "precision.matmul": config.precision.matmul if training else None,
        "data.reset_attention_mask": data.reset_attention_mask,
        "data.reset_position_ids": data.reset_position_ids,
        "data.masked_fraction": data.masked_fraction,
        "data.max_predictions": data.max_predictions,
        "compile.backend": backend_of(config.compile, device),
        "compile.options": config.compile.options,
        "device": _device_name(device),
        "torch": version("torch"),
        "python": sys.version.partition(" ")[0],
        "code": _code(config),
    }
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
        facts["matmuls"] = "oneDNN" if devices.cpu_prefers_onednn() else "torch"
        if facts["compile.backend"] == "inductor":
            facts["compiler"] = _compiler()
            facts["processor"] = _processor()
    if training:
        facts["train.recompute"] = train.recompute
        facts["train.dropout_mode"] = train.dropout_mode
        facts["weight gradients"] = "added" if products_add_in_graphs(config, device) else "returned"
    described = model.model_dump(mode="json")
    for key in _OUTSIDE_OF_GRAPHS:
        described.pop(key, None)
    return facts | {f"model.{key}": value for key, value in described.items()}


def _device_name(device: torch.device) -> str:
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else devices.name(device)


@functools.cache
def _compiler() -> str:
    """The C++ compiler that the backend runs on a CPU, with its version."""
    path = _compiler_path()
    if path is None:
        raise ConfigError(
            f"compile.enabled (true) needs a C++ compiler on a CPU, and there is no {_compiler_name()}: install it "
            "(Debian: g++), name another one by CXX, or set compile.enabled=false"
            f"{see('training#no-compiler')}"
        )
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return output.partition("\n")[0]


def _compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _compiler_path() -> str | None:
    return shutil.which(_compiler_name())


@functools.cache
def _processor() -> str:
    """A hash of all instructions that the compiler may use here: the backend compiles for the processor it runs on."""
    command = [_compiler_path() or "", "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return hashlib.sha256("".join(sorted(output.splitlines())).encode()).hexdigest()[:16]


def _code(config: Config) -> str:
    """A hash of the sources that a graph is captured from; of a model of the user's own, those of its package too."""
    root = Path(shardwise.__file__).parent
    paths = {path for pattern in _SOURCES for path in root.glob(pattern)}
    if config.shapes is None:
        paths |= _user_sources(check_user_model(config))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]


def _user_sources(model: type) -> set[Path]:
    """The file of a user's own model, and those of imported modules in the folder of its outermost package."""
    file = Path(inspect.getfile(model)).resolve()
    top = file.parents[model.__module__.count(".")]
    sources = {file}
    files = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    for path in [file.resolve() for file in files if file.is_absolute() and file.suffix == ".py"]:
        if path.is_relative_to(top) and "site-packages" not in path.relative_to(top).parts:
            sources.add(path)
    return sources
