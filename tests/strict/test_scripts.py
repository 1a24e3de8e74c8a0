"""Scripts with a training loop of their own, run as they are where torch finds an accelerator.

There `init_process_group()` makes groups that take no tensor of the CPU.
"""

import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.arch.test_docs import SCRIPTS
from tests.e2e.command import Outcome, shardwise
from tests.e2e.test_user_script import SCRIPT, reference
from tests.strict import build

# `env`: in processes of their own, as those kept warm have imported torch without the device.
TORCHRUN = ("/usr/bin/env", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def run(script: str, at: Path) -> Outcome:
    done = shardwise(script, at=at, program=TORCHRUN, **build.variables())
    assert done.code == 0, done.err
    return done


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_readmes_loops(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SCRIPTS[name], encoding="utf-8")
    run(name, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("strict")
def test_the_examples(tmp_path: Path) -> None:
    said = run(str(SCRIPT), tmp_path).out
    assert float(said.split()[-1]) == pytest.approx(reference()[1], rel=1e-5)
    run(str(ROOT / "examples/own_model/verify.py"), tmp_path)
