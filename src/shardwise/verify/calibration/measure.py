"""The measurements of one rank: matrix products, copies, launches, collectives and steps of miniature trainings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch

from shardwise.base import units
from shardwise.config import DtypeName
from shardwise.data.random_text import random_text
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Group, Mesh
from shardwise.train.build import build_trainer
from shardwise.train.trainer import Trainer
from shardwise.verify.calibration.probes import LARGE_PRODUCTS, PRODUCTS, Found, Probe, probes, undisturbed

_COPIED = 2**26  # elements: far more than caches hold
_SUMMED = (64, 2**16, 2**20, 2**24)  # bytes of an all-reduce
_SUMS, _FEWEST_SUMS = 20, 5  # of each size
_ROUNDS, _STEPS, _WARM_UP = 4, 6, 2
_MOST = 0.4  # seconds for one measurement, about
_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


class Budget:
    """The time that is left to measure, and the parts that were measured less often for want of it."""

    def __init__(self, world: Group, until: float) -> None:
        self._world, self._until = world, until
        self.fewer: list[str] = []

    def left(self) -> float:
        """Seconds, the same on all ranks. Collective."""
        return min(collectives.all_gather_objects(self._until - time.time(), self._world))


def measured(world: Group, device: torch.device, until: float) -> Found:
    """What this machine's ranks measure together; the slowest rank counts. Collective.

    Steps of miniature trainings tell most. They get the time that is left by single operations, and these half of it.

    Args:
        until: when it should end, by `time.time()`. Every part is measured, with fewer repetitions if time is short.
    """
    budget = Budget(world, until)
    half = budget.left() / 2
    shapes = [*PRODUCTS, *(LARGE_PRODUCTS if device.type != "cpu" else ())]
    most = min(_MOST, max(0.0, half) / 2 / (len(shapes) * len(_DTYPES) + 2))
    if most < _MOST:
        budget.fewer.append(f"matrix products, copies and kernels {most:.2g} s each in place of {_MOST:g}")
    products = {name: [_product(shape, name, device, most) for shape in shapes] for name in _DTYPES}
    source = torch.zeros(_COPIED, device=device)
    target = torch.empty_like(source)
    copied = _slowest([typical(lambda: target.copy_(source), device, most=most)], world)
    launch = _slowest([_launch(torch.zeros(8, device=device), device, most)], world)
    memory = devices.total_memory(device) or psutil.virtual_memory().total / world.size
    found = Found(
        devices.name(device), device.type, torch.__version__, torch.get_num_threads(), world.size, float(memory),
        _processors(device), shapes, {name: _slowest(seconds, world) for name, seconds in products.items()},
        (2.0 * source.nbytes, *copied), launch[0],
        [] if world.size == 1 else _sums(world, device, budget, half), _steps(probes(world.size), world, budget),
        budget.fewer,
    )  # fmt: skip
    collectives.barrier(world)
    return found


def typical(call: Callable[[], object], device: torch.device, *, most: float, least: int = 5) -> float:
    """Undisturbed seconds of a call, of as many as `most` seconds allow and `least` at least, after one more."""
    call()
    devices.synchronize(device)
    seconds: list[float] = []
    while len(seconds) < least or sum(seconds) < most:
        start = devices.mark(device)
        call()
        end = devices.mark(device)
        devices.synchronize(device)
        seconds.append(devices.seconds_between(start, end))
        if sum(seconds) > 10 * most and len(seconds) > 1:
            break
    return undisturbed(seconds)


def _product(shape: Sequence[int], dtype: str, device: torch.device, most: float) -> float:
    m, n, k = shape
    a, b = (torch.ones(size, dtype=getattr(torch, dtype), device=device) for size in ((m, k), (k, n)))
    out = torch.empty((m, n), dtype=a.dtype, device=device)
    repeats = max(1, 10**8 // (m * n * k)) if device.type == "cpu" else 10

    def repeated() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return typical(repeated, device, most=most) / repeats


def _launch(tensor: torch.Tensor, device: torch.device, most: float) -> float:
    def thousand() -> None:
        for _ in range(1000):
            tensor.add_(1)

    return typical(thousand, device, most=most) / 1000


def _sums(world: Group, device: torch.device, budget: Budget, keep: float) -> list[tuple[float, float]]:
    """(bytes, seconds) of all-reduces; each size at least a few times, and until `keep` seconds are left."""
    sums = {size: torch.zeros(size // 4, device=device) for size in _SUMMED}
    seconds: dict[int, list[float]] = {size: [] for size in _SUMMED}
    for number in range(_SUMS):
        if number >= _FEWEST_SUMS and budget.left() < keep:
            budget.fewer.append(f"all-reduces {number} times in place of {_SUMS}")
            break
        for size, whole in sums.items():
            collectives.barrier(world)
            taken = typical(partial(collectives.all_reduce_, whole, world), device, most=0, least=1)
            seconds[size].append(taken)
    return [(float(size), _slowest([undisturbed(repeated)], world)[0]) for size, repeated in seconds.items()]


def _steps(wanted: Sequence[Probe], world: Group, budget: Budget) -> list[float]:
    """Seconds of a step of each miniature. They take turns, so that what else runs here disturbs all alike.

    Once the time is over, those that were not measured yet do a single step.
    """
    trainers = [trainer(probe) for probe in wanted]
    seconds: list[list[float]] = [[] for _ in wanted]
    start = budget.left()
    for one in trainers:
        for _ in range(_WARM_UP):
            one.step()
    left = budget.left()
    step = (start - left) / _WARM_UP  # of all trainers, one after the other
    at_once = max(1, min(_STEPS, int(left / step / _ROUNDS)))
    for _ in range(_ROUNDS):
        for one, taken in zip(trainers, seconds, strict=True):
            is_over = budget.left() <= 0
            if not (is_over and taken):
                taken += [one.step().seconds for _ in range(1 if is_over else at_once)]
    fewest = min(map(len, seconds))
    if fewest < _ROUNDS * _STEPS:
        least = units.counted(fewest, "step")
        budget.fewer.append(f"miniature trainings at least {least} each in place of {_ROUNDS * _STEPS}")
    return _slowest([undisturbed(taken) for taken in seconds], world)


def trainer(probe: Probe) -> Trainer:
    """A miniature training on random tokens. Collective."""
    config = probe.config()
    mesh = Mesh(tensor=config.parallel.tensor, pipeline=config.parallel.pipeline)
    text = random_text(config.model.vocab_size, 256, config.train.sequence_length)
    return build_trainer(config, mesh, text)


def _slowest(seconds: Sequence[float], world: Group) -> list[float]:
    everyone = collectives.all_gather_objects(list(seconds), world)
    return [max(times) for times in zip(*everyone, strict=True)]


def _processors(device: torch.device) -> int:
    """Units that each take a tile of a matrix product; a rank on a CPU is one."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 1))
