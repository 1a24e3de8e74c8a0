"""Neither training without a pipeline nor optimizers import torch's compiler, which takes as long as importing torch.

With it optimizers work as before. Nothing of torch is patched for that.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
before_import = dict(vars(torch.optim.Optimizer))
import shardwise.train.run
from shardwise import LAMB, ZeroRedundancyOptimizer
assert dict(vars(torch.optim.Optimizer)) == before_import
assert not hasattr(torch.optim.Optimizer.add_param_group.__wrapped__, "__dynamo_disable")

def train(optimizer_class, **options):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 4))
    optimizer = ZeroRedundancyOptimizer([weight], optimizer_class, lr=0.1, grad_clipping=False, **options)
    plain = weight.detach().clone().requires_grad_()
    for step in range(3):
        weight.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return weight.detach().clone()

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
classes = [(AdamW, {"fused": True}), (AdamW, {}), (SGD, {"momentum": 0.9}), (LAMB, {})]
before = [train(kind, **options) for kind, options in classes]
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
import torch._dynamo
after = [train(kind, **options) for kind, options in classes]
for (kind, _), a, b in zip(classes, before, after):
    assert torch.equal(a, b), f"{kind.__name__} trains differently once the compiler is there"
reference = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.AdamW([reference])
assert optimizer.add_param_group.__func__.__wrapped__.__dynamo_disable is not None
print("done")
"""


@pytest.mark.slow
def test_optimizers_leave_the_compiler_alone() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
