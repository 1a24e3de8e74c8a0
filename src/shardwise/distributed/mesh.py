"""The mesh of ranks, with a group of communicating ranks for each of its axes (`base/mesh_axes.py`).

The mesh is an argument wherever it is needed; nothing holds a current one.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

# Its functions' defaults capture the world's process group where it is first imported after the group was made, and a
# gloo group that something still holds at interpreter exit aborts the process. Imported before, they capture nothing.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.base.errors import ArgumentError, LostPeerError, count_problems, see
from shardwise.base.mesh_axes import ALIKE, AXES, CHOSEN_AXES, PIPELINE, Axis, names_axis, replica_axes_name
from shardwise.distributed import devices
from shardwise.distributed.torch_private import register_group_name, set_default_timeout


@dataclass
class Meter:
    """Bytes that each kind of collective puts on this rank's wire, by the ring formulas, with calls and seconds.

    With n ranks and a whole tensor of b bytes: all-reduce 2·b·(n-1)/n; all-gather, reduce-scatter and all-to-all
    b·(n-1)/n; broadcast b·(n-1)/n; send b.

    Attributes:
        bytes: bytes of each kind.
        calls: number of calls of each kind.
        spans: begin and end of each wait for a collective, added to a list that the reader of the times sets: waits of
            collectives that are called one after the other, and waits for those that run during other work.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    spans: list[tuple[devices.Mark, devices.Mark]] | None = None

    @property
    def seconds(self) -> float:
        """The sum of `spans`."""
        return sum(devices.seconds_between(start, end) for start, end in self.spans or ())

    def reset(self) -> None:
        self.bytes.clear()
        self.calls.clear()
        if self.spans is not None:
            self.spans.clear()


_SMALL_BYTES = 2**16  # of a tensor whose messages cost their latency and not their length
_FEW_RANKS = 8  # more would each connect to all others, and send many copies


