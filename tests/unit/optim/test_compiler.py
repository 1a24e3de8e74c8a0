"""Training without a pipeline imports no compiler of torch, which takes as long as torch itself; nor do optimizers."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
before = dict(vars(torch.optim.Optimizer))
import shardwise.train.run
from shardwise import LAMB, ZeroRedundancyOptimizer
assert dict(vars(torch.optim.Optimizer)) == before, "torch was patched"
for kind, options in ((torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9}), (LAMB, {})):
    weight = torch.nn.Parameter(torch.randn(8, 4))
    optimizer = ZeroRedundancyOptimizer([weight], kind, lr=0.1, grad_clipping=False, **options)
    for _ in range(2):
        weight.pow(2).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
"""


@pytest.mark.slow
def test_optimizers_leave_the_compiler_alone() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
