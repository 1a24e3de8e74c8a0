"""New parameters travel behind the next forward pass: no module reads one before it is complete."""

from unittest import mock

import pytest
import torch

from shardwise.config import Config
from shardwise.distributed.collectives import Pending
from shardwise.layers.units import parameters_by_unit
from shardwise.models.llama import LlamaBlock
from shardwise.optim import bucket_layout
from shardwise.optim.buckets import Bucket
from tests.dist.checkpoints import make_trainer
from tests.dist.training import MODEL, Sections, make_config, named
from tests.rank_pool import Pools

STEPS = 3
SIZES = {name: size for name, size in MODEL.items() if name not in ("family", "num_key_value_heads")}


def steps(config: Config, behind: bool) -> tuple[list[float], list[list[int]], list[torch.Tensor], list[str]]:
    """Losses, the gathers that are under way after each step, the parameters at the end, and events of the last step.

    A gather is told by the number of the unit that first reads its last parameter, -1 if it has vectors alone. The
    first unit is the model, which has BERT's pooler and head transform. An event is a block's end or the wait for the
    counted targets.
    """
    trainer = make_trainer(config)
    gathers, losses, late = trainer.optimizer.gathers, [], []
    numbers: dict[torch.Tensor, int] = {}
    for number, parameters in enumerate(parameters_by_unit(trainer.model).values()):
        for p in parameters:
            numbers.setdefault(p, number)
    events: list[str] = []
    wait = Pending.wait

    def noted_wait(pending: Pending) -> torch.Tensor:
        result = wait(pending)
        if result.dtype == torch.int64:
            events.append("counts")
        return result

    def train() -> None:
        for _ in range(STEPS):
            events.clear()
            losses.append(trainer.step().loss)
            late.append([max((numbers[p] for p in b.parameters if p.dim() > 1), default=-1) for b in gathers._pending])

    for module in trainer.model.modules():
        if isinstance(module, LlamaBlock):
            module.register_forward_hook(lambda *_: events.append("block"))

    with mock.patch.object(Pending, "wait", noted_wait):
        if behind:
            with gathers.behind_forward(parameters_by_unit(trainer.model), trainer.optimizer.buckets):
                train()
        else:
            train()
    return losses, late, [p.detach().cpu() for p in trainer.model.parameters()], events


@pytest.mark.parametrize(("world", "sections"), named("gathers", "PP 2"))
def test_gathers_end_before_parameters_are_read(world: int, sections: Sections, strict: Pools) -> None:
    """While a collective runs, the strict device shows NaN in its tensors."""
    optimizer = {"zero": 1, "bucket_mib": 0.02}
    config = make_config(**{"optimizer": optimizer, **sections})
    for plain, found in zip(
        strict(world).run(steps, config, False), strict(world).run(steps, config, True), strict=True
    ):
        assert found[0] == plain[0]
        assert plain[1] == [[]] * STEPS
        for late in found[1]:
            assert len(late) > 2, f"gathers under way after each step: {found[1]}"
            assert late == sorted(late), f"not in the order of the next forward pass: {late}"
        for a, b in zip(found[2], plain[2], strict=True):
            assert torch.equal(a, b)


def test_the_forward_pass_does_not_wait_for_the_counted_targets(strict: Pools) -> None:
    """They travel on the communicator of the gathers, behind all of them."""
    for *_, events in strict(2).run(steps, make_config(), True):
        assert events.index("counts") >= MODEL["num_hidden_layers"], events


def events_of_a_step(config: Config) -> tuple[list[tuple[str, int]], list[float], list[float]]:
    """Of the last step of ZeRO-3: what happened to which block, in order; losses of ZeRO-1 and of ZeRO-3."""
    bucket_layout._LEAST_BYTES = 1  # each block of a tiny model has buckets of its own, as those of a large one
    plain = make_trainer(config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"zero": 1})}))
    trainer = make_trainer(config)
    losses = [[each.step().loss for _ in range(STEPS - 1)] for each in (plain, trainer)]
    events: list[tuple[str, int]] = []
    blocks = list(trainer.model.layers)  # type: ignore[arg-type]
    block_of = {p: number for number, block in enumerate(blocks) for p in block.parameters()}

    def watch(bucket: Bucket, method: str, event: str) -> None:
        plain_method = getattr(bucket, method)
        number = block_of.get(bucket.parameters[0])

        def watched() -> None:
            starts = event == "gather" and not bucket.values.untyped_storage().nbytes()
            waits = event == "gathered" and bucket._gather is not None
            reduces = event == "reduce" or (event == "reduced" and bucket._pending is not None)
            if number is not None and (starts or waits or reduces):
                events.append((event, number))
            plain_method()

        setattr(bucket, method, watched)

    for bucket in trainer.optimizer.buckets:
        if bucket.frees_values:
            watch(bucket, "finish_gather", "gathered")
            watch(bucket, "begin_gather", "gather")
            watch(bucket, "finish_reduction", "reduced")
            watch(bucket, "start_reduction", "reduce")
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(("forward", number)))
        last = list(block.parameters())[-1]
        last.register_post_accumulate_grad_hook(lambda _, number=number: events.append(("backward", number)))
    for each, values in zip((plain, trainer), losses, strict=True):
        values.append(each.step().loss)
    return events, *losses


def test_weights_and_gradients_travel_behind_the_computation_of_another_block(strict: Pools) -> None:
    """Each gather and reduction but the first and the last one has a block's computation before its wait."""
    sizes = {"num_hidden_layers": 6}
    config = make_config(model=sizes, optimizer={"zero": 3, "bucket_mib": 1.0}, train={"global_batch": 4})
    for events, plain, losses in strict(2).run(events_of_a_step, config):
        assert losses == plain
        for event in ("gather", "gathered", "reduce", "reduced"):
            assert {number for name, number in events if name == event} == set(range(6)), f"{event}: {events}"
        for start, end in (("gather", "gathered"), ("reduce", "reduced")):
            exposed = []
            for place, (event, number) in enumerate(events):
                if event == start:
                    stop = events.index((end, number), place)
                    between = [name for name, other in events[place:stop] if other != number]
                    if not {"forward", "backward"} & set(between):
                        exposed.append((start, number))
            assert len(exposed) <= 2, f"not behind computation: {exposed} of {events}"
