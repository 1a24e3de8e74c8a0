"""Scripts with a training loop of their own, run as they are where torch finds an accelerator.

There `init_process_group()` makes groups that take no tensor of the CPU.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.arch.source import ROOT
from tests.arch.test_docs import SCRIPTS
from tests.e2e.command import Outcome, shardwise
from tests.e2e.test_user_script import SCRIPT, reference
from tests.rank_pool import Pools
from tests.strict import build

# `env`: in processes of their own, as those kept warm have imported torch without the device.
TORCHRUN = ("/usr/bin/env", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
PLAIN = "dist.init_process_group()"


def run(script: str, at: Path, **variables: str) -> Outcome:
    done = shardwise(script, at=at, program=TORCHRUN, timeout=60, **build.variables(), **variables)
    assert done.code == 0, done.err
    return done


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("name", "like_cuda", "backends"),
    [
        pytest.param("zero1.py", "1", "", id="ZeRO-1", marks=pytest.mark.slow),
        pytest.param(
            "zero1.py",
            "0",
            '"cpu:gloo,strict:strictccl"',
            id="ZeRO-1, unlike CUDA, a backend for each device",
            marks=pytest.mark.slow,
        ),
        pytest.param("layers.py", "0", "", id="layers, unlike CUDA", marks=pytest.mark.slow),
    ],
)
def test_the_readmes_loops(name: str, like_cuda: str, backends: str, tmp_path: Path) -> None:
    assert PLAIN in SCRIPTS[name]
    (tmp_path / name).write_text(SCRIPTS[name].replace(PLAIN, f"{PLAIN[:-1]}{backends})"), encoding="utf-8")
    run(name, tmp_path, STRICT_CUDA_LIKE=like_cuda)


def last_loss(script: str) -> float:
    """The last loss of a script, in a process whose groups are there already."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
            exec(script, names)
    finally:
        torch.set_default_device(None)
    return float(names["loss"])


@pytest.mark.parametrize("name", ["layers.py", pytest.param("zero1.py", marks=pytest.mark.slow)])
def test_the_readmes_loops_with_the_devices_backend_named(name: str, strict: Pools) -> None:
    """As after `init_process_group("nccl")`: ranks of the tests have no group that takes tensors of the CPU."""
    wanted = strict(2).run(last_loss, SCRIPTS[name])
    assert strict(2, like="other").run(last_loss, SCRIPTS[name]) == wanted


@pytest.mark.slow
@pytest.mark.usefixtures("strict")
def test_the_examples(tmp_path: Path) -> None:
    said = run(str(SCRIPT), tmp_path).out
    assert float(said.split()[-1]) == pytest.approx(reference()[1], rel=1e-5)
    run(str(ROOT / "examples/own_model/verify.py"), tmp_path)
