"""The hash of a training's state over real ranks: equal state has equal hashes at any layout, other state has not."""

from typing import Any

import pytest
import torch

from shardwise.base.tensor_box import Box
from shardwise.optim.state import state_slices, state_tensors
from shardwise.optim.state_digest import TensorSums, box_sum
from shardwise.optim.state_hash import StateSums
from shardwise.train.build import build_trainer
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import random, run
from tests.dist.training import SMALL_MODELS, make_config, make_data
from tests.sweeps import few


def sums(
    model: str, tensor: int, pipeline: int, mode: str, keys: dict[str, Any]
) -> tuple[TensorSums, dict[str, dict[str, int]]]:
    """The sums of a model whose weights and moments are functions of their names, and those of whole tensors."""
    optimizer = dict(keys)
    replicate = optimizer.pop("replicate", 1)
    config = make_config(
        model=SMALL_MODELS[model],
        parallel={"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline, "replicate": replicate},
        optimizer=optimizer,
        precision={"mode": mode},
    )
    mesh = shared_mesh(tensor, pipeline)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size, pairs=model == "bert"))
    trainer.step()
    tensors = {}
    for part in state_slices(trainer.model, trainer.optimizer):
        flats = {state: by_bucket[part.bucket] for state, by_bucket in state_tensors(trainer.optimizer).items()}
        if "master" not in flats:
            flats["model"] = part.bucket.master.detach()
        for state, flat in flats.items():
            values = random(sum(f"{state}/{part.piece.name}".encode()), *part.piece.shape).to(flat.dtype)
            part.of(flat).copy_(values[part.box.slices])
            tensors[state, part.piece.name] = values
    wanted: dict[str, dict[str, int]] = {}
    for (state, name), values in tensors.items():
        bits = values.contiguous().view(torch.int16 if values.itemsize == 2 else torch.int32)
        shape = tuple(values.shape)
        wanted.setdefault(state, {})[name] = box_sum(bits.numpy(), shape, Box.whole(shape))
    return StateSums(trainer.model, trainer.optimizer, mesh).measure(), wanted


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp4-zero1": (1, 1, {}),
    "dp4-replicate2-zero3": (1, 1, {"zero": 3, "replicate": 2}),
    "dp4-zero0-small-buckets": (1, 1, {"zero": 0, "bucket_mib": 0.002}),
    "tp2-dp2-zero3": (2, 1, {"zero": 3}),
    "tp2-pp2": (2, 2, {}),
}


CASES = [("llama tied, biases", "mixed"), ("gpt", "bfloat16")]


@pytest.mark.parametrize(("model", "mode"), few(CASES, CASES[0]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_the_sums(layout: str, model: str, mode: str, ranks: Any) -> None:
    """Fused, transposed, copied, padded and tied tensors have the sums of whole tensors, by another implementation."""
    tensor, pipeline, keys = LAYOUTS[layout]
    results = run(ranks, 4, sums, model, tensor, pipeline, mode, keys)
    wanted: dict[str, dict[str, int]] = {}
    for _, local in results:
        for state, by_name in local.items():
            wanted.setdefault(state, {}).update(by_name)
    for found, _ in results:
        assert found == wanted
