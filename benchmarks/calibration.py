"""How well `shardwise plan` predicts this machine after `--calibrate`: seconds of a step, and bytes of a rank.

Calibration measures other models than those that are predicted here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import ranks
from measure import median
from report import ROOT, Report, Table, target

sys.path.insert(0, str(ROOT))

TENSOR, PIPELINE, DATA = (
    {"parallel.tensor": tensor, "parallel.pipeline": pipeline, "parallel.sequence": "false"}
    for tensor, pipeline in ((2, 1), (1, 2), (1, 1))
)
TIMED: list[tuple[str, dict[str, Any]]] = [
    ("llama2-tiny", DATA),
    ("llama2-tiny", DATA | {"optimizer.zero": 1, "train.micro_batch": 1}),
    ("llama2-tiny", DATA | {"train.recompute": "full"}),
    ("llama2-tiny", TENSOR),
    ("llama2-tiny", TENSOR | {"parallel.sequence": "true", "train.micro_batch": 4}),
    ("llama2-tiny", PIPELINE),
    ("llama2-tiny", PIPELINE | {"parallel.schedule": "interleaved", "parallel.virtual_stages": 2}),
    ("gpt3-tiny", DATA),
    ("gpt3-tiny", TENSOR | {"train.micro_batch": 4}),
    ("gpt3-tiny", PIPELINE | {"train.micro_batch": 2}),
]
MIXED = {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.sequence": "true"}
HELD: list[tuple[str, int, dict[str, Any]]] = [
    ("llama2-tiny", 2, DATA),
    ("llama2-tiny", 2, DATA | {"train.recompute": "full"}),
    ("llama2-tiny", 2, DATA | {"train.recompute": "selective", "optimizer.zero": 1}),
    ("llama2-tiny", 2, TENSOR),
    ("llama2-tiny", 2, TENSOR | {"parallel.sequence": "true"}),
    ("llama2-tiny", 2, PIPELINE),
    ("llama2-tiny", 2, PIPELINE | {"parallel.schedule": "gpipe"}),
    ("llama2-tiny", 2, PIPELINE | {"parallel.schedule": "interleaved", "parallel.virtual_stages": 2}),
    ("gpt3-tiny", 2, DATA),
    ("gpt3-tiny", 2, TENSOR | {"train.micro_batch": 4}),
    ("gpt3-tiny", 2, PIPELINE | {"train.micro_batch": 2}),
    ("gpt-neox-tiny", 2, DATA),
    ("gpt-neox-tiny", 2, TENSOR),
    ("llama2-tiny", 4, DATA | {"optimizer.zero": 1}),
    ("llama2-tiny", 4, MIXED),
    ("llama2-tiny", 4, {**DATA, "parallel.tensor": 4}),
    ("llama2-tiny", 4, {**DATA, "parallel.pipeline": 4}),
    ("gpt3-tiny", 4, MIXED | {"parallel.schedule": "gpipe"}),
    ("llama2-tiny", 8, MIXED | {"train.micro_batch": 1}),
    ("gpt3-tiny", 8, MIXED),
]
STEPS = 8


def run(rounds: int) -> Report:
    found, seconds = _times(rounds)
    times = [_timed(*cell, found, seconds[number]) for number, cell in enumerate(TIMED)]
    held = [_held(*cell) for cell in HELD]
    errors = {kind: [abs(one["predicted"] / one[kind] - 1) for one in times] for kind in ("undisturbed", "median")}
    bytes_ = {kind: [abs(one[f"expected_{kind}"] / one[kind] - 1) for one in held] for kind in ("state", "peak")}
    targets = []
    for text, values, limits in (
        ("step, undisturbed", errors["undisturbed"], (0.1, None)),
        ("memory at the peak", bytes_["peak"], (0.02, 0.05)),
        ("parameters, gradients and optimizer state", bytes_["state"], (0.02, 0.05)),
    ):
        targets.append(target(f"{text}, mean error", mean(values), limits[0], at_least=False))
        targets.append(target(f"{text}, worst error", max(values), limits[1] or limits[0], at_least=False))
    ms = [
        (
            one["name"],
            *(f"{one[kind] * 1e3:.1f}" for kind in ("undisturbed", "median", "predicted")),
            *(f"{one['predicted'] / one[kind] - 1:+.1%}" for kind in ("undisturbed", "median")),
        )
        for one in times
    ]
    kib = [
        (
            one["name"],
            *(f"{one[key] / 1024:,.1f}" for key in ("state", "expected_state", "peak", "expected_peak")),
            *(f"{one[f'expected_{kind}'] / one[kind] - 1:+.2%}" for kind in ("state", "peak")),
        )
        for one in held
    ]
    time_head = ("2 ranks, ms", "undisturbed", "median", "predicted", "off undisturbed", "off median")
    memory_head = ("KiB", "state", "predicted", "peak", "predicted", "state off", "peak off")
    return Report(
        "calibration",
        "Predicted and measured on this machine",
        [Table(time_head, ms, "Step time"), Table(memory_head, kib, "Memory of the rank that holds most")],
        {"times": times, "memory": held, "device": found, "load": list(os.getloadavg())},
        targets,
        [
            f"Seconds: of {rounds} rounds of {STEPS} steps by turns, the slower rank; undisturbed is what a tenth of "
            "the steps do not exceed, as in the calibration: what else runs can only make a step longer. "
            f"Against medians the mean error is {mean(errors['median']):.0%}, the worst {max(errors['median']):.0%}. "
            f"Load averages at the end of the measurement: {', '.join(f'{one:.1f}' for one in os.getloadavg())}.",
            "Memory: of live tensors, as operators return them and let them go, in the second step. State: parameters, "
            "gradients and the optimizer's moments. Python, torch and the allocator's gaps are not held by us and in "
            "neither number.",
        ],
    )


def _times(rounds: int) -> tuple[str, list[list[float]]]:
    """The device file, and of each layout the seconds of its steps on the slower rank. Measured by turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.yaml"
        command = [sys.executable, "-m", "shardwise", "plan", "--calibrate", "-o", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        text = path.read_text()
    cells = [[recipe, _overrides(keys)] for recipe, keys in TIMED]
    print("  steps", flush=True)
    measured = ranks.run("calibration", "stepped", 2, cells=cells, rounds=rounds)
    return text, [[max(pair) for pair in zip(*both, strict=True)] for both in zip(*measured, strict=True)]


def _overrides(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


def _name(recipe: str, keys: dict[str, Any]) -> str:
    shown = {key.partition(".")[2]: value for key, value in keys.items() if value not in (1, "false")}
    return f"{recipe}: {', '.join(f'{key} {value}' for key, value in shown.items()) or 'data parallel'}"


def _timed(recipe: str, keys: dict[str, Any], text: str, seconds: list[float]) -> dict[str, Any]:
    from shardwise.config import check_layout, load_config
    from shardwise_plan.calibration_fit import undisturbed_seconds
    from shardwise_plan.device_specs import Cluster, parse_device
    from shardwise_plan.step_time import step_time

    config = load_config(recipe, _overrides(keys))
    time = step_time(config, check_layout(config, 2), Cluster(parse_device("here", text, "here.yaml"), 1, 2))
    assert time is not None
    own = {"undisturbed": undisturbed_seconds(seconds), "median": median(seconds), "predicted": time.total}
    return {"name": _name(recipe, keys), **own, "parts": dict(time.rows()), "seconds": seconds}


def _held(recipe: str, world: int, keys: dict[str, Any]) -> dict[str, Any]:
    print(f"  memory: {world} ranks, {_name(recipe, keys)}", flush=True)
    measured = ranks.run("calibration", "held", world, recipe=recipe, overrides=_overrides(keys))
    return {"name": f"{world} ranks, {_name(recipe, keys)}", **max(measured, key=lambda one: one["peak"])}


def _trainer(recipe: str, overrides: list[str]) -> Any:
    from shardwise.config import load_config
    from shardwise.data.formats.prepared_data import random_tokens
    from shardwise.distributed.mesh import Mesh
    from shardwise.train.build import build_trainer

    config = load_config(recipe, overrides)
    return build_trainer(
        config,
        Mesh(**config.parallel.degrees),
        random_tokens(config.model.vocab_size, 128, config.train.sequence_length),
    )


def stepped(cells: list[tuple[str, list[str]]], rounds: int) -> list[list[float]]:
    """On one rank: seconds of the steps of each cell, which take turns."""
    import torch

    from shardwise.distributed import collectives
    from shardwise.distributed.mesh import join

    torch.set_num_threads(1)
    join()
    trainers = [_trainer(recipe, [*overrides, "train.steps=100000"]) for recipe, overrides in cells]
    seconds: list[list[float]] = [[] for _ in cells]
    for number in range(rounds + 1):
        for trainer, taken in zip(trainers, seconds, strict=True):
            collectives.barrier(trainer.mesh.world)
            for _ in range(STEPS if number else 2):
                start = time.perf_counter()
                trainer.step()
                if number:
                    taken.append(time.perf_counter() - start)
    return seconds


def held(recipe: str, overrides: list[str]) -> dict[str, float]:
    """On one rank: bytes of the state and at the peak of a step, and what was predicted of this pipeline rank."""
    import torch

    from shardwise.config import check_layout
    from shardwise.distributed.mesh import join
    from shardwise.estimates.memory import expected_memory
    from shardwise.train.step_meters import state_bytes_by_kind
    from tests.live_tensors import LiveTensors

    torch.set_num_threads(1)
    join()
    with LiveTensors() as live:
        trainer = _trainer(recipe, overrides)
        trainer.step()
        live.peak = 0
        trainer.step()
    mesh = trainer.mesh
    expected = expected_memory(
        trainer.config, check_layout(trainer.config, mesh.world.size), pipeline_rank=mesh.pp.rank
    )
    assert expected is not None
    state = sum(state_bytes_by_kind(trainer.model, trainer.optimizer).values())
    return {
        "state": state,
        "expected_state": expected.parameters + expected.gradients + expected.optimizer,
        "peak": live.peak,
        "expected_peak": expected.total,
    }
