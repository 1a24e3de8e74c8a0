"""Muon over real ranks: each matrix is orthogonalized whole and once, however it is cut."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import Config
from shardwise.distributed.placement import placements
from shardwise.optim import muon
from shardwise.train.build import build_trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist import checkpoints
from tests.dist.cells import DROPOUT
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import random
from tests.dist.training import FAMILIES, SMALL_MODELS, cases, make_config, make_data, sizes
from tests.sweeps import few

STEPS = 3
LR, ADAMW_LR, DECAY = 1e-2, 4e-3, 0.1
SIZES = sizes(spread=0.05)
BLOCK_NAMES = ("layers.", ".h.", ".layer.")
IN_OUT = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
LAYOUTS = cases("muon")
OFTEN = (("tp4-heads", "llama"), ("tp2-dp2-zero1-sp", "llama tied, biases"))


def matrices_of(name: str, tensor: Tensor, head_dim: int, split_heads: bool) -> list[Tensor]:
    """The matrices `[out, in]` of a canonical tensor, as its family's file format has them."""
    if name.endswith(IN_OUT):
        tensor = tensor.t()
    whole = [tensor]
    if name.endswith("c_attn.weight"):
        whole = list(tensor.chunk(3))
    elif name.endswith("query_key_value.weight"):
        whole = [part.flatten(0, 1) for part in tensor.unflatten(0, (-1, 3, head_dim)).unbind(1)]
    is_attention = name.endswith(("c_attn.weight", "query_key_value.weight")) or any(
        f"{part}.weight" in name for part in ("q_proj", "k_proj", "v_proj", "query", "key", "value")
    )
    if split_heads and is_attention:
        whole = [head for matrix in whole for head in matrix.split(head_dim)]
    return whole


def is_of_muon(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and any(part in name for part in BLOCK_NAMES)


def errors_of_weights(name: str, tensor: int, pipeline: int, keys: dict[str, Any], split_heads: bool) -> float:
    """The largest difference from torch's Muon and AdamW, on every canonical tensor, after a few given gradients."""
    options = {"ns_dtype": "bfloat16", "adamw_lr": ADAMW_LR, "split_heads": split_heads}
    config = make_config(
        model=SMALL_MODELS[name],
        parallel={"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline},
        optimizer={"name": "muon", "lr": LR, "weight_decay": DECAY, "max_norm": None, "muon": options, **keys},
    )
    mesh = shared_mesh(tensor, pipeline)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size, pairs=name == "bert"))
    head_dim = config.known_shapes.head_dim
    before = canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer)
    parts = {
        n: [
            nn.Parameter(m.clone(memory_format=torch.contiguous_format))
            for m in (matrices_of(n, t, head_dim, split_heads) if is_of_muon(n, t) else [t])
        ]
        for n, t in before.items()
    }
    matrices = [p for n, t in before.items() if is_of_muon(n, t) for p in parts[n]]
    others = [(n, t) for n, t in before.items() if not is_of_muon(n, t)]
    optimizers = [
        torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        *(torch.optim.AdamW(parts[n], lr=ADAMW_LR, weight_decay=DECAY if t.dim() == 2 else 0.0) for n, t in others),
    ]
    for step in range(STEPS):
        gradients = {n: random(1000 * step + sum(n.encode()), *t.shape) for n, t in before.items()}
        for _, p, record in placements(trainer.model):
            if p.grad is None:  # from stage 2 of ZeRO on
                p.grad = torch.zeros(p.shape, dtype=p.grad_dtype, device=p.device)
            for piece in record.pieces:
                is_first = mesh.dp.rank == 0 and not (piece.partial and piece.copies.rank)
                values = gradients[piece.name][piece.box.slices]
                piece.of(p.grad).copy_(values if is_first else torch.zeros(()))
        trainer.optimizer.step()
        for n, t in before.items():
            of_parts = matrices_of(n, gradients[n], head_dim, split_heads) if is_of_muon(n, t) else [gradients[n]]
            for part, gradient in zip(parts[n], of_parts, strict=True):
                part.grad = gradient.clone(memory_format=torch.contiguous_format)
        for optimizer in optimizers:
            optimizer.step()
    worst = 0.0
    for n, t in canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer).items():
        found = matrices_of(n, t, head_dim, split_heads) if is_of_muon(n, t) else [t]
        for part, value in zip(parts[n], found, strict=True):
            worst = max(worst, float((part.detach() - value).abs().max()))
    return worst