class Group:
    """Ranks that communicate along one axis of the mesh, and this rank's place among them.

    Args:
        process_group: torch's process group of these ranks; None for a group of one.
        name: word for the group in messages and reports.
        grain: number of parts, of fixed shape, of every sum over these ranks, a power of two and a multiple of their
            number: the parts are added in pairs, whatever rank computes which. None: sums in any order, of one part on
            each rank.

    Attributes:
        ranks: global ranks in group order.
        rank: this process's index among them.
        meter: bytes and seconds of this group's collectives.
        called: the number of collectives that this rank has called, and the kind of the last one.
        scatter_by_all_to_all: True if `reduce_scatter` is made of an all-to-all and a sum.
        sends_equal_runs: True if the backend's all-to-all takes runs of one length only.
        has_all_to_all: True if the backend has an all-to-all of these ranks.
        message_device: device of numbers that the host sends; without an index, this process's current device.
        graph_name: name of the process group in compiled graphs; torch's own name until `share_graphs`.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, name: str = "", grain: int | None = None
    ) -> None:
        self.name = name
        self.grain = grain
        self._process_group = process_group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(process_group)) if process_group else (0,)
        self.rank: int = dist.get_rank(process_group) if process_group else 0
        self.size: int = len(self.ranks)
        self.meter = Meter()
        self.called: tuple[int, str] = (0, "")
        self.graph_name: str = process_group.group_name if process_group else ""
        self._shares_graphs = process_group is None
        self._subgroups: dict[int | tuple[int, ...], Group] = {}
        _open_groups.add(self)
        # gloo's own reduce-scatter is an all-reduce and a copy; an all-to-all summed in rank order takes a third of its
        # time (benchmarks/collectives.py). Other backends have a native one. The configuration is a text such as
        # "cpu:gloo,cuda:nccl"; after a bare init_process_group() torch's `get_backend` says "undefined".
        backends = dist.get_backend_config(process_group).split(",") if process_group else ["cpu:none"]
        self.scatter_by_all_to_all = self.adds_in_tree or all(backend.endswith(":gloo") for backend in backends)
        names = [backend.rpartition(":")[2] for backend in backends]
        self.sends_equal_runs = any(map(devices.is_neuron, names))
        self.has_all_to_all = all(devices.has_all_to_all(name, self.ranks) for name in names)
        device_types = [backend.split(":")[0] for backend in backends]
        self.message_device = torch.device("cpu" if "cpu" in device_types else device_types[0])

    def __repr__(self) -> str:
        return f"Group({self.name or 'ranks'} {self.rank}/{self.size})"

    @property
    def has_parts(self) -> bool:
        """True if each product over a dimension that these ranks cut is made of several parts."""
        return self.grain is not None and self.grain > 1

    @property
    def adds_in_tree(self) -> bool:
        """True if sums over these ranks follow the tree; a sum of two terms is the same in any order."""
        return self.grain is not None and self.size > 2

    @property
    def parts(self) -> int:
        """The parts of a sum that each rank computes: 1 where the order of sums is free."""
        return 1 if self.grain is None else self.grain // self.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's process group of these ranks; None in a job of one rank.

        A group of one in a job of several ranks gets its process group here, when something asks for it: torch takes
        None for all ranks of the job.
        """
        if self._process_group is None and self.size == 1 and _has_several_ranks():
            self._process_group = _new_group([dist.get_rank()])
        return self._process_group

    def __deepcopy__(self, memo: dict[int, object]) -> Group:
        """The group itself: a copied model communicates over the same ranks."""
        return self

    @staticmethod
    def of(group: Ranks | None) -> Group:
        """The `Group` for a group, a process group, one axis of a `DeviceMesh`, or None (a group of one).

        A process group has one `Group` for as long as it is used: layers that share it share its subgroups, and the
        optimizer's sums over it travel together.

        Raises:
            ArgumentError: anything else, such as a whole mesh or a degree.
        """
        if group is None or isinstance(group, Group):
            return group or Group()
        if isinstance(group, DeviceMesh) and group.ndim == 1:
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(
                f"group ({group!r}) must be the ranks of one axis: pass those of a Mesh, such as mesh.tp of "
                "Mesh(tensor=2), a process group, or one axis of a DeviceMesh, such as device_mesh['tp']"
            )
        known = _by_process_group.get(id(group))
        # Python may give the id of a process group that is gone to a new one.
        if known is None or known.process_group is not group:
            known = Group(group, name="group")
            _by_process_group[id(group)] = known
        return known

    @staticmethod
    def world(name: str = "world") -> Group:
        """All ranks of the job; a group of one for a process that was started by itself.

        Raises:
            RuntimeError: a launcher started several ranks, but no process group was initialised.
        """
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"a launcher started {launched} ranks (WORLD_SIZE), and each would train alone: "
                "call torch.distributed.init_process_group() first, or give group="
            )
        return Group(dist.group.WORLD if _has_several_ranks() else None, name=name)

    def share_graphs(self) -> None:
        """Have a `graph_name` that is the same on all ranks of the job, so that they can share compiled graphs.

        All ranks that call this, call it for their groups in the same order.
        """
        for number in itertools.count(1):
            if self._shares_graphs:
                return
            self.graph_name = f"shardwise-{self.name}-{number}"
            # A group of another mesh has the name: the next number is tried.
            with suppress(RuntimeError):
                assert self.process_group is not None
                register_group_name(self.graph_name, self.process_group)
                self._shares_graphs = True

    def split(self, size: int) -> Group:
        """The run of `size` consecutive ranks of this group that holds this rank. Made once, by its members only."""
        if self.size % size:
            raise ValueError(f"subgroup size ({size}) must divide the group's size ({self.size})")
        if size == self.size:
            return self
        if size not in self._subgroups:
            first = self.rank // size * size
            members = list(self.ranks[first : first + size])
            process_group = _new_group(members) if size > 1 else None
            self._subgroups[size] = Group(process_group, name=f"{self.name}/{size}", grain=self.grain and size)
        return self._subgroups[size]

    def pick(self, indices: tuple[int, ...], name: str) -> Group:
        """The ranks at some indices of this group, this rank's among them. Made once, by its members only."""
        assert self.rank in indices, f"{self} is not at {indices}"
        if len(indices) == self.size:
            return self
        if indices not in self._subgroups:
            process_group = _new_group([self.ranks[i] for i in indices])
            grain = self.grain and len(indices)
            self._subgroups[indices] = Group(process_group, name=f"{self.name}/{name}", grain=grain)
        return self._subgroups[indices]

    @property
    def meters(self) -> dict[str, Meter]:
        """This group's meter and those of its subgroups and theirs, by group name."""
        meters = {self.name: self.meter}
        for group in self._subgroups.values():
            meters |= group.meters
        return meters

    def note(self, kind: str) -> None:
        """Note that this rank calls a collective: where it hangs, the rank that has called fewer is the missing one."""
        self.called = (self.called[0] + 1, kind)

    def count(self, kind: str, whole_bytes: int) -> None:
        """Add a collective of a tensor of `whole_bytes` to the meter of its `kind`."""
        self.meter.calls[kind] += 1
        # Not noted: its receiver notes nothing, and `called` must be equal on ranks that agree.
        if kind == "send":
            self.meter.bytes[kind] += whole_bytes
            return
        self.note(kind)
        # A ring reduces and scatters in one round, and gathers in a second.
        rounds = 2 if kind == "all_reduce" else 1
        self.meter.bytes[kind] += rounds * whole_bytes * (self.size - 1) // self.size


