"""Products in fp8: scales on which ranks agree, ZeRO-3, checkpoints between layouts, models of a user's own.

`test_cells.py`, `test_bits.py` and `test_compiled_training.py` have cells with fp8 too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.layers import fp8
from shardwise.train.build import build_trainer
from tests.dist.cells import Cell, configuration, small
from tests.dist.checkpoints import run, step_folder
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import run as on_ranks
from tests.dist.training import MODEL, make_config, make_data

ZERO3, CONTEXT = small(
    Cell("llama", tensor=2, sequence=True, data=2, zero=3, matmul="fp8"),
    Cell("llama", tensor=2, context=2, batch=4, zero=1, matmul="fp8"),
)
PRECISION = {"mode": "float32", "matmul": "fp8"}


@dataclass
class Observed:
    """Losses of two steps, the scales of weights in both, and the others in each micro-batch of the first."""

    losses: list[float]
    of_weights: list[tuple[float, ...]]
    others: list[tuple[float, ...]]


def observe(cell: Cell, keeps: bool = True) -> Observed:
    """Train two steps on this rank; without `keeps` each product computes the scale of its weight."""
    of_weights: list[tuple[float, ...]] = []
    others: list[float] = []
    plain = fp8._scales

    def recording(tensors: list[Tensor], *arguments: Any) -> Any:
        found = plain(tensors, *arguments)
        if len(tensors) > 1:
            of_weights.append(tuple(map(float, found)))
        else:
            others.extend(map(float, found))
        return found

    config = configuration(cell)
    trainer = build_trainer(config, shared_mesh(cell.tensor, context=cell.context), make_data(config.model.vocab_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "_scales", recording)
        if not keeps:
            patch.setattr(fp8, "keep_scales", lambda *_: None)
        losses = [trainer.step().loss]
        count = len(others) // (cell.batch // cell.data // cell.micro_batch)
        by_micro_batch = [tuple(others[start : start + count]) for start in range(0, len(others), count)]
        losses.append(trainer.step().loss)
    return Observed(losses, of_weights, by_micro_batch)


def test_scales_and_losses_are_those_of_one_process(ranks: Any) -> None:
    wanted = observe(ZERO3.alone)
    found = ranks(4).run(observe, ZERO3)
    assert len(set(wanted.others[0])) > 4, "equal scales would say little"
    for data_ranks in (found[0::2], found[1::2]):  # the tensor-parallel ranks of one number
        assert sorted(part for one in data_ranks for part in one.others) == sorted(wanted.others)
    assert found[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    for one in (wanted, *found):
        assert one.of_weights == wanted.of_weights, "scales of weights"
    assert len(wanted.of_weights) == 2 * configuration(ZERO3).known_shapes.num_hidden_layers, "once a step for a block"


def test_ranks_that_share_samples_scale_as_one_process(ranks: Any) -> None:
    wanted = observe(CONTEXT.alone)
    assert len({*wanted.others[0]}) > 4, "equal scales would say little"
    for found in ranks(4).run(observe, CONTEXT):
        assert found.others == wanted.others
        assert found.of_weights == wanted.of_weights


def test_scales_of_weights_are_those_that_each_product_would_compute() -> None:
    kept, computed = observe(ZERO3.alone), observe(ZERO3.alone, keeps=False)
    assert kept.losses == computed.losses
    assert len(kept.others[0]) < len(computed.others[0])


def test_a_checkpoint_of_one_layout_is_read_by_another(ranks: Any, tmp_path: Path) -> None:
    wanted = run(make_config(precision=PRECISION), 2, 2, None, str(tmp_path))
    config = make_config(precision=PRECISION, parallel={"tensor": 2, "sequence": True})
    found = on_ranks(ranks, 2, run, config, 0, 2, step_folder(tmp_path, 2), None)[0]
    assert found.losses == pytest.approx(wanted.losses[2:], rel=1e-5)


def own_model(name: str, matmul: str | None, tensor: int = 1) -> list[float]:
    """The losses of a model of the user's own."""
    sizes = {key: MODEL[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    config = make_config(
        model={"family": f"examples.own_model.{name}:Decoder", "num_attention_heads": 4, **sizes},
        parallel={"tensor": tensor},
        train={"micro_batch": 1},
        precision={"mode": "float32", "matmul": matmul},
    )
    trainer = build_trainer(config, shared_mesh(tensor), make_data(config.model.vocab_size))
    return [trainer.step().loss for _ in range(2)]


def test_own_models_of_sharded_layers_multiply_in_fp8(ranks: Any) -> None:
    losses = own_model("sharded", "fp8")
    assert losses != pytest.approx(own_model("sharded", None), rel=1e-6)
    assert on_ranks(ranks, 2, own_model, "sharded", "fp8", 2)[0] == pytest.approx(losses, rel=1e-5)
    with pytest.raises(ConfigError, match="has no column- or row-parallel layer"):
        own_model("plain", "fp8")