@pytest.mark.parametrize(("layout", "name"), few(itertools.product(LAYOUTS, SMALL_MODELS), *OFTEN))
def test_canonical_matrices_move_as_by_torchs_muon(name: str, layout: str, ranks: Any) -> None:
    """Fused, transposed, interleaved, copied and tied tensors; at a bound that rounding in bfloat16 alone would break.

    Equal matrices give equal iterations, so that bfloat16 costs nothing.
    """
    for worst in ranks(4).run(errors_of_weights, name, *LAYOUTS[layout]):
        assert worst <= 1e-6


def test_one_process_moves_as_torchs_muon() -> None:
    for name in SMALL_MODELS:
        assert errors_of_weights(name, 1, 1, {}, False) <= 1e-6, name


def configuration(family: str, parallel: dict[str, Any], zero: int) -> Config:
    return make_config(
        model=SIZES | FAMILIES[family] | dict.fromkeys(DROPOUT[family], 0.0),
        parallel=parallel,
        optimizer={"name": "muon", "lr": 3e-3, "zero": zero, "bucket_mib": 0.02},
        train={"micro_batch": 1},
    )


def losses_and_iterations(config: Config, steps: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses of a training, and the shapes of the matrices that this rank iterates on in one step."""
    torch.set_num_threads(1)
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline, tuple(config.grains.items()))
    data = make_data(config.model.vocab_size, pairs="nsp" in config.model.objectives)
    trainer = build_trainer(config, mesh, data)
    shapes: list[tuple[int, ...]] = []
    orthogonalized = muon.orthogonalized

    def counted(matrix: Tensor, count: int) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return orthogonalized(matrix, count)

    losses = [trainer.step().loss for _ in range(steps - 1)]
    with patch.object(muon, "orthogonalized", counted):
        losses.append(trainer.step().loss)
    return losses, shapes


@pytest.mark.parametrize(
    ("family", "parallel", "zero"),
    few(
        [
            ("gpt", {"tensor": 2, "sequence": True, "pipeline": 2}, 1),
            ("gpt_neox", {"tensor": 2}, 0),
            ("bert", {"replicate": 2}, 3),
        ],
    ),
)
def test_each_matrix_is_iterated_on_once(family: str, parallel: dict[str, Any], zero: int, ranks: Any) -> None:
    """By ranks that have equal work; and the losses are those of one process."""
    wanted, shapes = losses_and_iterations(configuration(family, {}, 0), STEPS)
    every_rank = ranks(4).run(losses_and_iterations, configuration(family, parallel, zero), STEPS)
    for losses, _ in every_rank:
        assert losses == pytest.approx(wanted, rel=1e-5)
    assert sorted(shape for _, of_rank in every_rank for shape in of_rank) == sorted(shapes)
    work = [sum(rows * columns * min(rows, columns) for rows, columns in of_rank) for _, of_rank in every_rank]
    largest = max(rows * columns * min(rows, columns) for rows, columns in shapes)
    assert max(work) - min(work) <= largest


def test_momentum_is_the_same_to_the_bit_at_another_layout(ranks: Any, tmp_path: Path) -> None:
    """Saved by TP 2 × DP 2 under ZeRO-1, of GPT's transposed and merged tensors; read by two other layouts."""
    source = configuration("gpt", {"tensor": 2, "sequence": True}, 1)
    saved = ranks(4).run(checkpoints.run, source, 2, 0, None, str(tmp_path))[0].state
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq"} <= set(saved)
    name = next(name for name in saved["model"] if name.endswith("c_attn.weight"))
    assert saved["momentum_buffer"][name].any()
    assert not saved["exp_avg"][name].any()
    (folder,) = tmp_path.glob("*")
    for parallel, zero in (({"tensor": 4}, 0), ({"pipeline": 2}, 1)):
        config = configuration("gpt", parallel, zero)
        found = ranks(4).run(checkpoints.run, config, 0, 0, str(folder), None)[0].state
        for state, tensors in saved.items():
            for tensor, values in tensors.items():
                assert torch.equal(found[state][tensor], values), f"{state} of {tensor} at {parallel}"
