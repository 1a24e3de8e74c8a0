"""What one rank sends and receives where all is well: as much among 4,096 ranks as among 16."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.restore import read_manifest
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, load_config
from shardwise.distributed.collectives import raise_on_all_ranks
from shardwise.distributed.mesh import Mesh
from shardwise.train.rank_agreement import raised_on_every_rank, require_same_on_ranks, while_others_wait
from tests.stored import small_tensors, write_checkpoint


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Each collective that this rank calls: its kind, and the bytes of all tensors that it is given."""
    noted: list[tuple[str, int]] = []

    def note(module: Any, kind: str) -> None:
        real: Callable[..., Any] = getattr(module, kind)

        def noting(*tensors: Any, **options: Any) -> Any:
            flat = [each for given in tensors for each in (given if isinstance(given, list) else [given])]
            noted.append((kind, sum(each.nbytes for each in flat if isinstance(each, torch.Tensor))))
            return real(*tensors, **options)

        monkeypatch.setattr(module, kind, noting)

    note(dist, "all_reduce")
    for kind in (
        "broadcast",
        "all_gather",
        "all_gather_single",
    ):  # as torch's own functions that send objects call them
        if hasattr(distributed_c10d, kind):  # the last one: from torch 2.15 on
            note(distributed_c10d, kind)
    yield noted
    if dist.is_initialized():
        dist.destroy_process_group()


def start(config: Config, world: int, checkpoint: Root) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world)
    mesh = Mesh(tensor=8, device="cpu")
    require_same_on_ranks(config.model_dump(mode="json"), mesh)
    assert while_others_wait(lambda: "prepared", mesh.world) == "prepared"
    with raised_on_every_rank(mesh.world):
        raise_on_all_ranks([], mesh.world)
    assert read_manifest(checkpoint, mesh.world).step == 100


def test_messages_of_a_healthy_start_do_not_grow_with_the_ranks(
    messages: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How often a rank asks the others while they prepare data depends on how long that takes: not at all here.
    monkeypatch.setattr("shardwise.train.rank_agreement.ThreadPoolExecutor", _AtOnce)
    config, checkpoint = load_config("gpt-neox-tiny"), write_checkpoint(tmp_path, 100, small_tensors(), ranks=3)
    told = []
    for world in (16, 4096):
        messages.clear()
        start(config, world, checkpoint)
        told.append(list(messages))
    assert told[0] == told[1]
    assert {kind for kind, _ in told[0]} == {"all_reduce", "broadcast"}


class _AtOnce:
    """Does work when it is given, in the thread that gives it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def shutdown(self, *, wait: bool) -> None:
        pass


def test_what_a_rank_has_to_tell_is_sent_to_all(messages: list[tuple[str, int]]) -> None:
    dist.init_process_group("fake", rank=0, world_size=16)
    mesh = Mesh(device="cpu")
    with pytest.raises(ConfigError, match="the disk is full"):
        raise_on_all_ranks(["the disk is full"], mesh.world)
    assert [kind.removesuffix("_single") for kind, _ in messages] == ["all_reduce", "all_gather", "all_gather"]
