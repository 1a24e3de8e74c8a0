"""A checkpoint belongs to the model: whatever layout wrote it, any other reads the same bits from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config
from tests.dist.checkpoints import Result, State, run, step_folder
from tests.dist.dense import run as on_ranks
from tests.dist.training import make_config

STEPS_BEFORE, STEPS_AFTER = 3, 10


def config_of(tensor: int = 1, sequence: bool = False, zero: int = 1, mode: str = "float32", **sections: Any) -> Config:
    return make_config(
        parallel={"tensor": tensor, "sequence": sequence},
        optimizer={"zero": zero, **sections.pop("optimizer", {})},
        precision={"mode": mode},
        **sections,
    )


def differences(found: State, wanted: State) -> list[str]:
    """Tensors that are missing, or differ in a bit."""
    names = {(state, name) for each in (found, wanted) for state, tensors in each.items() for name in tensors}
    return [
        f"{state} of {name}"
        for state, name in sorted(names)
        if state not in found or state not in wanted or not torch.equal(found[state][name], wanted[state][name])
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Result]:
    """A checkpoint that one process wrote, with the state in it and the losses that followed."""
    root = tmp_path_factory.mktemp("one")
    result = run(config_of(), STEPS_BEFORE, STEPS_AFTER, None, str(root))
    assert result.saved[0].problem is None, result.saved[0].problem
    return step_folder(root, STEPS_BEFORE), result


LAYOUTS = [
    (ranks, tensor, sequence, zero)
    for ranks in (1, 2, 4, 8, 16)
    for tensor in (1, 2, 4)
    if ranks % tensor == 0 and ranks // tensor <= 4
    for sequence in ((False, True) if tensor > 1 else (False,))
    for zero in (0, 1)
]
FEW = {(2, 1, False, 0), (2, 2, True, 1), (4, 4, True, 1), (4, 2, True, 0), (4, 1, False, 1), (4, 2, False, 1)}


@pytest.mark.parametrize(
    ("size", "tensor", "sequence", "zero"),
    [pytest.param(*each, marks=() if each in FEW else pytest.mark.slow) for each in LAYOUTS],
)
def test_reshard(
    size: int, tensor: int, sequence: bool, zero: int, written: tuple[str, Result], ranks: Any, tmp_path: Path
) -> None:
    """One process → this layout: bit-equal, and trains on alike; this layout → one process: bit-equal again."""
    source, wanted = written
    config = config_of(tensor, sequence, zero)
    found, *_ = on_ranks(ranks, size, run, config, 0, STEPS_AFTER, source, str(tmp_path))
    assert found.saved[0].problem is None, found.saved[0].problem
    assert not differences(found.state, wanted.state), "after loading"
    for step, (loss, reference) in enumerate(zip(found.losses, wanted.losses[STEPS_BEFORE:], strict=True), start=1):
        assert loss == pytest.approx(reference, rel=1e-5), f"loss {step} steps after loading"
    back = run(config_of(), 0, 0, step_folder(tmp_path, STEPS_BEFORE), None)
    assert not differences(back.state, wanted.state), "written by this layout, read by one process"
