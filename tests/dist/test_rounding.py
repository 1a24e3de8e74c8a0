"""Stochastic rounding over real ranks: given equal gradients, weights and state are equal to the bit at any layout."""

import hashlib
from typing import Any

import pytest
import torch

from shardwise import comm
from shardwise.optim.state import state_slices, state_tensors
from shardwise.placement import placements
from shardwise.testing import canonical_weights
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import random, run
from tests.dist.test_lamb import MODELS
from tests.dist.training import make_config, make_data

STEPS = 3


def trained(
    name: str, tensor: int, pipeline: int, keys: dict[str, Any], rounding: str = "stochastic"
) -> dict[str, Any]:
    """Digests of canonical weights and moments after a few steps with gradients that are functions of their names."""
    config = make_config(
        model=MODELS[name],
        parallel={"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline},
        optimizer={"lr": 1e-2, "weight_decay": 0.1, **keys},
        precision={"mode": "bfloat16", "rounding": rounding},
    )
    mesh = shared_mesh(tensor, pipeline)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size, pairs=name == "bert"))
    for step in range(STEPS):
        for _, p, record in placements(trainer.model):
            for piece in record.pieces:
                # One rank has all of a sum over several: it is then exact in bfloat16.
                is_first = mesh.dp.rank == 0 and not (piece.partial and piece.copies.rank)
                values = random(1000 * step + sum(piece.name.encode()), *piece.shape)[piece.box.slices]
                assert p.grad is not None
                piece.of(p.grad).copy_(values if is_first else torch.zeros(()))
        trainer.optimizer.step()
    found = {piece: digest(value) for piece, value in canonical_weights(trainer.model, mesh.pp).items()}
    flats = state_tensors(trainer.optimizer)
    mine = [
        (state, part.piece.name, box_start, value)
        for state, by_bucket in flats.items()
        for part in state_slices(trainer.model, trainer.optimizer)
        for box_start, value in [(part.box, part.of(by_bucket[part.bucket]).clone())]
    ]
    whole: dict[str, torch.Tensor] = {}
    shapes = {piece.name: piece.shape for _, _, record in placements(trainer.model) for piece in record.pieces}
    for of_rank in comm.all_gather_objects((mine, shapes), mesh.world):
        for state, tensor_name, box, value in of_rank[0]:
            key = f"{state} of {tensor_name}"
            whole.setdefault(key, torch.full(of_rank[1][tensor_name], torch.nan, dtype=value.dtype))
            whole[key][box.slices] = value
    return found | {key: digest(value) for key, value in whole.items()}


def digest(value: torch.Tensor) -> str:
    return hashlib.blake2b(value.contiguous().view(torch.int16).numpy().tobytes(), digest_size=8).hexdigest()


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp4-zero1": (1, 1, {}),
    "dp4-zero0-small-buckets": (1, 1, {"zero": 0, "bucket_mib": 0.002}),
    "tp2-dp2-sp": (2, 1, {}),
    "tp4-sp": (4, 1, {}),
    "pp2-dp2": (1, 2, {"bucket_mib": 0.002}),
    "tp2-pp2": (2, 2, {}),
}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], dict[str, Any]]:
    return {}


@pytest.mark.parametrize(("model", "optimizer"), [("llama tied, biases", "adamw"), ("gpt", "lamb")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_moments_are_equal_to_the_bit(
    layout: str, model: str, optimizer: str, alone: dict[tuple[str, str], dict[str, Any]], ranks: Any
) -> None:
    """Fused, transposed, copied, padded, tied and replicated tensors; with clipping, and LAMB's ratios."""
    if (model, optimizer) not in alone:
        alone[model, optimizer] = trained(model, 1, 1, {"name": optimizer})
    tensor, pipeline, keys = LAYOUTS[layout]
    for found in run(ranks, 4, trained, model, tensor, pipeline, {"name": optimizer, **keys}):
        differ = [name for name, wanted in alone[model, optimizer].items() if found.get(name) != wanted]
        assert not differ, f"{len(differ)} tensors differ from those of one process: {differ[:5]}"
