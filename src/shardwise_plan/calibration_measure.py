"""The measurements of one rank: matrix products, copies, launches, collectives and steps of miniature trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch

from shardwise.config import Config, DtypeName
from shardwise.data.formats.prepared_data import random_tokens
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Group, Mesh
from shardwise.train.build import build_trainer
from shardwise.train.trainer import Trainer
from shardwise_plan.calibration_fit import (
    LARGE_PRODUCTS,
    PRODUCTS,
    Measurements,
    calibration_trainings,
    undisturbed_seconds,
)

_COPIED = 2**26  # elements of a copy: far more than caches hold
_SUM_BYTES = (64, 2**16, 2**20, 2**24)
_SUMS = 20  # repetitions of each all-reduce
_ROUNDS = 4  # turns of each miniature training: other work of the machine then disturbs all alike
_STEPS = 6  # steps in each turn
_WARM_UP = 2  # steps before the first turn, which allocate memory
_MOST_SECONDS = 0.4  # seconds for a measurement of a single operation, about
_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16")


def measure_machine(world: Group, device: torch.device) -> Measurements:
    """Measure the speeds of this machine for the planner on all its ranks; the slowest rank counts. Collective."""
    shapes = [*PRODUCTS, *(LARGE_PRODUCTS if device.type != "cpu" else ())]
    products = {name: [_product(shape, name, device) for shape in shapes] for name in _DTYPES}
    source = torch.zeros(_COPIED, device=device)
    target = torch.empty_like(source)
    (copy_seconds,) = _slowest([_typical_seconds(lambda: target.copy_(source), device)], world)
    (launch_seconds,) = _slowest([_launch(torch.zeros(8, device=device), device)], world)
    # Arguments are computed in this order on all ranks, as some are collective.
    measurements = Measurements(
        device=devices.name(device),
        type=device.type,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        ranks=world.size,
        memory=float(devices.total_memory(device) or psutil.virtual_memory().total / world.size),
        processors=_processors(device),
        shapes=shapes,
        products={name: _slowest(seconds, world) for name, seconds in products.items()},
        # A copy reads each byte once and writes it once.
        copied=(2.0 * source.nbytes, copy_seconds),
        launch=launch_seconds,
        sums=[] if world.size == 1 else _sums(world, device),
        steps=_steps(calibration_trainings(world.size), world),
    )
    collectives.barrier(world)
    return measurements


def _typical_seconds(
    call: Callable[[], object], device: torch.device, *, most: float = _MOST_SECONDS, least: int = 5
) -> float:
    """Return the seconds of an undisturbed call, by the device's clock, after a call that does not count.

    All calls take about `most` seconds, and there are `least` of them even if they take longer; calls of more than ten
    times `most` are made twice.
    """
    call()
    devices.synchronize(device)
    seconds: list[float] = []
    while len(seconds) < least or sum(seconds) < most:
        start = devices.mark_time(device)
        call()
        end = devices.mark_time(device)
        devices.synchronize(device)
        seconds.append(devices.seconds_between(start, end))
        if sum(seconds) > 10 * most and len(seconds) > 1:
            break
    return undisturbed_seconds(seconds)


def _product(shape: Sequence[int], dtype: str, device: torch.device) -> float:
    m, n, k = shape
    torch_dtype = getattr(torch, dtype)
    a = torch.ones((m, k), dtype=torch_dtype, device=device)
    b = torch.ones((k, n), dtype=torch_dtype, device=device)
    out = torch.empty((m, n), dtype=torch_dtype, device=device)
    # Small products are repeated until a clock can tell their time.
    repeats = max(1, 10**8 // (m * n * k)) if device.type == "cpu" else 10

    def repeated() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return _typical_seconds(repeated, device) / repeats


def _launch(tensor: torch.Tensor, device: torch.device) -> float:
    """Return the seconds from the start of a kernel to that of the next: the kernels of so small a tensor take less."""

    def thousand() -> None:
        for _ in range(1000):
            tensor.add_(1)

    return _typical_seconds(thousand, device) / 1000


def _sums(world: Group, device: torch.device) -> list[tuple[float, float]]:
    """Return the bytes of sums over all ranks, each with its seconds. Collective."""
    tensors = {size: torch.zeros(size // 4, device=device) for size in _SUM_BYTES}
    seconds: dict[int, list[float]] = {size: [] for size in _SUM_BYTES}
    for _ in range(_SUMS):
        for size, tensor in tensors.items():
            collectives.barrier(world)
            all_reduce = partial(collectives.all_reduce_, tensor, world)
            seconds[size].append(_typical_seconds(all_reduce, device, most=0, least=1))
    return [(float(size), _slowest([undisturbed_seconds(repeated)], world)[0]) for size, repeated in seconds.items()]


def _steps(miniatures: Sequence[Config], world: Group) -> list[float]:
    """Return the seconds of a step of each miniature; they take turns. Collective."""
    trainers = [_trainer(config) for config in miniatures]
    for miniature in trainers:
        for _ in range(_WARM_UP):
            miniature.step()
    seconds: list[list[float]] = [[] for _ in miniatures]
    for _ in range(_ROUNDS):
        for miniature, step_seconds in zip(trainers, seconds, strict=True):
            step_seconds += [miniature.step().seconds for _ in range(_STEPS)]
    return _slowest([undisturbed_seconds(step_seconds) for step_seconds in seconds], world)


def _trainer(miniature: Config) -> Trainer:
    """Build a miniature training on random tokens. Collective."""
    mesh = Mesh(**miniature.parallel.degrees, grains=miniature.grains)
    text = random_tokens(miniature.model.vocab_size, 256, miniature.train.sequence_length)
    return build_trainer(miniature, mesh, text)


def _slowest(seconds: Sequence[float], world: Group) -> list[float]:
    """Return the largest of all ranks' seconds, measurement by measurement. Collective."""
    by_rank = collectives.all_gather_objects(list(seconds), world)
    return [max(times) for times in zip(*by_rank, strict=True)]


def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 1))
