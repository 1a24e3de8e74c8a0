"""Checkpoints of a 20 B-parameter model by 1,024 ranks, planned without a byte: on the meta device, rank after rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.collective_reading import _segments
from shardwise.checkpoint.format.manifest import MODEL, Manifest
from shardwise.checkpoint.format.verify import untiled_tensors
from shardwise.checkpoint.format.writing import PlannedFile, tensor_entries
from shardwise.checkpoint.restore import _slice_requests
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.storage.chunks import FileEntry, chunk_bytes
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, load_config
from shardwise.distributed.mesh import Group, Mesh
from shardwise.models.build import build_model
from shardwise.models.parameter_counts import parameter_count
from shardwise.optim.state import MASTER, begin_restoring
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.build import build_optimizer

WORLD, TENSOR = 1024, 8
DATA = WORLD // TENSOR
MOMENTS = ["exp_avg", "exp_avg_sq"]
LAYERS, FEW = 12, 2
"""That stand for all 44, where some and where all of the 1,024 ranks are planned."""


def config_of(tensor: int, layers: int) -> Config:
    overrides = {"parallel.tensor": tensor, "train.global_batch": WORLD, "model.num_hidden_layers": layers}
    return load_config("gpt-neox-20b", [f"{key}={value}" for key, value in overrides.items()])


@dataclass
class Role:
    """One of the ranks: mixed precision, ZeRO-1, sequence parallelism."""

    config: Config
    mesh: Mesh
    model: nn.Module
    optimizer: ZeroRedundancyOptimizer

    @staticmethod
    def of(rank: int, tensor: int, layers: int) -> Role:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=WORLD)
        config, mesh = config_of(tensor, layers), Mesh(tensor=tensor, device="cpu")
        model = build_model(config, mesh.tp, sequence_parallel=True, device="meta", dtype=torch.bfloat16)
        return Role(config, mesh, model, build_optimizer(config, config.precision.resolved(True), model, mesh))

    def move(self, data: int) -> None:
        """Be the rank at another data-parallel place: it owns another part of each bucket, and that is all."""
        self.mesh.dp.rank, self.mesh.world.rank = data, data * self.mesh.tp.size + self.mesh.tp.rank
        for bucket in self.optimizer.buckets:
            share = len(bucket.master)
            bucket.owned = slice(data * share, (data + 1) * share)

    def saver(self) -> Saver:
        return Saver(Root.of("nowhere"), self.model, self.optimizer, self.config, self.mesh, Group(), described={})


class Told:
    """What the ranks of a tensor-parallel group tell each other, whoever was asked before."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def __call__(self, value: Any, group: Group) -> list[Any]:
        if group.size == 1:
            return [value]
        self.values[group.rank] = value
        return [self.values.get(rank, value) for rank in range(group.size)]


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    gather = Told()
    monkeypatch.setattr("shardwise.distributed.collectives.all_gather_objects", gather)
    yield gather
    if dist.is_initialized():
        dist.destroy_process_group()


def savers_of(roles: list[Role]) -> list[Saver]:
    for role in roles:
        role.saver()
    return [role.saver() for role in roles]  # by now all have told what they hold


def planned(saver: Saver) -> list[PlannedFile]:
    return list(saver._planned_files(saver._state_slices()))


