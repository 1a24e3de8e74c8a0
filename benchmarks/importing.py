"""Reading 1 GiB of torch's distributed checkpoint as checkpoint import does, beside the same bytes by safetensors."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import median
from report import Report, Table, target

RANKS, TENSORS, ROWS, COLUMNS = 2, 8, 8192, 4096
BYTES = TENSORS * ROWS * COLUMNS * 4
AT_MOST, SPARE = 1.3, 64 << 20
WAYS = {"rows": 0, "columns": 1}


def run(rounds: int) -> Report:
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        folder = Path(temporary)
        _in_its_own_process("write", folder)
        for number in range(rounds):
            for name in ("safetensors", *WAYS):
                print(f"  round {number + 1}/{rounds}: {name}", flush=True)
                found.setdefault(name, []).append(_in_its_own_process(name, folder))
    return _report(found)


def _in_its_own_process(name: str, folder: Path) -> Any:
    done = subprocess.run([sys.executable, __file__, name, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout or "null")


# ---- in a process of its own


def _write_rank(rank: int, folder: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    for name, dim in WAYS.items():
        state = {
            f"layers.{i}.weight": distribute_tensor(torch.randn(ROWS, COLUMNS), mesh, [Shard(dim)])
            for i in range(TENSORS)
        }
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
    dcp.save({"a": torch.zeros(2)}, checkpoint_id=f"{folder}/small")
    save_file({key: tensor.to_local() for key, tensor in state.items()}, f"{folder}/rank{rank}.safetensors")
    dist.destroy_process_group()


def write(folder: Path) -> None:
    torch.multiprocessing.spawn(_write_rank, (str(folder),), RANKS)


def _read_dcp(folder: Path) -> int:
    from shardwise_use.importing.torch_dcp import DcpFolder

    opened = DcpFolder.open(folder)
    return sum(memoryview(data).nbytes for tensor in opened.tensors.values() for data in tensor.segments())


def _read_safetensors(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                total += file.get_tensor(name).clone().nbytes
    return total


def read(name: str, folder: Path) -> dict[str, float]:
    """Seconds from the page cache, and the memory that reading added."""
    _read_dcp(folder / "small")  # imports what reading needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    count = _read_safetensors(folder) if name == "safetensors" else _read_dcp(folder / name)
    seconds = time.perf_counter() - start
    assert count == BYTES
    return {"seconds": seconds, "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


# ---- the table


def _report(found: dict[str, list[Any]]) -> Report:
    seconds = {name: median([each["seconds"] for each in results]) for name, results in found.items()}
    memory = {name: median([each["memory"] for each in results]) for name, results in found.items()}
    shard, base = BYTES // RANKS, seconds["safetensors"]
    rows = [
        [
            "safetensors" if name == "safetensors" else f"torch's checkpoint, cut by {name}",
            f"{seconds[name]:.2f} s",
            f"{seconds[name] / seconds['safetensors']:.2f}×",
            f"{memory[name] / 2**20:,.0f} MiB",
        ]
        for name in found
    ]
    return Report(
        "importing",
        "Reading another program's checkpoint",
        [Table(("1 GiB from two ranks' files", "time", "of safetensors", "memory"), rows)],
        {"seconds": seconds, "memory": memory},
        [
            *(target(f"time by {way} of safetensors'", seconds[way] / base, AT_MOST, at_least=False) for way in WAYS),
            target("MiB of memory", max(memory[w] for w in WAYS) / 2**20, (shard + SPARE) / 2**20, at_least=False),
        ],
        ["From the page cache, one thread; each tensor is in memory once it was read."],
    )


if __name__ == "__main__":
    name, place = sys.argv[1:]
    if name == "write":
        write(Path(place))
    else:
        print(json.dumps(read(name, Path(place))))
