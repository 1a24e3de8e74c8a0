"""The measurements of a calibration and their sizes, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from shardwise.config import Config, Layout, check_layout, load_config
from shardwise.config.schedules import DEFAULT_SCHEDULE

PRODUCTS = ((64, 64, 64), (128, 256, 64), (128, 64, 256), (512, 256, 256), (512, 512, 512), (1024, 1024, 1024))
"""Matrix products [m, k] × [k, n] as (m, n, k): from those of a miniature to those that reach the largest rate."""
LARGE_PRODUCTS = ((4096, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
"""Further products on an accelerator, whose largest rate smaller ones do not reach."""
_GPT = ("model.hidden_size=96", "model.intermediate_size=384", "train.sequence_length=32")
_LLAMA = ("model.hidden_size=96", "model.intermediate_size=256", "train.sequence_length=32")
_FIXED = ("optimizer.zero=1", "train.global_batch=16", "train.eval_every=0", "train.steps=100000")
_ONE_RANK = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=false")
_WIDE = ("model.hidden_size=256", "model.intermediate_size=704", "model.num_hidden_layers=4", "train.micro_batch=4")


@dataclass(frozen=True)
class Probe:
    """A miniature training that is timed: a shipped recipe with other sizes and another layout.

    Attributes:
        recipe: name of the shipped recipe.
        keys: keys that differ from the recipe, as on the command line.
    """

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
    """Return miniatures for `world` ranks: two families, two depths and widths, and a cut along each axis."""
    miniatures = [
        Probe("llama2-tiny", (*_ONE_RANK, *_LLAMA, "model.num_hidden_layers=2", "train.micro_batch=4")),
        Probe("llama2-tiny", (*_ONE_RANK, *_LLAMA, "model.num_hidden_layers=6", "train.micro_batch=2")),
        Probe("llama2-tiny", (*_ONE_RANK, *_WIDE, "train.sequence_length=64", "train.recompute=full")),
        Probe("gpt3-tiny", (*_ONE_RANK, *_GPT, "model.num_hidden_layers=6", "train.micro_batch=4", "optimizer.zero=0")),
    ]
    if world % 2 == 0:
        tensor = ("parallel.tensor=2", "parallel.pipeline=1")
        pipeline = (
            "parallel.tensor=1",
            "parallel.pipeline=2",
            "parallel.sequence=false",
            f"parallel.schedule={DEFAULT_SCHEDULE}",
        )
        miniatures += [
            Probe("llama2-tiny", (*_LLAMA, *tensor, "model.num_hidden_layers=6", "train.micro_batch=4")),
            Probe("gpt3-tiny", (*_GPT, *tensor, "parallel.sequence=true", "model.num_hidden_layers=4")),
            Probe("llama2-tiny", (*_LLAMA, *pipeline, "model.num_hidden_layers=6", "train.micro_batch=2")),
            Probe("gpt3-tiny", (*_GPT, *pipeline, "model.num_hidden_layers=4", "train.micro_batch=4")),
        ]
    return miniatures


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the first decile of some durations: other work on a machine can only make them longer."""
    return sorted(seconds)[(len(seconds) - 1) // 10]


@dataclass(frozen=True)
class Measurements:
    """Figures that the ranks measured together, in seconds and bytes.

    Attributes:
        device: name of the device.
        type: torch's name of its kind.
        torch: version of torch.
        threads: threads of torch on each rank.
        ranks: number of ranks.
        memory: bytes of one device.
        processors: units of a device that each take a tile of a matrix product.
        shapes: (m, n, k) of the matrix products.
        products: seconds of each of `shapes`, by dtype.
        copied: bytes that a copy reads and writes, and its seconds.
        launch: seconds from the start of a kernel to that of the next.
        sums: (bytes, seconds) of all-reduces over all ranks; none on one rank.
        steps: seconds of a step of each of `probes`.
        fewer: measurements that were repeated less often than planned, as time was short.
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
