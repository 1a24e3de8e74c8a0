"""Arguments that neither ZeroRedundancyOptimizer nor the wrapped class takes are refused with what replaces them."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from shardwise import ZeroRedundancyOptimizer
from shardwise.config.other_names import ARGUMENTS
from tests.rows import rows_of
from tests.unit.optim.net import make

ROWS = rows_of(__file__)

NAMES = set(inspect.signature(ZeroRedundancyOptimizer).parameters)


@pytest.mark.parametrize(("given", "message"), ROWS["unknown"])
def test_unknown_options_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        ZeroRedundancyOptimizer(make().parameters(), torch.optim.AdamW, **given)
    assert message in str(raised.value)


def test_options_of_the_wrapped_class_are_its_own_and_what_replaces_others_is_taken() -> None:
    """Also where they have the name of a replaced one, or go through its `**options`."""

    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, *, clip_grad: float = 1.0, **options: Any) -> None:
            assert options.pop("pin_layout") is False
            super().__init__(params, lr, **options)

    ZeroRedundancyOptimizer(make().parameters(), Own, clip_grad=2.0, pin_layout=False, momentum=0.9)
    assert not NAMES & set(ARGUMENTS["optimizer"])
    for advice in ARGUMENTS["optimizer"].values():
        words = [word for word in advice.split() if "=" in word and not word.startswith("accumulate(")]
        assert {word.split("=")[0] for word in words} <= NAMES, advice


def test_the_first_positional_arguments_are_those_of_torch_xla() -> None:
    """None is torch_xla's default of optimizer_dtype."""
    parameters = make().bfloat16().parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, None, True, 0.5, lr=0.1)
    assert optimizer.defaults["lr"] == 0.1
    assert (optimizer.grad_clipping, optimizer.max_norm) == (True, 0.5)
    assert {bucket.master.dtype for bucket in optimizer.buckets} == {torch.float32}


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
