"""Precision modes train alike, and each finer key changes the dtype that it names."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.config import Config, load_config
from shardwise.data.open_data import prepare_data
from shardwise.distributed import collectives
from shardwise.layers import fp8
from shardwise.train.build import build_trainer
from tests.dist.cells import Cell, configuration, small
from tests.dist.checkpoints import run, step_folder
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import results
from tests.dist.dense import run as on_ranks
from tests.dist.training import MODEL, cases, make_config, make_data
from tests.sweeps import few

Losses = Callable[[str], tuple[float, float]]
KEYS = cases("precision")
"""Keys of `precision`, and the dtypes of parameters, gradients, their reduction and the optimizer."""
ZERO3, CONTEXT = small(
    Cell("llama", tensor=2, sequence=True, data=2, zero=3, matmul="fp8"),
    Cell("llama", tensor=2, context=2, batch=4, zero=1, matmul="fp8"),
)
PRECISION = {"mode": "float32", "matmul": "fp8"}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """By mode, or `fp8`: evaluation loss of `llama2-tiny` with two blocks, before training and after 60 steps."""
    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("cache")
    overrides = ["model.num_hidden_layers=2", "train.steps=60", "train.micro_batch=8", "train.eval_batches=4"]
    overrides += ["train.sequence_length=32"]
    modes = {mode: [f"precision.mode={mode}"] for mode in ("float32", "mixed", "bfloat16")}
    modes["fp8"] = ["precision.mode=null", "precision.matmul=fp8"]

    @functools.cache
    def train(mode: str) -> tuple[float, float]:
        config = load_config("llama2-tiny", [*overrides, *modes[mode]])
        trainer = build_trainer(config, shared_mesh(1), prepare_data(config, cache))
        before, _ = trainer.evaluator.held_out()
        for _ in range(config.train.steps):
            trainer.step()
        return before, trainer.evaluator.held_out()[0]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bfloat16", "mixed", "fp8"])
def test_mode_reaches_the_loss_of_float32(mode: str, losses: Losses) -> None:
    before, wanted = losses("float32")
    assert wanted < before - 1.0, f"float32 goes from {before} to {wanted} only: too little to compare with"
    _, found = losses(mode)
    assert abs(found - wanted) <= 0.02 * wanted, f"{mode} ends at {found}, float32 at {wanted}: more than 2 % apart"
    assert found != wanted, f"{mode} trains in float32"


def observe(config: Config) -> dict[str, set[str]]:
    """One step on a rank: the dtypes of what is held, and of the values that go over data parallelism.

    Counts of tokens are integers in any precision.
    """
    mesh = shared_mesh(1)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    seen: dict[str, set[str]] = {kind: set() for kind in ("reduce_scatter", "all_reduce", "all_gather")}
    plain = {kind: getattr(collectives, f"{kind}_async") for kind in seen}

    def recording(kind: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.is_floating_point():
                seen[kind].add(str(tensor.dtype))
            return plain[kind](tensor, *args, **options)

        return call

    try:
        for kind in seen:
            setattr(collectives, f"{kind}_async", recording(kind))
        trainer.step()
    finally:
        for kind, function in plain.items():
            setattr(collectives, f"{kind}_async", function)
    buckets = trainer.optimizer.buckets
    state = [value for values in trainer.optimizer._inner.state.values() for value in values.values() if value.dim()]
    held = {
        "parameter": {p.dtype for p in trainer.model.parameters()},
        "gradient": {b.gradients.dtype for b in buckets} | {p.grad.dtype for p in trainer.model.parameters()},
        "master": {b.master.dtype for b in buckets},
        "state": {value.dtype for value in state},
    }
    return {kind: {str(dtype) for dtype in found} for kind, found in held.items()} | seen


@pytest.mark.parametrize("zero", few([0, 1], 1))
def test_each_key_changes_what_it_names(zero: int, ranks: Any) -> None:
    configs = [(make_config(precision=keys, optimizer={"zero": zero}),) for keys, _ in KEYS]
    everyone = ranks(2).run(results, observe, configs)
    for (keys, expected), *of_ranks in zip(KEYS, *everyone, strict=True):
        parameter, gradient, reduce, optimizer = ({f"torch.{dtype}"} for dtype in expected)
        wire = {"reduce_scatter": reduce, "all_reduce": set(), "all_gather": parameter}
        if not zero:
            wire = {"reduce_scatter": set(), "all_reduce": reduce, "all_gather": set()}
        wanted = {"parameter": parameter, "gradient": gradient, "master": optimizer, "state": optimizer, **wire}
        for found in of_ranks:
            assert found == wanted, f"precision {keys}"


@dataclass
class Observed:
    """Losses of two steps, the scales of weights in both, and the others in each micro-batch of the first."""

    losses: list[float]
    of_weights: list[tuple[float, ...]]
    others: list[tuple[float, ...]]


def observe_scales(cell: Cell, keeps: bool = True) -> Observed:
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
    wanted = observe_scales(ZERO3.alone)
    found = ranks(4).run(observe_scales, ZERO3)
    assert len(set(wanted.others[0])) > 4, "equal scales would say little"
    for data_ranks in (found[0::2], found[1::2]):  # the tensor-parallel ranks of one number
        assert sorted(part for one in data_ranks for part in one.others) == sorted(wanted.others)
    assert found[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    for one in (wanted, *found):
        assert one.of_weights == wanted.of_weights, "scales of weights"
    assert len(wanted.of_weights) == 2 * configuration(ZERO3).known_shapes.num_hidden_layers, "once a step for a block"


def test_ranks_that_share_samples_scale_as_one_process(ranks: Any) -> None:
    wanted = observe_scales(CONTEXT.alone)
    assert len({*wanted.others[0]}) > 4, "equal scales would say little"
    for found in ranks(4).run(observe_scales, CONTEXT):
        assert found.others == wanted.others
        assert found.of_weights == wanted.of_weights


def test_scales_of_weights_are_those_that_each_product_would_compute() -> None:
    kept, computed = observe_scales(ZERO3.alone), observe_scales(ZERO3.alone, keeps=False)
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
