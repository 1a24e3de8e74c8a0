"""Stochastic rounding over real ranks: given equal gradients, weights and state are equal to the bit at any layout."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.distributed.placement import placements
from shardwise.optim.state import state_bytes
from shardwise.optim.state_hash import StateSums
from shardwise.train.build import build_trainer
from tests.dist.checkpoints import canonical_state, load, make_trainer, save, step_folder
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import random, run
from tests.dist.training import SMALL_MODELS, cases, make_config, make_data

STEPS = 3
LAYOUTS = cases("rounding")
OFTEN = (("dp4-zero3", "adamw"), ("tp2-dp2-sp", "lamb"), ("tp2-pp2", "lamb"))
CELLS = [
    pytest.param(layout, model, optimizer, marks=() if (layout, optimizer) in OFTEN else pytest.mark.slow)
    for layout in LAYOUTS
    for model, optimizer in (("llama tied, biases", "adamw"), ("gpt", "lamb"), ("gpt", "muon"))
]


def trained(
    name: str,
    tensor: int,
    pipeline: int,
    keys: dict[str, Any],
    rounding: str | None = None,
    seed: int = 7,
    moments: str | None = None,
) -> dict[str, str]:
    """Digests of canonical weights and moments, and the sums of the state's hash, after steps with given gradients."""
    config = make_config(
        model=SMALL_MODELS[name],
        parallel={"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, **keys},
        precision={"mode": "mixed" if moments else "bfloat16", "rounding": rounding, "moments": moments},
        train={"seed": seed},
    )
    mesh = shared_mesh(tensor, pipeline)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size, pairs=name == "bert"))
    for step in range(STEPS):
        for _, p, record in placements(trainer.model):
            if p.grad is None:  # from stage 2 of ZeRO on
                p.grad = torch.zeros(p.shape, dtype=p.grad_dtype, device=p.device)
            for piece in record.pieces:
                # One rank has all of a sum over several: it is then exact in bfloat16.
                is_first = mesh.dp.rank == 0 and not (piece.partial and piece.copies.rank)
                values = random(1000 * step + sum(piece.name.encode()), *piece.shape)[piece.box.slices]
                piece.of(p.grad).copy_(values if is_first else torch.zeros(()))
        trainer.optimizer.step()
    state = canonical_state(trainer)
    found = {f"{kind} of {name}": digest(value) for kind, of_kind in state.items() for name, value in of_kind.items()}
    return found | {"sums": json.dumps(StateSums(trainer.model, trainer.optimizer, mesh).measure(), sort_keys=True)}


def digest(value: Tensor) -> str:
    """Short enough to be sent to the test's own process."""
    return hashlib.blake2b(value.float().numpy().tobytes(), digest_size=8).hexdigest()


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], dict[str, str]]:
    return {}


@pytest.mark.parametrize(("layout", "model", "optimizer"), CELLS)
def test_weights_and_moments_are_equal_to_the_bit(
    layout: str, model: str, optimizer: str, alone: dict[tuple[str, str], dict[str, str]], ranks: Any
) -> None:
    """Fused, transposed, copied, padded, tied and replicated tensors; clipping, LAMB's ratios, Muon's matrices."""
    if (model, optimizer) not in alone:
        alone[model, optimizer] = trained(model, 1, 1, {"name": optimizer})
    tensor, pipeline, keys = LAYOUTS[layout]
    for found in run(ranks, 4, trained, model, tensor, pipeline, {"name": optimizer, **keys}):
        differ = [name for name, wanted in alone[model, optimizer].items() if found.get(name) != wanted]
        assert not differ, f"{len(differ)} tensors differ from those of one process: {differ[:5]}"


def test_bfloat16_moments_of_float32_masters_are_equal_to_the_bit(ranks: Any) -> None:
    case: tuple[str, int, int, dict[str, Any]] = ("llama tied, biases", 1, 1, {"max_norm": None})
    alone = trained(*case, moments="bfloat16")
    name, *_, keys = case
    for tensor, pipeline, cut in ((1, 1, {"zero": 3}), (2, 2, {"bucket_mib": 0.002})):
        for found in run(ranks, 4, trained, name, tensor, pipeline, keys | cut, None, 7, "bfloat16"):
            assert found == {tensor_name: alone[tensor_name] for tensor_name in found}
            assert {tensor_name.partition(" ")[0] for tensor_name in found} == {
                "model", "master", "exp_avg", "exp_avg_sq", "sums",
            }  # fmt: skip


@pytest.mark.parametrize(("saved", "read"), [(16, 16), (16, 32), (32, 16)])
def test_checkpoints_are_read_with_moments_of_either_dtype(saved: int, read: int, tmp_path: Path) -> None:
    """A resume with the same dtype goes on to the bit."""
    names = {16: "bfloat16", 32: "float32"}
    config, other = (make_config(precision={"mode": "mixed", "moments": names[bits]}) for bits in (saved, read))
    before, resumed = make_trainer(config), make_trainer(other)
    before.step()
    assert save(before, str(tmp_path))[0].problem is None
    kept = before.optimizer.state_bytes()
    size = state_bytes(before.optimizer, config.optimizer.spec, all_masters=False)
    assert size == kept["state"] + kept["masters"]
    load(resumed, step_folder(tmp_path, 1))
    state = canonical_state(resumed)
    for kind, values in canonical_state(before).items():
        for name, value in values.items():
            expected = value.to(getattr(torch, names[read])) if kind.startswith("exp_avg") else value
            assert torch.equal(state[kind][name].float(), expected.float()), f"{kind} of {name}"
    losses, again = ([trainer.step().loss for _ in range(2)] for trainer in (before, resumed))
    assert again == losses if read == saved else again == pytest.approx(losses, rel=1e-2)


def test_the_configuration_chooses_rounding_and_its_seed() -> None:
    case = ("gpt", 1, 1, {"name": "adamw", "max_norm": None})
    found = [trained(*case, **keys) for keys in ({}, {"rounding": "stochastic"}, {"seed": 8}, {"rounding": "nearest"})]
    assert found[0] == found[1], "stochastic is the default"
    for other, what in ((found[2], "another train.seed"), (found[3], "rounding to nearest")):
        moments = [name for name in other if name.startswith("exp_avg ")]
        assert all(other[name] != found[0][name] for name in moments), f"{what} gives the same moments"
