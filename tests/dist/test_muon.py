"""Muon and stochastic rounding over real ranks: given equal gradients, any layout has the weights of one process."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import Config
from shardwise.distributed.placement import placements
from shardwise.optim import muon
from shardwise.optim.state import state_bytes
from shardwise.optim.state_hash import StateSums
from shardwise.train.build import build_trainer
from shardwise.train.trainer import Trainer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist import checkpoints
from tests.dist.cells import DROPOUT
from tests.dist.checkpoints import canonical_state, load, make_trainer, save, step_folder
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import random, run
from tests.dist.training import FAMILIES, SMALL_MODELS, cases, make_config, make_data, sizes
from tests.sweeps import few

STEPS = 3
LR, ADAMW_LR, DECAY = 1e-2, 4e-3, 0.1
SIZES = sizes(spread=0.05)
BLOCK_NAMES = ("layers.", ".h.", ".layer.")
IN_OUT = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
LAYOUTS = cases("muon")
OFTEN = (("tp4-heads", "llama"), ("tp2-dp2-zero1-sp", "llama tied, biases"))
ROUNDED = cases("rounding")
ROUNDED_OFTEN = (("dp4-zero3", "adamw"), ("tp2-dp2-sp", "lamb"), ("tp2-pp2", "lamb"))
MOVED = (("llama tied, biases", "adamw"), ("gpt", "lamb"), ("gpt", "muon"))
CELLS = [(layout, *moved) for layout in ROUNDED for moved in MOVED]


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


def step_with(gradients: dict[str, Tensor], trainer: Trainer) -> None:
    """Of sums over ranks one rank has all: they are then exact in bfloat16."""
    for _, p, record in placements(trainer.model):
        if p.grad is None:  # from stage 2 of ZeRO on
            p.grad = torch.zeros(p.shape, dtype=p.grad_dtype, device=p.device)
        for piece in record.pieces:
            is_first = trainer.mesh.dp.rank == 0 and not (piece.partial and piece.copies.rank)
            values = gradients[piece.name][piece.box.slices]
            piece.of(p.grad).copy_(values if is_first else torch.zeros(()))
    trainer.optimizer.step()


def errors_of_weights(name: str, tensor: int, pipeline: int, keys: dict[str, Any], split_heads: bool) -> float:
    """The largest difference from torch's Muon and AdamW, on every canonical tensor, after a few given gradients."""
    options = {"ns_dtype": "bfloat16", "adamw_lr": ADAMW_LR, "split_heads": split_heads}
    config = make_config(
        model=SMALL_MODELS[name],
        parallel={"tensor": tensor, "sequence": tensor > 1, "pipeline": pipeline},
        optimizer={"name": "muon", "lr": LR, "weight_decay": DECAY, "max_norm": None, "muon": options, **keys},
    )
    trainer = make_trainer(config)
    mesh = trainer.mesh
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
        step_with(gradients, trainer)
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


@pytest.mark.parametrize(("family", "parallel", "zero"), few(cases("matrices of muon")))
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
    trainer = make_trainer(config)
    before = canonical_weights(trainer.model, trainer.mesh.pp, optimizer=trainer.optimizer)
    for step in range(STEPS):
        step_with({n: random(1000 * step + sum(n.encode()), *t.shape) for n, t in before.items()}, trainer)
    state = canonical_state(trainer)
    found = {f"{kind} of {name}": digest(value) for kind, of_kind in state.items() for name, value in of_kind.items()}
    return found | {
        "sums": json.dumps(StateSums(trainer.model, trainer.optimizer, trainer.mesh).measure(), sort_keys=True)
    }


def digest(value: Tensor) -> str:
    """Short enough to be sent to the test's own process."""
    return hashlib.blake2b(value.float().numpy().tobytes(), digest_size=8).hexdigest()


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], dict[str, str]]:
    return {}


@pytest.mark.parametrize(
    ("layout", "model", "optimizer"), few(CELLS, *(cell for cell in CELLS if cell[::2] in ROUNDED_OFTEN))
)
def test_weights_and_moments_are_equal_to_the_bit(
    layout: str, model: str, optimizer: str, alone: dict[tuple[str, str], dict[str, str]], ranks: Any
) -> None:
    """Fused, transposed, copied, padded, tied and replicated tensors; clipping, LAMB's ratios, Muon's matrices."""
    if (model, optimizer) not in alone:
        alone[model, optimizer] = trained(model, 1, 1, {"name": optimizer})
    tensor, pipeline, keys = ROUNDED[layout]
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