def sends_to_all(group: Group, tensor: Tensor) -> bool:
    """True if a mesh's group sends a tensor to all its ranks at once, as gloo takes as long for one step of a ring."""
    return group.scatter_by_all_to_all and group.size <= _FEW_RANKS and 0 < tensor.nbytes <= _SMALL_BYTES


def narrows(group: Group, tensor: Tensor) -> bool:
    """True if numbers of 64 bits would be reduced by a device that computes in 32."""
    device = group.message_device if tensor.device.type == "cpu" else tensor.device
    return tensor.itemsize == 8 and not torch.compiler.is_compiling() and not devices.has_wide_integers(device)


def _has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _new_group(members: list[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of some ranks, made by these alone; None: of all ranks.

    All ranks of the job must make equally many groups between two that are of all ranks: since torch 2.14 the name of
    a group, by which its ranks find each other, has the number of groups that this rank made before.
    """
    with _unbound_world():
        process_group = dist.new_group(members, backend=backend, use_local_synchronization=members is not None)
    assert isinstance(process_group, dist.ProcessGroup), "this rank is no member"
    return process_group


@contextmanager
def _unbound_world() -> Iterator[None]:
    """Inside, torch makes each new group by itself, whatever device the world is bound to.

    Otherwise it splits the world's communicator, in which all ranks of the world must take part and which only NCCL
    can do, and looks for the world's device in a group over gloo, which serves no accelerator but CUDA.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


Ranks = Group | dist.ProcessGroup | DeviceMesh
"""The types that a layer, a loss or the optimizer takes as its group."""


_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()
_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()
_by_process_group: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


def calls_of_groups() -> dict[str, tuple[int, str]]:
    """`Group.called` of each group in use, named by its axis and its first rank: `tp@0`. Any thread may call it."""
    groups: list[Group] = []
    # The main thread has just made a group, while this one goes through the set.
    with suppress(RuntimeError):
        groups = list(_open_groups)
    return {f"{group.name}@{group.ranks[0]}": group.called for group in groups if group.called[0]}


@atexit.register
def _release() -> None:
    """Drop all process groups at exit: gloo's threads must be joined while the interpreter still runs."""
    for group in list(_open_groups):
        group._process_group = None
    for mesh in list(_open_meshes):
        mesh.device_mesh = None


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks of data and context parallelism, as the experts of a model are divided over them.

    Attributes:
        group: the ranks that together have all experts, each an equal run of them.
        replicas: the ranks that have the same experts; None: all of data and context parallelism.
    """

    group: Group = field(default_factory=Group)
    replicas: Group | None = None


class Mesh:
    """Ranks of the job arranged as `[pipeline, data, context, tensor]`, as this rank sees them.

    Args:
        tensor: tensor-parallel degree TP.
        pipeline: pipeline degree PP. The data-parallel degree is world / (TP × CP × PP).
        context: context-parallel degree CP: ranks that share the tokens of a sample.
        expert: expert-parallel degree EP: neighbours among the ranks of data and context parallelism that divide the
            experts of a block among them.
        device: device on which this rank computes; default: the accelerator at `LOCAL_RANK`, or the CPU.
        grains: number of parts of every sum over the ranks of an axis (`Group.grain`), by its short name: `tp`, `cp`,
            `dp`.

    Attributes:
        tp, cp, dp, pp: the groups of this rank along each axis.
        replicas: the ranks of data and context parallelism, which have the same part of the model.
        experts: those ranks as experts are divided over them.
        passes_in_step: True if replicas must make as many passes of the model, as tokens travel between them.
        world: all ranks.
        device_mesh: the `DeviceMesh` below (None for a single process).

    Raises:
        ConfigError: a degree is no whole number of at least 1.
        ValueError: the world size is no multiple of TP × CP × PP.
        RuntimeError: a launcher started several ranks, but no process group was initialised.
    """

    tp: Group
    cp: Group
    dp: Group
    pp: Group
    replicas: Group

    def __init__(
        self,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        device: torch.device | str | None = None,
        grains: Mapping[str, int] | None = None,
    ) -> None:
        chosen = {"tensor": tensor, "context": context, "pipeline": pipeline}
        if problems := count_problems({**chosen, "expert": expert}):
            raise ArgumentError(problems)
        # Numbers of numpy are valid too, and become plain ones.
        degrees = {name: int(degree) for name, degree in chosen.items()}
        self.device = torch.device(device) if device is not None else devices.local_device()
        self.world = Group.world()
        if device is None:
            devices.begin_use(self.device)
        model_ranks = math.prod(degrees.values())
        if self.world.size % model_ranks:
            named = [axis.degree for axis in CHOSEN_AXES if names_axis(axis, degrees)]
            product = " × ".join(named)
            values = " × ".join(str(degrees[name]) for name in named)
            raise ValueError(f"world size ({self.world.size}) must be a multiple of {product} ({values})")
        degrees["data"] = self.world.size // model_ranks
        self._degrees = degrees
        self.device_mesh: DeviceMesh | None = None
        self._host_groups: dict[str, Group] = {}
        process_groups: dict[str, dist.ProcessGroup] = {}
        if self.world.size > 1:
            _open_meshes.add(self)
            names = tuple(axis.name for axis in AXES)
            shape = tuple(degrees[axis.degree] for axis in AXES)
            with _unbound_world(), _while_ranks_meet():
                self.device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
            several = [axis.name for axis in AXES if degrees[axis.degree] > 1]
            process_groups = {name: self.device_mesh.get_group(name) for name in several}
        for axis in AXES:
            grain = (grains or {}).get(axis.name)
            setattr(self, axis.name, Group(process_groups.get(axis.name), name=axis.name, grain=grain))
        self.replicas = self._replicas()
        self.experts = self._experts(int(expert))
        self.passes_in_step = self.experts.group.size > 1

    def _experts(self, degree: int) -> ExpertRanks:
        if degree == 1:
            return ExpertRanks()
        ranks = self.replicas
        if ranks.size % degree:
            raise ValueError(f"expert ({degree}) must divide the ranks of data and context parallelism ({ranks.size})")
        place = ranks.rank % degree
        alike = tuple(range(place, ranks.size, degree))
        return ExpertRanks(ranks.split(degree), Group() if len(alike) == 1 else ranks.pick(alike, ALIKE))

    def _replicas(self) -> Group:
        name = replica_axes_name(self.dp.size, self.cp.size)
        if name in (self.dp.name, self.cp.name):
            return self.dp if name == self.dp.name else self.cp
        # In a stage, ranks with the same place along the tensor-parallel axis.
        ranks = list(self.stage.ranks[self.tp.rank :: self.tp.size])
        grain = self.dp.grain and self.dp.grain * self.cp.size
        return Group(_new_group(ranks), name=name, grain=grain)

    @property
    def dividing_tensors(self) -> tuple[Group, Group]:
        """The ranks that divide the experts, and those of the pipeline: in each, ranks have other tensors."""
        return self.experts.group, self.pp

    @property
    def stage(self) -> Group:
        """The ranks that hold the same pipeline stages as this one: all of data, context and tensor parallelism."""
        inner = [self._along(axis) for axis in AXES if axis is not PIPELINE]
        several = [group for group in inner if group.size > 1]
        if len(several) > 1:
            return self.world.split(math.prod(group.size for group in several))
        return several[0] if several else self.tp

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Every axis of the mesh, the replicas if they are on two axes, then the world."""
        axes = [self._along(axis) for axis in reversed(AXES)]
        return (*axes, *({self.replicas} - {*axes}), self.world)

    def _along(self, axis: Axis) -> Group:
        group: Group = getattr(self, axis.name)
        return group

    def host_group(self, name: str) -> Group:
        """A second group of all ranks, over gloo: for numbers on the host, or for another thread than the training's.

        There is one for each name. The first call makes it and is collective.
        """
        if name not in self._host_groups:
            process_group = _new_group(backend="gloo") if self.world.size > 1 else None
            self._host_groups[name] = Group(process_group, name=name)
        return self._host_groups[name]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis.name}={self._along(axis).size}" for axis in AXES if names_axis(axis, self._degrees))
        return f"Mesh({sizes}, rank={self.world.rank}, {self.device})"


def job_size() -> int:
    """The world size of this job: that of the process group, or before one exists that of the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def job_rank() -> int:
    """This process's global rank in the mesh's job, from the same source as `job_size`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


_CONNECTED_RANKS = 32
"""The largest number of ranks for which gloo connects all pairs when it makes a group.

Its messages for that grow with the cube of the ranks, so in larger jobs each pair connects when it first needs to
(`benchmarks/startup.py` has figures).
"""


def join(device: torch.device | None = None, *, timeout: float = 600.0) -> None:
    """Make the process group of the job that `RANK`, `WORLD_SIZE` and `MASTER_ADDR` describe; alone, do nothing.

    Args:
        device: device that decides the backend; default: the accelerator at `LOCAL_RANK`, or the CPU.
        timeout: seconds after which a collective fails whose other ranks never call it.

    Raises:
        ConfigError, RunError: the ranks cannot meet.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    _allow_sockets()
    if job_size() > _CONNECTED_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    device = device if device is not None else devices.local_device()
    devices.choose_neuron_core(device)
    limit = timedelta(seconds=timeout)
    backend = devices.backend(device)
    # torch binds the world to an accelerator, so that NCCL connects at once and reports what is wrong with it here.
    bound_device = device if device.type != "cpu" and not devices.is_neuron(backend) else None
    # Costly to import, for the ranks of a job.
    from shardwise.distributed import rendezvous, wait_limit

    with _while_ranks_meet():
        store = rendezvous.meet(job_rank(), job_size(), limit)
        options: dict[str, Any] = {}
        if store is not None:
            options = {"store": store, "rank": job_rank(), "world_size": job_size()}
        if backend == dist.Backend.GLOO and wait_limit.start_wait_limit(timeout):
            limit = wait_limit.NEVER
        set_default_timeout(limit)
        dist.init_process_group(backend, timeout=limit, device_id=bound_device, **options)
    devices.begin_use(device)


@contextmanager
def _while_ranks_meet() -> Iterator[None]:
    """Raise a sentence where another rank ends before the groups of this one are made."""
    try:
        yield
    except Exception as error:
        if not devices.is_lost_connection(error):
            raise
        raise LostPeerError(
            f"rank {job_rank()} lost the connection to another rank during the start{see('training#lost-connection')}"
        ) from error


def leave() -> None:
    """Leave the process group that `join` has made, if any. The process must end soon, as a rank's does.

    gloo's groups are not destroyed: where two ranks close their connections at once, its event loop can find a socket
    closed (`epoll_ctl: Bad file descriptor`), and aborts the process of a rank whose work is done.
    """
    if dist.is_initialized() and dist.get_backend() != dist.Backend.GLOO:
        dist.destroy_process_group()


def _allow_sockets() -> None:
    """Raise the limit on open files to its maximum: gloo keeps two sockets for each pair of ranks in each group."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
