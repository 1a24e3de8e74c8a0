"""The module `torch.strict`, and `load`, which makes the device known to torch in this process.

`counters()` says what the host waited for and where, the copies by direction, and the kernels by operator.
"""

import functools
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.strict import build, flash_attention

_waits: Counter[tuple[str, str]] = Counter()
_library: Any = None


@dataclass
class Counters:
    """Of this process since `reset_counters`.

    Attributes:
        waits: (why the host waited, the Python line that caused it) → how often.
        copies: `to device`, `to host` and `on device` → (number, bytes).
        kernels: operator → number.
    """

    waits: dict[tuple[str, str], int]
    copies: dict[str, tuple[int, int]]
    kernels: dict[str, int]


def counters() -> Counters:
    found = _library.counts()
    copies = {what.removeprefix("copy "): both for what, both in found.items() if what.startswith("copy ")}
    kernels = {what.removeprefix("kernel "): n for what, (n, _) in found.items() if what.startswith("kernel ")}
    return Counters(dict(_waits), copies, kernels)


def reset_counters() -> None:
    _waits.clear()
    _library.reset_counts()


def host_can_read(tensor: torch.Tensor) -> bool:
    """Whether a program on the host may follow the tensor's address."""
    return bool(_library.can_read(tensor))


def _waited(why: str) -> None:
    """Count a wait at the innermost line outside torch and this module."""
    ours = (str(Path(torch.__file__).parent), "<", __file__)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    where = "torch's backward pass"  # it runs in a thread without lines of Python
    if frame is not None:
        path = Path(frame.f_code.co_filename)
        where = f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_qualname}"
    _waits[why, where] += 1


def load() -> None:
    """Make torch know the device `strict`, in this process; a second call does nothing."""
    global _library
    if _library is not None:
        return
    _library = build.loaded()
    _library.on_wait(_waited)
    torch.utils.rename_privateuse1_backend("strict")
    torch._register_device_module("strict", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    flash_attention.install()
    backend = "neuron" if _is_like_neuron() else "strictccl"
    dist.Backend.register_backend(backend, _make_backend, extended_api=True, devices=["strict"])
    if os.environ.get("STRICT_CUDA_LIKE", "1") != "0" and not _is_like_neuron():
        dist.Backend.backend_capability["gloo"].append("strict")  # as torch has it for CUDA, and for nothing else


def _is_like_neuron() -> bool:
    return os.environ.get("STRICT_NEURON_LIKE", "0") != "0"


def _begin_as_neuron(rank: int) -> None:
    """Start the device as TorchNeuron's first process group does: untouched until then, and one for each process.

    The copy of its source of 21 April 2026 says so (torch_neuronx/distributed/backend.py).
    """
    assert not is_initialized(), "Neuron runtime should not be initialized before the init_process_group."
    cores = os.environ.setdefault("NEURON_RT_VISIBLE_CORES", str(rank))
    assert cores.isdecimal(), "Attempted to have more than one device per process in distributed setup"
    _library.use_only(int(os.environ["LOCAL_RANK"]))


def _make_backend(options: Any, _: Any) -> Any:
    """A communicator; where the world is bound to a device, it is split off the world's, as NCCL's is."""
    if _is_like_neuron() and not dist.is_initialized():
        _begin_as_neuron(options.group_rank)
    if dist.is_initialized() and (bound := dist.group.WORLD.bound_device_id) is not None:
        world = dist.group.WORLD._get_backend(bound)
        if world.supports_splitting:
            world.perform_nocolor_split(bound)
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    made = _library.make_backend(gloo, options.group_id)
    if not _is_like_neuron():
        return made
    inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    inner._register_backend(torch.device("strict"), dist.ProcessGroup.BackendType.CUSTOM, made)
    return _NeuronGroup(inner, options.global_ranks_in_group or [*range(options.group_size)])


_COLLECTIVES = ("allreduce", "broadcast", "reduce", "gather", "scatter", "barrier")
_COLLECTIVES += ("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "reduce_scatter")
_COLLECTIVES += ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base")
# The names that some of them have since torch 2.13.
_COLLECTIVES += ("all_gather_single", "all_gather_single_coalesced", "reduce_scatter_single")
_COLLECTIVES += ("reduce_scatter_single_coalesced", "all_to_all_single")


class _NeuronGroup(dist.ProcessGroup):
    """A group as TorchNeuron's: a subclass of torch's with these methods, and without any backend below it.

    What it does not have, such as messages, torch looks for in a backend, and finds none.
    """

    def __init__(self, inner: dist.ProcessGroup, ranks: list[int]) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._ranks = ranks

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self._inner._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("strict")]

    def _get_backend(self, _device: torch.device) -> dist.ProcessGroup:
        return self

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if name.startswith(("alltoall", "all_to_all")) and not self._has_all_to_all():
            raise RuntimeError(f"No implementation could handle operation {name}: unsupported world size {self.size()}")
        if name == "barrier" and self.size() != dist.get_world_size():
            raise NotImplementedError("Barrier is implemented only for default group")
        return getattr(self._inner, name)(*args, **options)

    def _has_all_to_all(self) -> bool:
        """Whether its all-to-all takes this group (torch_neuronx/python_ops/xla_ops/all_to_all_xla.py).

        It also wants the other ranks of the job in groups of this size that begin at multiples of it.
        """
        ranks, size = self._ranks, len(self._ranks)
        return (size in (4, 8, 16) or size % 32 == 0) and ranks[0] % size == 0 and ranks[-1] - ranks[0] == size - 1


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):
        setattr(_NeuronGroup, _name, functools.partialmethod(_NeuronGroup._call, _name))


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(_library.is_initialized())


def _lazy_init() -> None:
    """torch 2.11 asks for it."""


def _is_in_bad_fork() -> bool:
    return bool(_library.is_in_bad_fork())


def device_count() -> int:
    return int(_library.device_count())


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) else torch.device(device or "strict").index
    return current_device() if index is None else int(index)


def current_device() -> int:
    return int(torch.accelerator.current_device_index())


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


class device(torch.accelerator.device_index):
    """Makes a device the current one inside."""

    def __init__(self, device: Any) -> None:
        super().__init__(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="trn2" if _is_like_neuron() else "Strict test device")


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _library.generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _library.generator(_index(device)).set_state(state)


def manual_seed(seed: int) -> None:
    _library.generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _library.generator(index).manual_seed(seed)


def initial_seed() -> int:
    return int(_library.generator(current_device()).initial_seed())


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
