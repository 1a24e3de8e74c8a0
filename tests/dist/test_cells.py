"""Any layout, the same training: each cell of the array against one process, and against what `cost` computes.

A cell is trained once, when the first question about it is asked.
"""

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch

from shardwise.config import Schedule, check_layout
from shardwise.estimates.communication import evaluation_transfers, step_transfers, wire_bytes
from shardwise.estimates.memory import memory_by_rank
from shardwise.models.parameter_counts import local_parameter_count
from shardwise.pipeline.partition import stage_plan
from shardwise.verify.canonical_values import gradient_errors
from tests.dist import cells
from tests.dist.cells import (
    COVERING,
    EIGHT_RANKS,
    RANKS,
    Cell,
    Measured,
    array,
    cells_of,
    configuration,
    measure,
    small,
)
from tests.dist.training import FAMILIES

AGAIN = "keys and values, gathered again"
STATE_BYTES = {"float32": 8, "mixed": 12, "bfloat16": 4}
CURVES = small(*cells_of("curves"))
MIXED = small(*(Cell("gpt", schedule=one, pipeline=2, data=2, zero=1, mode="mixed") for one in get_args(Schedule)))
OTHER_PRECISIONS = (*MIXED, *small(*cells_of("other precisions")))
SPECIAL = small(*cells_of("special cells"))
LIKE_LLAMA = small(*cells_of("cells like Llama"))
FP8 = small(*cells_of("fp8 cells"))
CELLS = [*COVERING, *CURVES, *SPECIAL, *LIKE_LLAMA, *FP8, *EIGHT_RANKS]
SELDOM = {*CURVES[1:], SPECIAL[1], *LIKE_LLAMA[1:], *FP8[1:], *EIGHT_RANKS, *OTHER_PRECISIONS[1:8]}
"""What differs from cells that always run by a fact of the model, or by a schedule."""
Train = Callable[[Cell], list[Measured]]


def steps(cell: Cell) -> int:
    return cells.CURVE if cell in CURVES else cells.STEPS


@functools.cache
def _in_one_process(cell: Cell, count: int) -> Measured:
    return measure(cell, count)


def one_process(cell: Cell) -> Measured:
    """The same training without any parallelism."""
    return _in_one_process(cell.alone, steps(cell))


@pytest.fixture(scope="module")
def trained(ranks: Any) -> Iterator[Train]:
    """What every rank of a cell measured."""

    @functools.cache
    def train(cell: Cell) -> list[Measured]:
        found: list[Measured] = ranks(cell.world).run(measure, cell, steps(cell))
        return found

    yield train
    ranks(RANKS).close()  # gloo has a thread for each of many groups, which wakes a hundred times a second
    _in_one_process.cache_clear()


def alone(cell: Cell, trained: Train) -> Measured:
    """The same training in one process, with fp8 on the ranks' device.

    Where another device's numbers differ in the last bit, some are rounded to another number of 8 bits.
    """
    if cell.matmul is not None and os.environ.get("TEST_DEVICE", "cpu") != "cpu":
        return trained(cell.alone)[0]
    return one_process(cell)


def whole(everyone: list[Measured], what: str) -> dict[str, torch.Tensor]:
    """All stages' tensors; those that two stages hold (a tied weight) are equal there."""
    found: dict[str, torch.Tensor] = {}
    for one in everyone:
        for name, tensor in getattr(one, what).items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name} differs between two pipeline stages"
    return found


def by_name(given: Any) -> Any:
    marked = [pytest.param(cell, marks=pytest.mark.slow if cell in SELDOM else ()) for cell in given]
    return pytest.mark.parametrize("cell", marked, ids=lambda cell: cell.name)


@pytest.mark.slow
def test_every_two_choices_that_can_meet_do() -> None:
    met = set(itertools.chain.from_iterable(map(cells.pairs, array())))
    assert met == cells.possible_pairs()
    assert len(array()) <= 45, "the array has grown: does each new choice need an axis of its own?"
    assert {cell.family for cell in CURVES} == {cell.family for cell in array()}
    assert set().union(*map(cells.chosen, COVERING)) == set().union(*map(cells.chosen, array()))


def check_gradients(everyone: list[Measured], one: Measured) -> None:
    errors = gradient_errors(whole(everyone, "gradients"), one.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e} of its norm"


@by_name(CELLS)
def test_weights_gradients_and_losses_are_those_of_one_process(cell: Cell, trained: Train) -> None:
    everyone, one = trained(cell), alone(cell, trained)
    found = whole(everyone, "weights")
    assert found.keys() == one.weights.keys()
    for name, weight in one.weights.items():
        assert torch.equal(found[name], weight), f"{name} differs at step 0"
    check_gradients(everyone, one)
    found = everyone[0]
    for step, (a, b) in enumerate(zip(found.losses, one.losses, strict=True), start=1):
        assert abs(a - b) <= 1e-5 * abs(b), f"step {step}: loss {a!r}, one process has {b!r}"
    for step, (a, b) in enumerate(zip(found.norms, one.norms, strict=True), start=1):
        assert abs(a - b) <= 1e-4 * abs(b), f"step {step}: gradient norm {a!r}, one process has {b!r}"
    (a, _), (b, _) = found.after, one.after
    assert abs(a - b) <= 1e-5 * b, f"evaluation: {a!r}, one process has {b!r}"
    moved = abs(one.after[0] / one.before[0] - 1)
    assert moved > 1e-3, f"the steps moved the loss by {moved:.1e}: too little for equal losses to say something"
    for rank, other in enumerate(everyone):
        assert (other.losses, other.after) == (found.losses, found.after), f"rank {rank} reports others than rank 0"