def manifest_of(files: list[PlannedFile]) -> Manifest:
    """What a manifest says of files; checksums are 0."""
    entries = []
    for file in files:
        chunk = chunk_bytes(file.size)
        entries.append(FileEntry(file.path, file.size, chunk, bytes(8 * -(-file.size // chunk))))
    described: dict[str, Any] = {key: {} for key in ("config", "layout", "schedule", "data", "rng", "versions")}
    counts = dict.fromkeys(("step", "samples", "position", "tokens"), 0)
    tensors = tensor_entries(entries, [file.piece_rows for file in files])
    return Manifest(**described, **counts, created="", optimizer=None, files=tuple(entries), tensors=tensors)


@pytest.mark.parametrize("rank", [7, 1023])
def test_a_moved_rank_is_that_rank(rank: int) -> None:
    moved, real = Role.of(rank % TENSOR, TENSOR, 1), Role.of(rank, TENSOR, 1)
    moved.move(rank // TENSOR)
    assert moved.mesh.world.rank == real.mesh.world.rank == rank
    assert planned(moved.saver()) == planned(real.saver())


def test_all_ranks_write_about_as_much() -> None:
    """The model with its moments, at the first, at the last and at other places."""
    roles = [Role.of(tensor, TENSOR, LAYERS) for tensor in range(TENSOR)]
    for role in roles:
        begin_restoring(role.optimizer, MOMENTS, 1)
    savers = savers_of(roles)
    weights = savers[0]._weights.files
    assert all(saver._weights.files == weights for saver in savers), "ranks have different plans"
    elements = parameter_count(roles[0].config.model)
    assert sum(weight.nbytes for file in weights for weight in file.weights) == 2 * elements
    assert len({weight.name for file in weights for weight in file.weights}) == sum(len(f.weights) for f in weights)
    for tensor, data in ((0, 0), (0, 1), (3, 64), (5, 126), (7, 127)):
        roles[tensor].move(data)
        *shards, state = planned(savers[tensor])
        rank = data * TENSOR + tensor
        assert [file.path for file in shards] == [file.name for file in weights if file.owner == rank]
        assert state.path == f"optimizer/rank-{rank:05}.safetensors"
        assert Counter(piece.state for piece in state.pieces).keys() == {MASTER, *MOMENTS}
        assert state.size == pytest.approx(12 * elements / WORLD, rel=0.01)
        assert len(state.pieces) < 3 * 2 * len(roles[tensor].optimizer.buckets), "a rank's part is cut to pieces"


def test_every_byte_is_written_once_and_found_again(told: Told) -> None:
    """By TP 8 × DP 128; some ranks of TP 4 × DP 256 read."""
    writers = [Role.of(tensor, TENSOR, FEW) for tensor in range(TENSOR)]
    readers = [Role.of(tensor, TENSOR // 2, FEW) for tensor in range(TENSOR // 2)]
    files: list[PlannedFile] = []
    for role, saver in zip(writers, savers_of(writers), strict=True):
        for data in range(DATA):
            role.move(data)
            files += planned(saver)
    manifest = manifest_of(files)
    assert manifest.tensors.keys() == {MODEL, MASTER}, "no step was done: there are no moments"
    assert manifest.tensors[MODEL].keys() == manifest.tensors[MASTER].keys()
    assert not untiled_tensors(manifest.tensors), "an element is written twice, or not at all"
    elements = sum(math.prod(entry.shape) for entry in manifest.tensors[MODEL].values())
    assert elements == parameter_count(writers[0].config.model)
    assert sum(file.size - len(file.header) for file in files) == (2 + 4) * elements
    told.values.clear()
    weights = replace(manifest, tensors={MODEL: manifest.tensors[MODEL]})
    # A weight is stored whole: of the rows at both ends of a slice more is read than is wanted.
    for stored, most in ((manifest, 1.02 * 4), (weights, 1.1 * 2)):
        for data in (0, 77, 255):
            everyone = []
            for role in readers:
                role.move(data)
                wants = [want for _, want in _slice_requests(stored, role.model, role.optimizer, [], role.mesh)]
                everyone.append([(want.state, want.name, want.box) for want in wants])
            of_rank = [list(_segments(stored.tensors, everyone, rank)) for rank in range(len(readers))]
            segments = [segment for rank, own in enumerate(of_rank) for segment in own if segment.ranks == {rank}]
            shared = [[segment for segment in own if len(segment.ranks) > 1] for own in of_rank]
            assert shared == [shared[0]] * len(readers), "ranks do not agree on what they read for each other"
            segments += shared[0]
            found: Counter[tuple[int, int]] = Counter()
            for segment in segments:
                for rank, number, part in segment.parts:
                    found[rank, number] += part.numel
            wanted = {(rank, i): box.numel for rank, boxes in enumerate(everyone) for i, (*_, box) in enumerate(boxes)}
            assert found == wanted, "what is read does not fill what is wanted"
            read = sum(segment.nbytes for segment in segments)
            assert read < most * elements / WORLD * len(readers), "rows are read that nobody wants, or twice"
