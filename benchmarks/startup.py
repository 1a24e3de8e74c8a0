"""What a start, a save and a resume cost as ranks grow, without the ranks: each part is done as one of them does it.

A process plays every rank of a job in turn, on PyTorch's fake process group, on the meta device: what all of them would
send is kept, and rank 0's work with it is timed. What travels is counted and not sent.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks
from measure import median
from report import Report, Table, target

from shardwise.estimates.memory import checkpoint_bytes

LIMIT = 5.0
WORLDS = (16, 256, 1024, 4096)
DEGREES = {"gpt-neox-20b": (8, 1), "gpt3-175b": (32, 8)}
"""Of each recipe: tensor and pipeline."""
MOMENTS = ["exp_avg", "exp_avg_sq"]
OWN = {
    "start": ("layout and costs", "agreements"),
    "save": ("plan", "send", "merge", "text"),
    "resume": ("listing", "read", "pack", "unpack", "wants"),
}
"""The parts that are this project's, by what they belong to."""
PARTS = {
    "process groups": "torch: the world's and the mesh's groups, on the fake backend",
    "store": "torch: three messages of each rank to its store",
    "layout and costs": "layout, stages, expected memory and size of a checkpoint",
    "agreements": "the agreements of a start in which all is well",
    "plan": "who writes which weights, and the files of one rank",
    "send": "rank 0 unpacks what the ranks say of their files",
    "merge": "the pieces of all ranks by tensor, and whether they tile it",
    "text": "the manifest's text with its digest, and its limits",
    "listing": "the names and lengths of a file for each rank",
    "read": "the manifest from its text, every value checked",
    "pack": "rank 0 packs it for the other ranks",
    "unpack": "every rank unpacks it",
    "wants": "what the ranks of a group read for each other, found out by each of them",
}


def run(rounds: int) -> Report:
    """Every recipe at every number of ranks that its degrees divide."""
    figures: dict[str, Any] = {}
    tables, targets = [], []
    for recipe, (tensor, pipeline) in DEGREES.items():
        worlds = [world for world in WORLDS if world % (tensor * pipeline) == 0]
        found = {}
        for world in worlds:
            arguments = {"recipe": recipe, "size": world, "rounds": rounds}
            with ranks.Job("startup", "measured", 1, **arguments) as job:
                found[world] = job.receive(timeout=3600.0)[0]
        figures[recipe] = found
        tables.append(_table(recipe, found))
        for whole, parts in OWN.items():
            seconds = sum(found[worlds[-1]][part]["seconds"] for part in parts)
            what = f"{whole} of {recipe} by {worlds[-1]:,} ranks, our own part, s"
            targets.append(target(what, seconds, LIMIT, at_least=False))
    figures["host groups"], table = _host_groups(rounds)
    tables.append(table)
    notes = [f"{name}: {text}." for name, text in PARTS.items()]
    notes.append("Seconds of the parts are processor time of one process, which other work hardly changes.")
    notes.append(
        "The groups over gloo are made by as many threads of one process, each with connections of its own. Jobs of "
        "more than 32 ranks connect pairs when they first need to."
    )
    return Report("startup", "What a start costs as ranks grow", tables, figures, targets, notes)


def _table(recipe: str, found: dict[int, dict[str, Any]]) -> Table:
    tensor, pipeline = DEGREES[recipe]
    of = {part: whole for whole, parts in OWN.items() for part in parts}
    rows = []
    for part in PARTS:
        cells = [found[world][part] for world in found]
        texts = [f"{cell['seconds']:.3f}" for cell in cells]
        texts += [f"{cell['bytes'] / 1e6:,.3f}" if cell["bytes"] else "–" for cell in cells]
        rows.append([part, of.get(part, "torch"), *texts])
    columns = ["part", "of", *(f"s at {world:,}" for world in found), *(f"MB at {world:,}" for world in found)]
    return Table(columns, rows, title=f"{recipe}, TP {tensor} × PP {pipeline}, ZeRO-1")