@by_name(CURVES)
def test_curves_show_learning(cell: Cell) -> None:
    one = one_process(cell)
    assert one.losses[-1] < 0.99 * one.losses[0], "the reference does not learn, so that equal curves show nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_there_and_off_in_evaluation(family: str) -> None:
    """Otherwise equal losses would say nothing about masks."""
    plain, dropped = one_process(Cell(family)), one_process(Cell(family, dropout=True))
    # Without dropout a block of GPT-NeoX adds its two outputs to each other first. On an H200 a loss differed too.
    is_exact = family != "gpt_neox" and os.environ.get("TEST_DEVICE", "cpu") == "cpu"
    assert dropped.before == (plain.before if is_exact else pytest.approx(plain.before, rel=1e-6))
    assert abs(dropped.losses[0] / plain.losses[0] - 1) > 1e-6, "the first loss is the one without dropout"


@pytest.mark.slow
@pytest.mark.sweep("cell", lambda: [*array(), *cells.sweep(100), *cells.pipelines()])
def test_any_other_cell_trains_alike(cell: Cell, ranks: Any, record_property: Callable[[str, object], None]) -> None:
    """What it finds is in the report of `--junitxml`, for the table in benchmarks/results/pipeline.md."""
    everyone: list[Measured] = ranks(cell.world).run(measure, cell, cells.LONG)
    one = measure(cell.alone, cells.LONG)
    errors = gradient_errors(whole(everyone, "gradients"), one.gradients)
    assert max(errors.values()) <= 1e-5, errors
    assert everyone[0].losses == pytest.approx(one.losses, rel=1e-5)
    check_costs(cell, everyone)
    record_property("loss", max(abs(a / b - 1) for a, b in zip(everyone[0].losses, one.losses, strict=True)))
    record_property("gradient", max(errors.values()))


@by_name(MIXED)
def test_gradients_of_mixed_precision_are_those_of_one_process(cell: Cell, trained: Train) -> None:
    """Schedules that split the backward pass add the gradients of weights by another path than autograd does.

    The one process has a device of the same kind: another kind rounds to bfloat16 elsewhere.
    """
    check_gradients(trained(cell), trained(cell.alone)[0])


def check_costs(cell: Cell, everyone: list[Measured]) -> None:
    config = configuration(cell)
    layout = check_layout(config, cell.world)
    memory = memory_by_rank(config, layout)
    for rank, found in enumerate(everyone):
        stage, data, tensor = found.place
        transfers = step_transfers(config, layout, pipeline_rank=stage, data_rank=data, tensor_rank=tensor)
        sent = wire_bytes(transfers)
        is_cut_off = cell.context_keys == "gather" and cell.recompute != "full"
        if os.environ.get("TEST_DEVICE") == "strict" and is_cut_off:
            # Its attention by single operators saves scaled copies of keys. Of gathered tensors it saves values alone,
            # unless queries share them: then it saves copies of both. What is not saved is not gathered again.
            model = config.model
            again = wire_bytes([transfer for transfer in transfers if transfer.tensor == AGAIN]) or {}
            for key, amount in again.items():
                sent[key] -= amount if model.num_key_value_heads < model.num_attention_heads else amount / 2
        evaluated = wire_bytes(evaluation_transfers(config, layout, pipeline_rank=stage))
        if cell.mode == "bfloat16" and os.environ.get("STRICT_NEURON_LIKE", "0") != "0":
            sent["world", "all_reduce"] /= 2  # without float64 on the device, norms are sums in float32
        cells.check_sent(found.step, sent, found.calls, f"step, rank {rank}")
        wanted = {key: cells.EVAL_BATCHES * amount for key, amount in evaluated.items()}
        # At the end, in float64: sums of losses, of targets and of right answers; tokens; bytes.
        size = 8 * (3 * len(config.model.objectives) + 2)
        for axis, degree in ((layout.replicas_axis, layout.replicas), ("pp", layout.pipeline)):
            if degree > 1:
                wanted[axis, "all_reduce"] = wanted.get((axis, "all_reduce"), 0.0) + 2 * size * (degree - 1) / degree
        cells.check_sent(found.evaluation, wanted, found.calls, f"evaluation, rank {rank}")
        for what in ("parameters", "gradients", "optimizer"):
            assert found.state[what] == getattr(memory[stage], what), f"rank {rank} holds other bytes of {what}"
        stages = tuple(one for one in stage_plan(config, layout) if one.rank == stage)
        elements = local_parameter_count(config.model, layout.tensor, stages=stages, vocab_multiple=cell.vocab_multiple)
        assert found.state["elements"] == elements, f"rank {rank} holds other parameters than the plan has"


@by_name([*COVERING, *SPECIAL, *LIKE_LLAMA, *FP8, *OTHER_PRECISIONS])
def test_costs_are_what_happens(cell: Cell, trained: Train) -> None:
    everyone = trained(cell)
    check_costs(cell, everyone)
    # Over the ranks that share it, padding of buckets left out.
    by_shard: Counter[tuple[int, int]] = Counter()
    elements: dict[tuple[int, int], int] = {}
    for one in everyone:
        stage, data, tensor = one.place
        if cell.zero or data == 0:
            by_shard[stage, tensor] += one.state["optimizer"] - one.state["padding"]
        elements[stage, tensor] = one.state["elements"]
    for place, held in by_shard.items():
        assert held == STATE_BYTES[cell.mode] * elements[place], f"pipeline and tensor rank {place}"
