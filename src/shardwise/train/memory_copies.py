"""Copies of a training's state in the memory of its nodes, from which ranks that start again continue at once.

Every few steps each rank writes its part of the state to a file in its node's memory (`/dev/shm`), and sends it to the
rank of the same number on the next node, which keeps it too. When a rank or a node is lost, the ranks take the newest
step of which all parts are present, written here or sent; the disk is read only where no node has them (Gemini, SOSP
2023, keeps checkpoints in the memory of neighbours in the same way). The files hold the tensors that a rank updates, so
they fit only the same layout, configuration and data, and the same history of starts; any other run continues from a
checkpoint on the disk.

The files are those of `_CopyFiles`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import xxhash
from torch import Tensor

from shardwise import __version__
from shardwise.base import files, units, yaml_and_json
from shardwise.base.files import reason_of
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.restore import local_pieces
from shardwise.distributed import collectives
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.optim.buckets import Bucket
from shardwise.optim.state import MASTER, begin_restoring, finish_restoring, state_bytes, state_numbers, state_tensors
from shardwise.train.training import Training, memory_copy_interval

MEMORY = Path("/dev/shm")
_KEPT = 2  # steps that are kept: while a rank writes a step, another may still write the step before
_STALE_SECONDS = 3600.0
"""Age from which a folder of another run is removed if no process uses it: a run that starts again is back by then."""
_LAYOUT_KEYS = ("name", "zero", "bucket_mib")
"""Keys of `optimizer` that decide which values are in a part, and in which order."""


class MemoryCopies:
    """Writes and reads the copies of one run; every rank of the mesh makes the same calls.

    Attributes:
        problem: reason why no copies are kept, or None.
        seconds: time for which training waited for them.
    """

    def __init__(
        self,
        run: str,
        described: Mapping[str, Any],
        training: Training,
        memory: Path = MEMORY,
        began: Sequence[int] = (),
    ) -> None:
        """Args:
        run: id of the run with the key of its folder, as a copied folder has the same id.
        described: fields of `Manifest` on layout and data.
        began: steps that were done when each earlier start of the run began to train.
        memory: a folder in memory.
        """
        self.problem: str | None = None
        self.count = 0
        self.seconds = 0.0
        self._described = described
        self._model = training.model
        self._optimizer = training.optimizer
        self._config = training.config
        self._mesh = training.mesh
        # Ranks of consecutive numbers share a node.
        self._node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self._mesh.world.size))
        self._has_neighbour = self._mesh.world.size >= 2 * self._per_node
        self._began = tuple(began)
        self._group: Group = self._mesh.host_group("memory copies")
        rank = self._mesh.world.rank
        self._previous_rank = (rank - self._per_node) % self._mesh.world.size
        self._ranks_kept = {rank, self._previous_rank}
        self._run = run
        # Why a part of another node is not kept, until the ranks agree on it.
        self._receive_problem: str | None = None
        # A node has the parts of its own ranks, and on several nodes those of the node before.
        parts_per_rank = 2 if self._has_neighbour else 1
        self.node_bytes = self._state_bytes() * self._per_node * _KEPT * parts_per_rank
        self._files = _CopyFiles(memory / f"shardwise-{os.getuid()}-{run}-{self._node}")
        try:
            self._files.open()
            self._remove_stale(memory)
            problem = self._lack_of_memory(memory)
        except OSError as error:
            problem = reason_of(error)
        self.problem = self._agreed(problem)

    @property
    def summary(self) -> str:
        """A line for the user at the start."""
        if self.problem is not None:
            return f"copies in memory: none: {self.problem}"
        every = memory_copy_interval(self._config.checkpoint)
        return f"copies in memory: every {every:,} steps, {units.size(self.node_bytes)} of each node"

    @property
    def folder(self) -> Path:
        """The folder of this node."""
        return self._files.path

    def copy(self, step: int, described: Mapping[str, Any]) -> None:
        """Keep the state after a step; training waits. `described`: fields of `Manifest` on the training's progress."""
        if self.problem is not None:
            return
        start = time.perf_counter()
        problem = None
        try:
            self._files.make()
            # Before the new part is written, as the memory has room for so many parts alone.
            self._remove_old_parts(step)
            self._write(step, described)
        except OSError as error:
            problem = f"{self._files.path}: {reason_of(error)}"
        self.problem = self._agreed(problem or self._receive_problem)
        if self.problem is None and self._has_neighbour:
            self._send_to_next_node(step)
        self.count += 1
        self.seconds += time.perf_counter() - start

    def restore(self, not_before: int) -> tuple[Manifest, int] | None:
        """Set the state to the newest step from `not_before` on of which all parts are present; None without one.

        Parts that are damaged, of another layout or configuration, or of steps that were undone, count as missing. A
        part that another node has and that does not fit here ends the copies, and nothing is restored.

        Returns:
            manifest of the state, without files and tensors, and the number of ranks whose part another node had.
        """
        valid_parts = [] if self.problem is not None else self._valid_parts()
        rank_nodes: list[str] = []
        nodes: dict[str, set[_CopyPart]] = {}
        for name, parts in collectives.all_gather_objects((self._node, valid_parts), self._group):
            rank_nodes.append(name)
            nodes.setdefault(name, set()).update(parts)
        step = _newest_complete_step(nodes, self._mesh.world.size)
        if step is None or step < not_before:
            return None
        received = self._fetch(rank_nodes, nodes, step)
        self.problem = self._agreed(self._receive_problem)
        if self.problem is not None:
            return None
        # The digest was checked when the parts were listed.
        part = self._files.read(_CopyPart(self._mesh.world.rank, step), checked=False)
        is_usable = part is not None and part[0]["shapes"] == self._shapes()
        # All ranks or none: ranks of two steps would train two models.
        if self._agreed(None if is_usable else "other buckets") is not None or part is None:
            return None
        header, content = part
        self._fill_state(header, content)
        finish_restoring(self._optimizer)
        progress = {**header["described"], "losses": tuple(header["described"]["losses"])}
        optimizer = {"states": header["states"], "steps": header["steps"]}
        # The rest is not known of a copy, and not needed to continue.
        unknown_fields: dict[str, Any] = {"config": {}, "versions": {}, "created": "", "files": (), "tensors": {}}
        return Manifest(step=step, **self._described, **progress, optimizer=optimizer, **unknown_fields), received

    def remove(self) -> None:
        """Forget the copies of this node: the run has ended, and the disk has its state."""
        if self._leads_node and self._files.is_open:
            shutil.rmtree(self._files.path, ignore_errors=True)

    @property
    def _leads_node(self) -> bool:
        return self._mesh.world.rank % self._per_node == 0

    def _agreed(self, problem: str | None) -> str | None:
        """The first problem that any rank of the group has, on every rank. Collective."""
        return next(iter(collectives.union([] if problem is None else [problem], self._group)), None)

    def _lack_of_memory(self, memory: Path) -> str | None:
        if not memory.is_dir():
            return f"there is no {memory}"
        share = self._config.checkpoint.memory_share
        # A share of the whole memory, not of what is free now: every node of a job then decides alike.
        bound = int(share * psutil.virtual_memory().total)
        if self.node_bytes > bound:
            return (
                f"they take {units.size(self.node_bytes)} of a node, and at most {units.size(bound)} are allowed "
                f"(checkpoint.memory_share={share:g})"
            )
        # Parts of an earlier start are replaced by those of this one.
        free = shutil.disk_usage(memory).free + self._files.bytes()
        if self.node_bytes < free:
            return None
        return f"{memory} has {units.size(free)}, {units.size(self.node_bytes)} needed"

    def _state(self) -> Iterator[tuple[str, Bucket | None, Tensor]]:
        """Yield this rank's state: by bucket its masters and the wrapped optimizer's states, then frozen parameters."""
        flats = state_tensors(self._optimizer)
        for bucket in self._optimizer.buckets:
            yield MASTER, bucket, bucket.master.detach()
            for name, by_bucket in flats.items():
                if name != MASTER and bucket in by_bucket:
                    yield name, bucket, by_bucket[bucket]
        for piece, target in self._frozen():
            yield piece.name, None, target

    def _state_bytes(self) -> int:
        """Bytes of this rank's part: masters, the states, which the first step makes, and frozen parameters."""
        kept = state_bytes(self._optimizer, self._config.optimizer.spec, all_masters=True)
        return kept + sum(target.nbytes for _, target in self._frozen())

    def _fits(self) -> str:
        """A digest of all that a copy must share with this run: the data, the values of a rank, and their order."""
        config = self._config.model_dump(mode="json")
        optimizer = {key: config["optimizer"][key] for key in _LAYOUT_KEYS}
        facts = [config["model"], config["parallel"], config["precision"], optimizer]
        facts += [self._run, self._described["data"]["fingerprint"]]
        # The order of the data: a run with other stages goes on from the disk, where those that have begun are checked.
        run = self._config.recorded()["data"]
        facts += [run["stages"], {name: source["weight"] for name, source in run["mixture"].items()}]
        text = json.dumps([*facts, __version__, self._mesh.world.size], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def _shapes(self) -> list[list[Any]]:
        """Name, number of values and dtype of each bucket, then of each frozen parameter."""
        buckets = [["", len(bucket.master), str(bucket.master.dtype)] for bucket in self._optimizer.buckets]
        return buckets + [[piece.name, target.numel(), str(target.dtype)] for piece, target in self._frozen()]

    def _frozen(self) -> list[tuple[Any, Tensor]]:
        return list(local_pieces(self._model, frozen=True))

    def _write(self, step: int, described: Mapping[str, Any]) -> None:
        state = list(self._state())
        states = list(dict.fromkeys(name for name, bucket, _ in state if bucket is not None and name != MASTER))
        header = {"fits": self._fits(), "shapes": self._shapes(), "states": states, "steps": self._optimizer.steps}
        header |= {"numbers": state_numbers(self._optimizer), "began": self._began, "described": dict(described)}
        self._files.write(_CopyPart(self._mesh.world.rank, step), header, (tensor for *_, tensor in state))

    def _remove_old_parts(self, step: int) -> None:
        """Remove parts that no rank needs once `step` is written: of this rank, and of the one whose part it is sent.

        While this rank writes, another may still write the step before, which stays. Later steps were undone.
        """
        for rank in self._ranks_kept:
            steps = [part.step for part in self._files.parts() if part.rank == rank]
            earlier = [old_step for old_step in steps if old_step < step]
            for old_step in {*steps} - {*earlier[1 - _KEPT :]}:
                self._files.remove(_CopyPart(rank, old_step))

    def _send_to_next_node(self, step: int) -> None:
        """Send this rank's part to the next node, and keep the part of the node before."""
        rank = self._mesh.world.rank
        # Both sends are started before the receive: all ranks send at once, and none waits for another in a circle.
        sends = self._send(_CopyPart(rank, step), (rank + self._per_node) % self._mesh.world.size)
        self._receive(_CopyPart(self._previous_rank, step), self._previous_rank)
        for send in sends:
            send.wait()

    def _send(self, part: _CopyPart, target: int) -> list[Pending]:
        """Start to send the length and the bytes of a part."""
        content = self._files.content(part)
        return [collectives.send(tensor, self._group, target) for tensor in (torch.tensor([content.numel()]), content)]

    def _receive(self, part: _CopyPart, source: int) -> None:
        """Keep a part that `source` sends; an error of writing is kept until the ranks agree on it."""
        length = int(collectives.receive(torch.zeros(1, dtype=torch.int64), self._group, source))
        # Received first, as the sender waits even if the write fails.
        content = collectives.receive(torch.empty(length, dtype=torch.uint8), self._group, source)
        try:
            self._files.make()
            self._files.write_content(part, content)
        except OSError as error:
            self._receive_problem = f"{self._files.path}: {reason_of(error)}"

    def _valid_parts(self) -> list[_CopyPart]:
        """The parts on this node, of this rank and of the one that sends its own, from which this run can continue."""
        valid = []
        for part in self._files.parts():
            content = self._files.read(part) if part.rank in self._ranks_kept else None
            if content is None or content[0].get("fits") != self._fits():
                continue
            if _is_of_history(part.step, content[0]["began"], self._began):
                valid.append(part)
        return valid

    def _fetch(self, rank_nodes: Sequence[str], nodes: Mapping[str, Container[_CopyPart]], step: int) -> int:
        """Bring to each node the parts of its ranks that it lacks; returns their number. Collective."""
        received = 0
        for rank, node in enumerate(rank_nodes):
            part = _CopyPart(rank, step)
            if part in nodes[node]:
                continue
            source = next(holder for holder, place in enumerate(rank_nodes) if part in nodes[place])
            received += 1
            if self._mesh.world.rank == source:
                for send in self._send(part, rank):
                    send.wait()
            elif self._mesh.world.rank == rank:
                self._receive(part, source)
        return received

    def _fill_state(self, header: Mapping[str, Any], content: Tensor) -> None:
        begin_restoring(self._optimizer, header["states"], header["steps"], header.get("numbers"))
        start = 0
        for _, _, tensor in self._state():
            # A copy, as a view in another dtype needs an address that is a multiple of its size.
            values = content[start : start + tensor.nbytes].clone()
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes

    def _remove_stale(self, memory: Path) -> None:
        if not self._leads_node:
            return
        for path in self._files.path.glob("*.new"):
            path.unlink(missing_ok=True)
        for folder in memory.glob(f"shardwise-{os.getuid()}-*-{self._node}"):
            # A folder may be removed meanwhile by another run, or be another user's.
            with contextlib.suppress(OSError):
                is_old = time.time() - folder.stat().st_mtime > _STALE_SECONDS
                if is_old and folder != self._files.path and not _is_in_use(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_of_history(step: int, copied: Sequence[int], began: Sequence[int]) -> bool:
    """Return whether a run has done the step of a copy, and no later start has undone it.

    Args:
        copied: value of `began` when the copy was made.
        began: steps that were done when each start of the run began to train.
    """
    # A copy that was made during start n knows the first n entries; entry n is the start that made it.
    number = len(copied)
    is_known = number < len(began) and list(copied) == list(began[:number])
    return is_known and began[number] < step and not any(steps < step for steps in began[number + 1 :])


def _newest_complete_step(nodes: Mapping[str, Iterable[_CopyPart]], world: int) -> int | None:
    """The newest step of which some node has the part of each rank."""
    present = {part for parts in nodes.values() for part in parts}
    steps = sorted({step for _, step in present}, reverse=True)
    return next((step for step in steps if all(_CopyPart(rank, step) in present for rank in range(world))), None)


# ---- the files of copies, one for each rank and step, in a folder of this user's alone: the length of a header, the
# header (JSON), the bytes of tensors, and a digest of all these; a file that cannot be read or is damaged is missing


_NAME = re.compile(r"rank-(\d{4,})-step-(\d{8,})")
_HEADER_BYTES = 8  # bytes of the number that is the header's length
_DIGEST_BYTES = 16  # bytes of a digest of xxh3_128


class _CopyPart(NamedTuple):
    rank: int
    step: int

    @property
    def file_name(self) -> str:
        return f"rank-{self.rank:04d}-step-{self.step:08d}"


class _CopyFiles:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def is_open(self) -> bool:
        """The folder exists, and is this user's alone."""
        return self._lock is not None

    def open(self) -> None:
        """Show other runs until the end of this process that the folder, if it exists, is in use.

        Raises:
            OSError: another user owns it or may use it, or it is a link.
        """
        if self._lock is None:
            with contextlib.suppress(FileNotFoundError):
                self._lock = _locked(self.path, fcntl.LOCK_SH)

    def make(self) -> None:
        """Make the folder if it does not exist, and open it."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.open()

    def parts(self) -> list[_CopyPart]:
        matches = (_NAME.fullmatch(path.name) for path in self.path.glob("rank-*"))
        return sorted(_CopyPart(int(match[1]), int(match[2])) for match in matches if match is not None)

    def bytes(self) -> int:
        return sum((self.path / part.file_name).lstat().st_size for part in self.parts())

    def write(self, part: _CopyPart, header: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
        text = json.dumps({**header, **part._asdict()}).encode()
        digest = xxhash.xxh3_128()
        head: list[Any] = [len(text).to_bytes(_HEADER_BYTES, "little"), text]
        path = self.path / part.file_name
        # Piece by piece, so that the host never has a second copy of the whole state.
        with path.with_suffix(".new").open("wb") as file:
            for piece in chain(head, map(_tensor_bytes, tensors)):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        path.with_suffix(".new").replace(path)

    def write_content(self, part: _CopyPart, content: Tensor) -> None:
        path = self.path / part.file_name
        path.with_suffix(".new").write_bytes(_tensor_bytes(content))
        path.with_suffix(".new").replace(path)

    def content(self, part: _CopyPart) -> Tensor:
        """The bytes of a part's file, which are not copied. OSError or ValueError: it is not there, or is empty."""
        with (self.path / part.file_name).open("rb") as file:
            # Private and writable, as torch warns of memory that it may not write; a write would copy its page.
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def read(self, part: _CopyPart, *, checked: bool = True) -> tuple[dict[str, Any], Tensor] | None:
        """Header and bytes of a part; None if it is no complete one. `checked`: compare the digest, which reads all."""
        try:
            content = self.content(part)
            data = _tensor_bytes(content)
            if checked and xxhash.xxh3_128(data[:-_DIGEST_BYTES]).digest() != bytes(data[-_DIGEST_BYTES:]):
                return None
            end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
            header = yaml_and_json.json_value(bytes(data[_HEADER_BYTES:end]))
            is_named_so = (header["rank"], header["step"]) == part
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (header, content[end:-_DIGEST_BYTES]) if is_named_so else None

    def remove(self, part: _CopyPart) -> None:
        (self.path / part.file_name).unlink(missing_ok=True)


def _is_in_use(folder: Path) -> bool:
    """Return whether a process may write to a folder of parts. OSError: it is gone, or may be another user's."""
    try:
        os.close(_locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def _locked(folder: Path, kind: int) -> int:
    """A descriptor of a folder, locked until it is closed or the process ends. BlockingIOError: another has the lock.

    Ranks share their lock: while any of them lives, no other process can lock the folder alone.
    """
    files.require_trusted(folder, files.OTHERS)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _tensor_bytes(tensor: Tensor) -> memoryview:
    plain: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(plain)