def _host_groups(rounds: int) -> tuple[list[dict[str, Any]], Table]:
    """What one group of all ranks over gloo takes, as shardwise makes two."""
    found: list[dict[str, Any]] = []
    for world, lazy in ((32, False), (128, False), (32, True), (128, True), (256, True)):
        made = []
        for _ in range(rounds):
            with ranks.Job("startup", "host_group", 1, size=world, lazy=lazy) as job:
                made.append(job.receive(timeout=600.0)[0])
        found.append({"ranks": world, "lazy": lazy, **{key: median([one[key] for one in made]) for key in made[0]}})
    rows = []
    for one in found:
        how = "at first use" if one["lazy"] else "at once"
        figures = (f"{one['seconds']:.2f}", f"{one['bytes'] / 1e6:.2f}", f"{one['files']:,.0f}")
        rows.append([str(one["ranks"]), how, *figures])
    columns = ["ranks", "pairs connect", "s", "MB", "open files"]
    return found, Table(columns, rows, title="One group of all ranks over gloo")


# ---- in a process of its own


def measured(recipe: str, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """By part: median seconds of processor time, and bytes: of the message or text, or of all that a rank receives."""
    job = _SimulatedJob.of(recipe, size)
    found: dict[str, dict[str, float]] = {}

    def part(name: str, call: Callable[[], Any], bytes_of: Callable[[Any], int] = lambda _: 0) -> Any:
        seconds: list[float] = []
        result = None
        for _ in range(rounds):
            result = None
            gc.collect()
            start = time.process_time()
            result = call()
            seconds.append(time.process_time() - start)
        found[name] = {"seconds": median(seconds), "bytes": bytes_of(result)}
        return result

    part("process groups", job.groups)
    part("store", lambda: store_exchange(size))
    part("layout and costs", job.costs)
    part("agreements", job.agreements, lambda received: received)
    part("plan", job.plan)
    sent = job.messages()
    gathered = part("send", lambda: [pickle.loads(message) for message in sent], lambda _: sum(map(len, sent)))
    merged = part("merge", lambda: job.merge(gathered))
    text = part("text", lambda: job.text(*merged), len)
    gathered, merged, sent = [], (), []
    with tempfile.TemporaryDirectory() as folder:
        job.fill(Path(folder))
        part("listing", lambda: job.listing(Path(folder)))
        (Path(folder) / "manifest.json").write_text(text)
        text = ""
        manifest = part("read", lambda: job.read(Path(folder)))
    packed = part("pack", lambda: pickle.dumps(manifest), len)
    part("unpack", lambda: pickle.loads(packed), lambda _: len(packed))
    wants = job.wants(manifest)
    part("wants", lambda: job.segments(manifest, wants), lambda _: len(pickle.dumps(wants)))
    return found


@dataclass
class _Role:
    """The ranks at one place of tensor and pipeline parallelism; `move` says which of them."""

    mesh: Any
    model: Any
    optimizer: Any

    def move(self, data: int) -> None:
        mesh = self.mesh
        mesh.dp.rank = data
        mesh.world.rank = (mesh.pp.rank * mesh.dp.size + data) * mesh.tp.size + mesh.tp.rank
        for bucket in self.optimizer.buckets:
            share = len(bucket.master)
            bucket.owned = slice(data * share, (data + 1) * share)


class _Told:
    """What the ranks of a group tell each other, whichever of them was played before."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, ...], dict[int, Any]] = {}

    def __call__(self, value: Any, group: Any) -> list[Any]:
        told = self.values.setdefault((len(group.ranks), *group.ranks[:2]), {})
        told[group.rank] = value
        return [told.get(rank, value) for rank in range(group.size)]


@dataclass
class _SimulatedJob:
    """A job whose ranks are played by this process, one after the other."""

    config: Any
    layout: Any
    world: int
    roles: list[_Role]
    savers: list[Any]

    @staticmethod
    def of(recipe: str, world: int) -> _SimulatedJob:
        from shardwise.config import check_layout, load_config

        tensor, pipeline = DEGREES[recipe]
        degrees = {"parallel.tensor": tensor, "parallel.pipeline": pipeline, "train.global_batch": world}
        config = load_config(recipe, [f"{key}={value}" for key, value in degrees.items()])
        job = _SimulatedJob(config, check_layout(config, world), world, [], [])
        data = world // (tensor * pipeline)
        job.roles = [job.role((stage * data) * tensor + i) for stage in range(pipeline) for i in range(tensor)]
        with patch("shardwise.distributed.collectives.all_gather_objects", _Told()):
            for _ in range(2):  # by the second time all have told what they hold
                job.savers = [job.saver(role) for role in job.roles]
        return job

    def role(self, rank: int) -> _Role:
        import torch

        from shardwise.optim.state import begin_restoring
        from shardwise.pipeline.stages import build_stages
        from shardwise.train.build import build_optimizer

        mesh = self.groups(rank)
        model = build_stages(self.config, self.layout, mesh, device="meta", dtype=torch.bfloat16)
        optimizer = build_optimizer(self.config, self.config.precision.resolved(True), model, mesh)
        begin_restoring(optimizer, MOMENTS, 1)
        return _Role(mesh, model, optimizer)

    def saver(self, role: _Role) -> Any:
        from shardwise.checkpoint.save import Saver
        from shardwise.checkpoint.storage.root import Root
        from shardwise.distributed.mesh import Group

        with patch.object(Saver, "_read_small_files", lambda *_: {}):
            root = Root.of("nowhere")
            return Saver(root, role.model, role.optimizer, self.config, role.mesh, Group(), described={})

    # ---- the parts

    def groups(self, rank: int = 0) -> Any:
        import torch.distributed as dist

        from shardwise.distributed.mesh import Mesh

        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=self.world)
        return Mesh(tensor=self.layout.tensor, pipeline=self.layout.pipeline, device="cpu")

    def costs(self) -> None:
        from shardwise.config import check_layout
        from shardwise.estimates.memory import expected_memory

        check_layout(self.config, self.world)
        expected_memory(self.config, self.layout, True)
        checkpoint_bytes(self.config, True)

    def agreements(self) -> int:
        """All of a healthy start, as one rank goes through them; returns the bytes that reach it from others."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        from shardwise.train.rank_agreement import raised_on_every_rank, require_same_on_ranks, while_others_wait

        received = 0

        def gathered(outputs: list[Any], value: Any, **_: Any) -> None:
            nonlocal received
            for output in outputs:
                output.copy_(value)
                received += output.nbytes

        mesh = self.groups()
        reduced = dist.all_reduce

        def counted(tensor: Any, **options: Any) -> None:
            nonlocal received
            received += tensor.nbytes
            reduced(tensor, **options)

        with patch.object(distributed_c10d, "all_gather", gathered), patch.object(dist, "all_reduce", counted):
            require_same_on_ranks(self.config.model_dump(mode="json"), mesh)
            while_others_wait(lambda: None, mesh.world)
            for _ in range(AGREEMENTS):
                with raised_on_every_rank(mesh.world):
                    pass
        return received

    def plan(self) -> None:
        with patch("shardwise.distributed.collectives.all_gather_objects", lambda value, group: [value] * group.size):
            saver = self.saver(self.roles[0])
        saver._manifest(1, {})
        list(saver._planned_files(saver._state_slices()))

    def messages(self) -> list[bytes]:
        """What each rank sends to rank 0 when it has written its files."""
        from shardwise.checkpoint.storage.chunks import FileEntry, chunk_bytes

        sent: dict[int, bytes] = {}
        for role, saver in zip(self.roles, self.savers, strict=True):
            for data in range(role.mesh.dp.size):
                role.move(data)
                files = tuple(saver._planned_files(saver._state_slices()))
                entries = []
                for file in files:
                    chunk = chunk_bytes(file.size)
                    entries.append(FileEntry(file.path, file.size, chunk, bytes(8 * -(-file.size // chunk))))
                sent[role.mesh.world.rank] = pickle.dumps((entries, [file.piece_rows for file in files]))
        return [sent[rank] for rank in range(self.world)]

    def merge(self, gathered: list[Any]) -> tuple[Any, Any]:
        from shardwise.checkpoint.format.verify import untiled_tensors
        from shardwise.checkpoint.format.writing import tensor_entries

        entries = [entry for of_rank, _ in gathered for entry in of_rank]
        tensors = tensor_entries(entries, [file for _, files in gathered for file in files])
        problems = untiled_tensors(tensors)
        assert not problems, problems[0]
        return entries, tensors

    def text(self, entries: Any, tensors: Any) -> str:
        from shardwise.checkpoint.format.manifest import Manifest, manifest_size_problem

        described: dict[str, Any] = {key: {} for key in ("config", "layout", "schedule", "data", "rng", "versions")}
        counts = dict.fromkeys(("step", "samples", "position", "tokens"), 0)
        optimizer = {"states": MOMENTS, "steps": 1}
        text = Manifest(
            **described, **counts, created="", optimizer=optimizer, files=tuple(entries), tensors=tensors
        ).to_json()
        assert manifest_size_problem(text) is None, manifest_size_problem(text)
        return text

    def fill(self, folder: Path) -> None:
        """An empty file for each rank."""
        (folder / "optimizer").mkdir()
        for rank in range(self.world):
            (folder / "optimizer" / f"rank-{rank:05}.safetensors").touch()

    def listing(self, folder: Path) -> None:
        from shardwise.checkpoint.storage.root import Root

        assert len(Root.of(folder).files()) == self.world

    def read(self, folder: Path) -> Any:
        from shardwise.checkpoint.restore import intact_manifest
        from shardwise.checkpoint.storage.root import Root

        return intact_manifest(Root.of(folder))

    def wants(self, manifest: Any) -> list[Any]:
        """Of the ranks that read for each other: of the group of tensor parallelism, or of a whole stage."""
        from shardwise.checkpoint.restore import _slice_requests
        from shardwise.distributed.placement import placements

        stage = [role for role in self.roles if role.mesh.pp.rank == 0]
        turned = any(piece.transposed for _, _, record in placements(stage[0].model) for piece in record.pieces)
        everyone: dict[int, Any] = {}
        for role in stage:
            for data in range(role.mesh.dp.size if turned else 1):
                role.move(data)
                found = _slice_requests(manifest, role.model, role.optimizer, MOMENTS, role.mesh)
                boxes = [(want.state, want.name, want.box) for piece, want in found if piece.transposed == turned]
                everyone[role.mesh.world.rank] = boxes
        return [everyone[rank] for rank in sorted(everyone)]

    def segments(self, manifest: Any, wants: list[Any]) -> int:
        from shardwise.checkpoint.collective_reading import _segments

        return len(list(_segments(manifest.tensors, wants, 0)))


def host_group(size: int, lazy: bool) -> dict[str, float]:
    """Seconds to make a group of all ranks over gloo, bytes on the loopback device meanwhile, and open files."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    os.environ["TORCH_GLOO_LAZY_INIT"] = "1" if lazy else "0"
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(size)]
    made: dict[int, Any] = {}

    def make(rank: int) -> None:
        made[rank] = ProcessGroupGloo(PrefixStore("group", stores[rank]), rank, size, timedelta(seconds=300))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    files_before, sent_before, began = _open_files(), _loopback_bytes(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, sent = time.perf_counter() - began, _loopback_bytes() - sent_before
    return {"seconds": seconds, "bytes": sent, "files": _open_files() - files_before}


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


AGREEMENTS = 10
"""Places of a start at which all ranks raise what any of them met: the folder, the data, the weights, the graphs, the
checkpoint."""

_CLIENTS = 16


def store_exchange(world: int) -> None:
    """As many words as there are ranks, each said, counted and read, by a few connections to torch's store."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(_CLIENTS)]
    for rank in range(world):
        clients[rank % _CLIENTS].set(f"rank{rank}", "here")
        clients[rank % _CLIENTS].add("count", 1)
    for rank in range(world):
        clients[rank % _CLIENTS].get(f"rank{world - 1 - rank}")
