"""What a calibration measures, and what passes between its process and the ranks that it starts. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.config.schedules import DEFAULT_SCHEDULE

PRODUCTS = ((64, 64, 64), (128, 256, 64), (128, 64, 256), (512, 256, 256), (512, 512, 512), (1024, 1024, 1024))
"""Matrix products [m, k] × [k, n] as (m, n, k): from those of a miniature to those that reach the largest rate."""
LARGE_PRODUCTS = ((4096, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
"""On an accelerator also these."""
_FOUND = "found.json"
_GPT = ("model.hidden_size=96", "model.intermediate_size=384", "train.sequence_length=32")
_LLAMA = ("model.hidden_size=96", "model.intermediate_size=256", "train.sequence_length=32")
_FIXED = ("optimizer.zero=1", "train.global_batch=16", "train.eval_every=0", "train.steps=100000")
_ONE = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=false")
_WIDE = ("model.hidden_size=256", "model.intermediate_size=704", "model.num_hidden_layers=4", "train.micro_batch=4")


@dataclass(frozen=True)
class Probe:
    """A miniature training that is timed: a shipped recipe of which sizes and layout are others."""

    recipe: str
    keys: tuple[str, ...]

    def config(self) -> Config:
        return _config(self)

    def layout(self, world: int) -> Layout:
        return check_layout(self.config(), world)


@cache
def _config(probe: Probe) -> Config:
    return load_config(probe.recipe, [*_FIXED, *probe.keys])


def probes(world: int) -> list[Probe]:
    """Miniatures for so many ranks: of two families, two depths and widths, and cut along each axis."""
    found = [
        Probe("llama2-tiny", (*_ONE, *_LLAMA, "model.num_hidden_layers=2", "train.micro_batch=4")),
        Probe("llama2-tiny", (*_ONE, *_LLAMA, "model.num_hidden_layers=6", "train.micro_batch=2")),
        Probe("llama2-tiny", (*_ONE, *_WIDE, "train.sequence_length=64", "train.recompute=full")),
        Probe("gpt3-tiny", (*_ONE, *_GPT, "model.num_hidden_layers=6", "train.micro_batch=4", "optimizer.zero=0")),
    ]
    if world % 2 == 0:
        tensor = ("parallel.tensor=2", "parallel.pipeline=1")
        pipeline = (
            "parallel.tensor=1",
            "parallel.pipeline=2",
            "parallel.sequence=false",
            f"parallel.schedule={DEFAULT_SCHEDULE}",
        )
        found += [
            Probe("llama2-tiny", (*_LLAMA, *tensor, "model.num_hidden_layers=6", "train.micro_batch=4")),
            Probe("gpt3-tiny", (*_GPT, *tensor, "parallel.sequence=true", "model.num_hidden_layers=4")),
            Probe("llama2-tiny", (*_LLAMA, *pipeline, "model.num_hidden_layers=6", "train.micro_batch=2")),
            Probe("gpt3-tiny", (*_GPT, *pipeline, "model.num_hidden_layers=4", "train.micro_batch=4")),
        ]
    return found


def undisturbed(seconds: Sequence[float]) -> float:
    """What a tenth of the measurements do not exceed: what else runs on a machine can only make them longer."""
    return sorted(seconds)[(len(seconds) - 1) // 10]


@dataclass(frozen=True)
class Found:
    """What the ranks measured, in seconds and bytes.

    Attributes:
        device: what it is; `type` is torch's name of its kind.
        threads: of torch, on each rank.
        memory: bytes of one device.
        products: by dtype, seconds of each of `shapes`.
        copied: bytes that a copy reads and writes, and its seconds.
        launch: seconds from the start of a kernel to that of the next.
        sums: (bytes, seconds) of all-reduces over all ranks; none on one rank.
        steps: seconds of a step of each of `probes`.
        fewer: what was measured less often than planned, as time was short.
    """

    device: str
    type: str
    torch: str
    threads: int
    ranks: int
    memory: float
    processors: int
    shapes: Sequence[Sequence[int]]
    products: Mapping[str, Sequence[float]]
    copied: Sequence[float]
    launch: float
    sums: Sequence[Sequence[float]]
    steps: Sequence[float]
    fewer: Sequence[str]

    def write(self, folder: Path) -> None:
        """Put it into the folder of the calibration."""
        (folder / _FOUND).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Found:
        """What the ranks wrote."""
        values: dict[str, Any] = json.loads((folder / _FOUND).read_text(encoding="utf-8"))
        return Found(**values)
