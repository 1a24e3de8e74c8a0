"""The mesh of a single process, and what it refuses. Real ranks: tests/dist/test_comm.py; 1,024 of them: tests/fake."""

import os
import re
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwise.base.errors import ConfigError, LostPeerError
from shardwise.distributed import collectives, rendezvous, wait_limit
from shardwise.distributed import mesh as meshes
from shardwise.distributed.mesh import Group, Mesh
from tests.unit.layers.makers import pretend_group


def test_one_process_is_a_mesh_of_ones_and_groups_split_equally() -> None:
    mesh = Mesh(device="cpu")
    assert [(group.rank, group.size, group.ranks) for group in mesh.groups] == [(0, 1, (0,))] * 5
    assert [group.name for group in mesh.groups] == ["tp", "cp", "dp", "pp", "world"]
    assert mesh.replicas is mesh.dp
    assert all(group.process_group is None for group in mesh.groups)
    assert mesh.device_mesh is None
    assert mesh.device == torch.device("cpu")
    assert repr(mesh) == "Mesh(pp=1, dp=1, tp=1, rank=0, cpu)"
    with pytest.raises(ValueError, match=r"subgroup size \(3\) must divide the group's size \(4\)"):
        Group.split(pretend_group(0, 4), 3)
    alone = Group(name="tp")
    assert alone.split(1) is alone


@pytest.mark.parametrize("degree", [0, 1.0, True], ids=repr)
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_degree_is_a_whole_number(axis: str, degree: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{axis} ({degree!r}) must be a whole number of at least 1")):
        Mesh(**{axis: degree}, device="cpu")
    assert Mesh(**{axis: np.int64(1)}, device="cpu").world.size == 1  # type: ignore[arg-type]


def test_joining_takes_the_launchers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = (
        r"^a launcher started 2 ranks \(WORLD_SIZE\), and each would train alone: call torch\.distributed"
        r"\.init_process_group\(\) first, or give group=$"
    )
    for tensor in (1, 2):
        with pytest.raises(RuntimeError, match=told):
            Mesh(tensor=tensor, device="cpu")
    asked: list[tuple[str, timedelta]] = []
    watched: list[float] = []
    defaults: list[timedelta] = []
    launched = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**launched, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, *, timeout, device_id: asked.append((backend, timeout))
    )
    monkeypatch.setattr(wait_limit, "start_wait_limit", lambda seconds: watched.append(seconds) or len(watched) > 1)
    monkeypatch.setattr(meshes, "set_default_timeout", defaults.append)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")  # so that it is as before after the test
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    meshes.join(torch.device("cpu"), timeout=7)
    assert asked == [("gloo", timedelta(seconds=7))], "where nothing else measures"
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    monkeypatch.setenv("WORLD_SIZE", "33")
    meshes.join(torch.device("cpu"), timeout=7)
    assert (asked[1], watched) == (("gloo", wait_limit.NEVER), [7, 7])
    assert defaults == [timedelta(seconds=7), wait_limit.NEVER], "else groups of the mesh have torch's limit"
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1", "else what each group sends grows with the cube of the ranks"


@pytest.mark.parametrize("at", ["the store", "its groups"])
def test_a_rank_that_loses_another_one_at_the_start_says_so(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost a peer, and names no cause: the one with the cause speaks first."""
    error = dist.DistNetworkError("Failed to recv, got 0 bytes") if at == "the store" else RuntimeError("[gloo] closed")

    def fail(*_: object, **_further: object) -> None:
        raise error

    for name, value in {"WORLD_SIZE": "4", "RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "meet", fail if at == "the store" else lambda *_: None)
    monkeypatch.setattr(meshes, "set_default_timeout", lambda _: None)
    monkeypatch.setattr(wait_limit, "start_wait_limit", lambda _: True)
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(LostPeerError, match=r"^rank 2 lost the connection to another rank during the start"):
        meshes.join(torch.device("cpu"))


@pytest.mark.parametrize(("backend", "destroyed"), [("gloo", 0), ("nccl", 1)])
def test_only_accelerators_groups_are_destroyed(backend: str, destroyed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo can abort a process whose peers close their connections at the same time."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(backend))
    meshes.leave()
    assert calls == [], "nothing was joined"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    meshes.leave()
    assert len(calls) == destroyed


@pytest.mark.parametrize(
    ("kind", "wanted"), [("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75), ("broadcast", 75)]
)
def test_bytes_follow_the_ring_formulas(kind: str, wanted: int) -> None:
    group = pretend_group(0, 4)
    group.count(kind, 100)
    group.count(kind, 100)
    assert group.meter.bytes == {kind: 2 * wanted}
    assert group.meter.calls == {kind: 2}


def test_tensors_of_any_dtype_follow_one_another_in_a_buffer() -> None:
    tensors = [[torch.arange(3.0).bfloat16(), torch.arange(2.0)], [], [torch.arange(5, dtype=torch.uint8)]]
    tensors[2].append(torch.arange(4.0).double().view(2, 2))
    buffer = torch.zeros(sum(collectives._slot_bytes(one) for each in tensors for one in each), dtype=torch.uint8)
    for slot, tensor in collectives._slots(buffer, tensors):
        slot.copy_(tensor)
    for slot, tensor in collectives._slots(buffer, tensors):
        assert torch.equal(slot, tensor)
