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
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.base.errors import ConfigError, see
from shardwise.config import BITWISE, Config, Layout, ModelConfig, TrainConfig
from shardwise.distributed import devices
from shardwise.models.build import model_adds_products_in_graphs
from shardwise.models.user_model import check_user_model
from shardwise.train.compile.compiled_units import BLOCK, HEAD, compiled_unit_of_block, compiler_backend
from shardwise.train.compile.graph_cache import Facts

_SOURCES = (
    "base/tensor_box.py",
    "config/*.py",
    "distributed/*.py",
    "layers/**/*.py",
    "models/*.py",
    "train/compile/compiled_units.py",
)
"""Files that a graph is captured from, or that give the numbers in it: what is kept of it is not captured again."""
_OUTSIDE_OF_GRAPHS = {"num_hidden_layers", "initializer_range", "ignore"}  # fields of a model that no graph depends on
_KEYS = (
    "parallel.vocab_multiple",
    "train.micro_batch",
    "train.sequence_length",
    BITWISE,
    "data.reset_attention_mask",
    "data.reset_position_ids",
    "data.masked_fraction",
    "data.max_predictions",
    "compile.options",
)
"""Keys whose values a graph depends on as they are."""
_KEYS_IN_TRAINING = ("train.recompute", "train.dropout_mode")


def planned_graphs(model: ModelConfig, train: TrainConfig) -> list[tuple[str, bool]]:
    """Pairs (unit, is in training) of all graphs that a training captures, on any rank.

    Their number depends neither on the layers nor on the ranks.
    """
    units = [BLOCK]
    if not model.is_own:
        units = [*dict.fromkeys(compiled_unit_of_block(model, layer) for layer in range(model.num_hidden_layers)), HEAD]
    modes = (True, False) if train.eval_every else (True,)
    return [(unit, training) for unit in units for training in modes]


def graph_facts(config: Config, layout: Layout, device: torch.device, unit: str, training: bool) -> Facts:
    """The facts of one graph, by configuration key where there is one; ConfigError without a needed C++ compiler."""
    facts: dict[str, Any] = {
        "unit": unit,
        "training": training,
        "parallel.tensor": layout.tensor,
        "parallel.sequence": layout.sequence_parallel,
        "parallel.context": layout.context,
        "precision.mode": config.precision.resolved(device.type != "cpu").parameter,
        "precision.matmul": config.precision.matmul if training else None,
        "compile.backend": compiler_backend(config.compile, device),
        "device": f"cpu, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else devices.name(device),
        "torch": version("torch"),
        "python": sys.version.partition(" ")[0],
        "code": _code(check_user_model(config) if config.model.is_own else None),
    }
    keys = (*_KEYS, *_KEYS_IN_TRAINING) if training else _KEYS
    facts |= {key: attrgetter(key)(config) for key in keys}
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
        facts["matmuls"] = "oneDNN" if devices.cpu_prefers_onednn() else "torch"
        if facts["compile.backend"] == "inductor":
            facts["compiler and processor"] = _compiler()
    if training:
        facts["weight gradients"] = "added" if model_adds_products_in_graphs(config, device) else "returned"
    model = config.model.model_dump(mode="json", exclude=_OUTSIDE_OF_GRAPHS)
    return facts | {f"model.{key}": value for key, value in model.items()}


@functools.cache
def _compiler() -> str:
    """A hash of what the C++ compiler defines: its version, and all instructions of this processor, for which the
    backend compiles.
    """
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"compile.enabled (true) needs a C++ compiler on a CPU, and there is no {name}: install it "
            "(Debian: g++), name another one by CXX, or set compile.enabled=false"
            f"{see('training#no-compiler')}"
        )
    command = [name, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return hashlib.sha256("".join(sorted(output.splitlines())).encode()).hexdigest()[:16]


def _code(own_model: type | None) -> str:
    """A hash of the sources that a graph is captured from; of a model of the user's own, those of its package too."""
    root = Path(shardwise.__file__).parent
    paths = {path for pattern in _SOURCES for path in root.glob(pattern)}
    if own_model is not None:
        paths |= _user_sources(own_model)
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
