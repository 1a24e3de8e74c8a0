"""What makes the device strict: each mistake that a program can make with an accelerator is found."""

import ctypes
import gc
import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import Pools
from tests.strict import device


def memory() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("strict")
    fresh = torch.empty(256, device="strict")
    assert torch.isnan(fresh).all(), "fresh memory is not NaN"
    assert not device.host_can_read(fresh), "the host can read the device's memory"
    child = os.fork()
    if child == 0:
        ctypes.string_at(fresh.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV, "a read of the device's memory does not fault"

    gc.collect()  # what an earlier test left, not while this one measures
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    block = torch.empty(1000, device="strict")
    assert torch.accelerator.memory_allocated() - before == 4000
    del block
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 4000
    assert torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == before + 4000
    if hasattr(torch.accelerator, "get_memory_info"):
        free, total = torch.accelerator.get_memory_info()
        assert total - free == before
    with pytest.raises(torch.OutOfMemoryError, match="strict out of memory"):
        torch.empty(2**45, device="strict")


def devices_do_not_mix() -> None:
    here = torch.ones(3, device="strict:0")
    assert (here + torch.tensor(1.0)).sum().item() == 6, "a number may come from the host"
    for other in (torch.ones(3), torch.ones(3, device="strict:1")):
        with pytest.raises(RuntimeError, match="at least two devices"):
            here + other
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.add(here, here, out=torch.ones(3))


def pinned_memory() -> None:
    ones, pinned = torch.ones(4, device="strict"), torch.zeros(4).pin_memory()
    assert pinned.is_pinned()
    device.reset_counters()
    pinned.copy_(ones, non_blocking=True)
    assert pinned.isnan().all(), "a copy has arrived before the host waited"
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1, 1, 1, 1]
    found = device.counters()
    assert found.copies == {"to host": (1, 16)}
    ((why, line),) = found.waits
    assert why == "synchronize"
    assert line.endswith("pinned_memory"), line
    there = pinned.to("strict", non_blocking=True)
    pinned.fill_(7)
    with pytest.raises(RuntimeError, match="pinned memory was changed"):
        torch.accelerator.synchronize()
    assert there.tolist() == [1, 1, 1, 1]

    there = pinned.to("strict", non_blocking=True)
    pinned.copy_(ones, non_blocking=True)  # after the first copy, in one stream: no mistake
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1, 1, 1, 1]
    pinned.copy_(ones, non_blocking=True)
    pinned.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was changed"):
        torch.accelerator.synchronize()


def copies_arrive_when_their_stream_was_waited_for() -> None:
    ones, pinned = torch.ones(4, device="strict"), torch.zeros(4).pin_memory()
    early, late, behind = (torch.Event("strict") for _ in range(3))
    side, other = torch.Stream("strict"), torch.Stream("strict")
    with side:
        early.record()
        pinned.copy_(ones, non_blocking=True)
        late.record()
    ones.sum().item()
    early.synchronize()
    assert pinned.isnan().all(), "a wait for another stream, or for an earlier event, has ended a copy"
    assert not late.query()
    other.wait_event(late)
    behind.record(other)
    behind.synchronize()
    assert pinned.tolist() == [1, 1, 1, 1], "a stream that waits for an event is behind the event's stream"
    assert late.query()


@pytest.mark.parametrize(
    "what",
    [memory, devices_do_not_mix, pinned_memory, copies_arrive_when_their_stream_was_waited_for],
    ids=lambda f: f.__name__,
)
def test_device(what: Callable[[], None], strict: Pools) -> None:
    strict(1).run(what)


def tensors_of_a_collective() -> None:
    where = torch.device("strict", dist.get_rank())
    x = torch.ones(4, device=where)
    work = dist.all_reduce(x, async_op=True)
    assert torch.isnan(x).all(), "a collective's tensor can be read before wait()"
    work.wait()
    assert x.tolist() == [2, 2, 2, 2]

    part, whole = torch.ones(2, device=where), torch.empty(4, device=where)
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    assert torch.isnan(part).all()
    assert torch.isnan(whole).all()
    work.wait()
    assert (part.tolist(), whole.tolist()) == ([1, 1], [1, 1, 1, 1])

    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    with pytest.raises(RuntimeError, match="changed between a collective"):
        work.wait()
    for wrong, said in (
        (torch.ones(4), "backend type|must be on strict"),
        (torch.ones(4, 4, device=where).T[:2].T, "contiguous"),
        (torch.ones(4, device=torch.device("strict", 5)), "communicator"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            dist.all_reduce(wrong)


def a_message_ends_when_it_is_received() -> None:
    where = torch.device("strict", dist.get_rank())
    x = torch.full((3,), 1.0 + dist.get_rank(), device=where)
    if dist.get_rank() == 0:
        work = dist.isend(x, dst=1)
        assert x.tolist() == [1, 1, 1], "what is sent may be read"
        dist.barrier()
        assert not work.is_completed(), "a message has ended that nobody has received"
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.barrier()
        dist.recv(x, src=0)
        assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "what", [tensors_of_a_collective, a_message_ends_when_it_is_received], ids=lambda f: f.__name__
)
def test_collectives(what: Callable[[], None], strict: Pools) -> None:
    strict(2).run(what)
