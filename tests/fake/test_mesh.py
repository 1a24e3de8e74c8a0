"""1,024 ranks, one at a time, on PyTorch's fake process group: mesh, shapes of shards, placements."""

from collections import Counter
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
from shardwise.config import Config, LlamaConfig, load_config
from shardwise.distributed.collectives import raise_on_all_ranks
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import Placement, placements
from shardwise.models.llama import Llama
from shardwise.train.rank_agreement import raised_on_every_rank, require_same_on_ranks, while_others_wait
from tests.dist.training import cases
from tests.stored import small_tensors, write_checkpoint

WORLD = 1024
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def as_rank() -> Iterator[Callable[[int], None]]:
    """Be one rank of 1,024; calling it again is another rank."""

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=WORLD)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 517, 1023])
@pytest.mark.parametrize(("tensor", "context", "pipeline"), [(8, 4, 4), (32, 1, 8), (1, 1, 1), (2, 1, 512)])
def test_axes_are_pipeline_data_context_tensor(
    tensor: int, context: int, pipeline: int, rank: int, as_rank: Callable[[int], None]
) -> None:
    as_rank(rank)
    mesh = Mesh(tensor=tensor, pipeline=pipeline, context=context, device="cpu")
    data = WORLD // (tensor * context * pipeline)
    inner = context * tensor
    pp, dp, cp, tp = rank // (data * inner), rank // inner % data, rank // tensor % context, rank % tensor
    wanted = {
        "tp": [(pp * data + dp) * inner + cp * tensor + i for i in range(tensor)],
        "cp": [(pp * data + dp) * inner + i * tensor + tp for i in range(context)],
        "dp": [(pp * data + i) * inner + cp * tensor + tp for i in range(data)],
        "pp": [(i * data + dp) * inner + cp * tensor + tp for i in range(pipeline)],
        "dp_cp": [pp * data * inner + i * tensor + tp for i in range(data * context)],
        "world": list(range(WORLD)),
    }
    places = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "dp_cp": dp * context + cp, "world": rank}
    for group in mesh.groups:
        place = places[group.name]
        if group.size == 1:
            assert len(wanted[group.name]) == 1
            continue
        assert list(group.ranks) == wanted[group.name], f"{group.name} of rank {rank}"
        assert group.rank == place
    assert wanted["tp"] == list(range(rank - tp, rank - tp + tensor)), "TP ranks must be neighbours"
    shared = f"cp={context}, " if context > 1 else ""
    assert repr(mesh) == f"Mesh(pp={pipeline}, dp={data}, {shared}tp={tensor}, rank={rank}, cpu)"


def test_a_world_that_does_not_divide_is_refused(as_rank: Callable[[int], None]) -> None:
    as_rank(0)
    with pytest.raises(ValueError, match=r"world size \(1024\) must be a multiple of tensor × pipeline \(3 × 1\)"):
        Mesh(tensor=3, device="cpu")


SHAPES = cases("shapes at TP 8")


def records(rank: int, as_rank: Callable[[int], None], *, sequence: bool) -> dict[str, Placement]:
    """On the meta device: nothing is allocated."""
    as_rank(rank)
    mesh = Mesh(tensor=8, device="cpu")
    model = Llama(LlamaConfig(family="llama", **SIZES), mesh.tp, sequence_parallel=sequence, seed=1, device="meta")
    assert {path: list(parameter.shape) for path, parameter, _ in placements(model)} == SHAPES
    return {path: record for path, _, record in placements(model)}


def test_the_ranks_of_one_tensor_group_tile_the_model(as_rank: Callable[[int], None]) -> None:
    """Ranks 512 … 519."""
    held: dict[str, torch.Tensor] = {}
    copies: dict[str, int] = {}
    for rank in range(512, 520):
        for record in records(rank, as_rank, sequence=True).values():
            for piece in record.pieces:
                held.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int64))[piece.box.slices] += 1
                if piece.box.numel:
                    assert copies.setdefault(piece.name, piece.copies.size) == piece.copies.size
                    assert piece.copies.size == 1 or rank in piece.copies.ranks
    assert Counter(copies.values()) == {1: 7, 4: 2, 8: 3}, copies
    for name, count in held.items():
        assert bool((count == copies[name]).all()), f"{name} is held {count.unique().tolist()} times"


@pytest.mark.parametrize("rank", [515, 1023])
def test_copied_key_and_value_heads_are_summed_over_their_neighbours(rank: int, as_rank: Callable[[int], None]) -> None:
    q, k, v = records(rank, as_rank, sequence=False)["layers.0.self_attn.qkv.weight"].pieces
    first = rank // 4 * 4
    assert not q.partial
    for piece in (k, v):
        assert piece.partial
        assert piece.copies.ranks == tuple(range(first, first + 4))
        assert piece.box.start[0] == rank % 8 // 4 * 4


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


def test_messages_of_a_start_do_not_grow_with_ranks(
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
