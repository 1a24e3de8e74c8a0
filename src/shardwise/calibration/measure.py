"""The measurements of one rank: matrix products, copies, launches, collectives and steps of miniature trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil
import torch

from shardwise import comm
from shardwise import device as devices
from shardwise.calibration.probes import LARGE_PRODUCTS, PRODUCTS, Found, Probe, probes, undisturbed
from shardwise.config import DtypeName
from shardwise.mesh import Group, Mesh
from shardwise.testing import random_text
from shardwise.train.build import build_trainer
from shardwise.train.trainer import Trainer

_COPIED = 2**26  # elements: far more than caches hold
_SUMMED = (64, 2**16, 2**20, 2**24)  # bytes of an all-reduce
_ROUNDS, _STEPS, _WARM_UP = 4, 6, 2
_MOST = 0.4  # seconds for one measurement, about
_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


def measured(world: Group, device: torch.device) -> Found:
    """What this machine's ranks measure together; the slowest rank counts. Collective."""
    shapes = [*PRODUCTS, *(LARGE_PRODUCTS if device.type != "cpu" else ())]
    products = {name: [_product(shape, name, device) for shape in shapes] for name in _DTYPES}
    source = torch.zeros(_COPIED, device=device)
    target = torch.empty_like(source)
    copied = _slowest([typical(lambda: target.copy_(source), device)], world)
    launch = _slowest([_launch(torch.zeros(8, device=device), device)], world)
    memory = devices.total_memory(device) or psutil.virtual_memory().total / world.size
    found = Found(
        devices.name(device), device.type, torch.__version__, torch.get_num_threads(), world.size, float(memory),
        _processors(device), shapes, {name: _slowest(seconds, world) for name, seconds in products.items()},
        (2.0 * source.nbytes, *copied), launch[0],
        [] if world.size == 1 else _sums(world, device), _steps(probes(world.size), world),
    )  # fmt: skip
    comm.barrier(world)
    return found


def typical(call: Callable[[], object], device: torch.device, *, most: float = _MOST, least: int = 5) -> float:
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


def _product(shape: Sequence[int], dtype: str, device: torch.device) -> float:
    m, n, k = shape
    a, b = (torch.ones(size, dtype=getattr(torch, dtype), device=device) for size in ((m, k), (k, n)))
    out = torch.empty((m, n), dtype=a.dtype, device=device)
    repeats = max(1, 10**8 // (m * n * k)) if device.type == "cpu" else 10

    def repeated() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return typical(repeated, device) / repeats


def _launch(tensor: torch.Tensor, device: torch.device) -> float:
    def thousand() -> None:
        for _ in range(1000):
            tensor.add_(1)

    return typical(thousand, device) / 1000


def _sums(world: Group, device: torch.device) -> list[tuple[float, float]]:
    found = []
    for size in _SUMMED:
        whole = torch.zeros(size // 4, device=device)
        seconds = []
        for _ in range(20):
            comm.barrier(world)
            seconds.append(typical(lambda whole=whole: comm.all_reduce_(whole, world), device, most=0, least=1))  # type: ignore[misc]
        found.append((float(size), _slowest([undisturbed(seconds)], world)[0]))
    return found


def _steps(wanted: Sequence[Probe], world: Group) -> list[float]:
    """Seconds of a step of each miniature. They take turns, so that what else runs here disturbs all alike."""
    trainers = [trainer(probe) for probe in wanted]
    seconds: list[list[float]] = [[] for _ in wanted]
    for number in range(_ROUNDS + 1):
        for one, taken in zip(trainers, seconds, strict=True):
            comm.barrier(world)
            for _ in range(_STEPS if number else _WARM_UP):
                record = one.step()
                if number:
                    taken.append(record.seconds)
    return _slowest([undisturbed(taken) for taken in seconds], world)


def trainer(probe: Probe) -> Trainer:
    """A miniature training on random tokens. Collective."""
    config = probe.config()
    mesh = Mesh(tensor=config.parallel.tensor, pipeline=config.parallel.pipeline)
    text = random_text(config.model.vocab_size, 256, config.train.sequence_length)
    return build_trainer(config, mesh, text)


def _slowest(seconds: Sequence[float], world: Group) -> list[float]:
    everyone = comm.all_gather_objects(list(seconds), world)
    return [max(times) for times in zip(*everyone, strict=True)]


def _processors(device: torch.device) -> int:
    """Units that each take a tile of a matrix product; a rank on a CPU is one."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 1))
