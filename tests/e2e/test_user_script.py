"""A user's own script in the ZeRO-1 tutorial's form trains as plain AdamW does."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.e2e.command import outcome, start

SCRIPT = Path(__file__).parents[2] / "examples" / "zero1.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zero1_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def reference() -> tuple[float, float]:
    """The example's model and data under torch.optim.AdamW, clipped at 1.0: loss before and after."""
    example = load()
    torch.manual_seed(0)
    model = example.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(step: int) -> torch.Tensor:
        inputs, targets = example.make_batch(step)
        return torch.nn.functional.cross_entropy(model(inputs), targets)

    first = loss_of(example.STEPS).item()
    for step in range(example.STEPS):
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return first, loss_of(example.STEPS).item()


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], id="alone"),
        # The batch does not divide by 3.
        pytest.param(
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"],
            id="torchrun-3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_trains_as_plain_adamw(launcher: list[str], tmp_path: Path) -> None:
    first, wanted = reference()
    assert wanted < 0.9 * first, "the example does not learn, so its loss shows nothing"
    done = outcome(start(at=tmp_path, program=(sys.executable, *launcher, str(SCRIPT))), timeout=120)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("final loss")]
    assert len(lines) == 1, done.out
    assert float(lines[0].split()[-1]) == pytest.approx(wanted, rel=1e-5)
    assert "Warning" not in done.err, done.err
