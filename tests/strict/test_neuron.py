"""Training on devices that behave as the copy of TorchNeuron's source of 21 April 2026 says (README.md)."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Group
from shardwise.layers.dropout import Dropout, DropoutKey, Place
from shardwise.train.build import build_trainer
from shardwise.train.evaluation_losses import evaluate_rounds
from tests.dist import cells
from tests.dist.cells import Cell, small
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_config, make_data
from tests.rank_pool import Pools
from tests.strict import ranks
from tests.strict.test_training import STEPS, compare


def test_losses_are_those_of_the_cpu(strict: Pools) -> None:
    (cell,) = small(Cell("gpt", tensor=2, sequence=True, dropout=True))
    compare(strict(2, "neuron").run(ranks.losses, cell, STEPS)[0], cells.measure(cell.alone, STEPS).losses)


def masks(mode: str) -> tuple[Tensor, Tensor]:
    """Two masks of one place, between which other things draw."""
    device = torch.device("strict", torch.accelerator.current_device_index())
    key = DropoutKey(1, 2, torch.arange(2, device=device), 0, mode)  # type: ignore[arg-type]  # a name of a mode
    drop = Dropout(0.5, layer=0, site=0)
    x = torch.ones(8, 2, 16, device=device)
    first = drop(x, key)
    torch.native_dropout(x, 0.5, True)
    return first.cpu(), drop(x, key).cpu()


@pytest.mark.parametrize("mode", ["fast", "invariant"])
def test_recompute_and_replicas_draw_the_same_masks(mode: str, strict: Pools) -> None:
    (first, again), (other, _) = strict(2, "neuron").run(masks, mode)
    assert torch.equal(first, again)
    assert torch.equal(first, other)
    assert 0 < first.count_nonzero() < first.numel()


def exchanged() -> list[list[float]]:
    """What each of two ranks receives by runs of several lengths: rows, which go back twice as large, and tensors."""
    device = torch.device("strict", torch.accelerator.current_device_index())
    world = Group.world()
    sent, arriving = ([1, 3], [1, 0]) if world.rank == 0 else ([0, 2], [3, 2])
    x = torch.arange(sum(sent), dtype=torch.float32, device=device).add_(10.0 * world.rank)
    rows = collectives.all_to_all(x, world, sent, arriving)
    back = collectives.all_to_all(2 * rows, world, arriving, sent)
    received = [torch.empty(length, device=device) for length in arriving]
    runs = x.split(sent)
    collectives.exchange_async([[run] for run in runs], [[run] for run in received], world, device).wait()
    return [rows.tolist(), torch.cat(received).tolist(), back.tolist()]


def test_runs_of_several_lengths_are_exchanged_by_equal_ones(strict: Pools) -> None:
    first, second = strict(2, "neuron").run(exchanged)
    assert first == [[0.0], [0.0], [0.0, 2.0, 4.0, 6.0]]
    assert second == [[1.0, 2.0, 3.0, 10.0, 11.0], [1.0, 2.0, 3.0, 10.0, 11.0], [20.0, 22.0]]


def gathered_runs() -> list[float]:
    """What arrives by an all-to-all of four ranks, and by that of two of them."""
    device = torch.device("strict", torch.accelerator.current_device_index())
    world = Group.world()
    pair = world.split(2)
    assert (world.has_all_to_all, pair.has_all_to_all) == (True, False)
    x = torch.arange(4.0, device=device) + 10 * world.rank
    return collectives.all_to_all(x, world).tolist() + collectives.all_to_all(x, pair).tolist()


def test_ranks_without_an_all_to_all_gather_all_runs(strict: Pools) -> None:
    for rank, found in enumerate(strict(4, "neuron").run(gathered_runs)):
        first = rank // 2 * 2
        run = 2 * (rank - first)
        assert found[:4] == [10.0 * other + rank for other in range(4)]
        assert found[4:] == [10.0 * other + run + place for other in (first, first + 1) for place in (0, 1)]


def refusal(cell: Cell) -> str:
    with pytest.raises(ConfigError) as refused:
        ranks.losses(cell, STEPS)
    return str(refused.value)


CELLS = small(Cell("llama", schedule="1f1b", pipeline=2), Cell("llama", context=2, context_keys="ring"))


def test_what_needs_messages_is_refused(strict: Pools) -> None:
    of_pipeline, of_ring = r"parallel.pipeline \(2\) needs messages from rank", r"parallel.context_keys \(ring\) needs "
    for cell, text in zip(CELLS, (of_pipeline, rf"{of_ring}messages .*=gather, or"), strict=True):
        for said in strict(2, "neuron").run(refusal, cell):
            assert re.match(text, said), said


WIDE = 2**40 + 1


def wide_numbers() -> tuple[list[int], list[int], list[int], list[float]]:
    """What 64 bits are for, reduced over two ranks: largest numbers, sums, sums on the device, sums of fractions."""
    device = torch.device("strict", torch.accelerator.current_device_index())
    world = Group.world()
    numbers = [WIDE * (world.rank + 1), -WIDE]
    sums = torch.tensor(numbers, device=device)
    fractions = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    return (
        collectives.reduce_numbers(numbers, world),
        collectives.reduce_numbers(numbers, world, op="sum"),
        collectives.all_reduce_(sums, world).tolist(),
        collectives.all_reduce_(fractions, world).tolist(),
    )


def test_numbers_of_64_bits_are_reduced_on_the_host(strict: Pools) -> None:
    sums = [3 * WIDE, -2 * WIDE]
    assert strict(2, "neuron").run(wide_numbers) == [([2 * WIDE, -WIDE], sums, sums, [2.0 + 2.0**-39])] * 2


def keeps(device: str) -> Tensor:
    """The mask of samples whose numbers need 64 bits."""
    samples = torch.tensor([WIDE, 3], device=device)
    key = DropoutKey(1, 2, samples, 0, "invariant")
    return key.keep(torch.arange(8, device=device), 16, 0.5, Place(0, 0)).cpu()


def test_invariant_masks_of_samples_beyond_32_bits(strict: Pools) -> None:
    assert torch.equal(strict(2, "neuron").run(keeps, "strict")[0], keeps("cpu"))


def counted(targets: int) -> dict[str, int]:
    """What an evaluation counts of two micro-batches of so many targets."""
    trainer = build_trainer(make_config(), shared_mesh(1), make_data())
    first = trainer.feed.at(0)[0]
    batch = replace(first, counts_K=torch.full_like(first.counts_K, targets))
    trainer.feed.close()
    found = evaluate_rounds(trainer.model, [[batch]] * 2, ("lm",), trainer.mesh)
    return dict(found.counted)


def test_an_evaluation_counts_tokens_beyond_24_bits(strict: Pools) -> None:
    targets = 2**24 + 1
    assert strict(2, "neuron").run(counted, targets) == [{"lm": 4 * targets}] * 2


def facts() -> tuple[bool, torch.dtype, bool, bool, str]:
    device = torch.device("strict", torch.accelerator.current_device_index())
    return (
        devices.draws_on_host(device),
        devices.widest_dtype(device),
        devices.has_wide_integers(device),
        devices.computes_in(device, torch.float64),
        devices.name(device),
    )


def test_the_device_is_asked_where_it_differs(strict: Pools) -> None:
    assert strict(2, "neuron").run(facts) == [(True, torch.float32, False, False, "trn2")] * 2
    assert strict(2).run(facts) == [(False, torch.float64, True, True, "Strict test device")] * 2
