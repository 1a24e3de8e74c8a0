"""The device of this rank, and what differs from device to device. No other file names a vendor."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import ConfigError, see
from shardwise.base.hardware import accelerators, visible_neuron_cores
from shardwise.distributed.torch_private import has_data, has_triton, scaled_matmul, set_allocator

_HIDING = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "NEURON_RT_VISIBLE_CORES",
)
"""Variables by which a launcher shows each rank an accelerator of its own."""


_EXPANDABLE_SEGMENTS = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Let the device's memory allocator extend its segments on CUDA, unless the user has set the allocator.

    For processes that have no tensors on the device yet.
    """
    if torch.version.cuda is not None and not _allocator_settings():
        set_allocator(_EXPANDABLE_SEGMENTS)


def has_fixed_segments() -> bool:
    """True if the user has set the device's memory allocator otherwise than `use_expandable_segments` does."""
    return bool(_allocator_settings()) and _EXPANDABLE_SEGMENTS not in _allocator_settings()


def _allocator_settings() -> str:
    return "".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


def local_device() -> torch.device:
    """This process's device: the accelerator at `LOCAL_RANK`, or the only one that it sees, or the CPU without any.

    The device stays untouched: TorchNeuron's process group must be made before its runtime starts. `begin_use` follows.

    Raises:
        ConfigError: the machine has accelerators that torch cannot use; this rank has none of its own, or nothing says
            which one is its own.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        kind, count = accelerators()
        if count:
            raise ConfigError(
                f"torch {torch.__version__} must be able to use this machine's accelerators ({count} × {kind}), and "
                "finds none: install a torch that is built for them, or their driver, or hide them to train on the CPU"
                f"{see('runs#accelerator-not-usable')}"
            )
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None and count > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"LOCAL_RANK must be set to this rank's number on its machine, as torchrun does: it sees {count} "
            "accelerators, and the number says which one is its own"
            f"{see('runs#local-rank')}"
        )
    index = int(local_rank or "0")
    if index >= count and (count > 1 or not any(name in os.environ for name in _HIDING)):
        raise ConfigError(
            f"LOCAL_RANK ({index}) must be less than the number of accelerators ({count}): two ranks cannot train on "
            "one; start fewer ranks on each machine"
            f"{see('runs#local-rank')}"
        )
    # TorchNeuron numbers the devices of a job's ranks by LOCAL_RANK, whichever cores each process sees.
    return torch.device(device.type, index if device.type == "neuron" else min(index, count - 1))


def begin_use(device: torch.device) -> None:
    """Make a device the current one of this process, and start it; the process group of a job exists already."""
    if device.type == "cpu":
        return
    torch.accelerator.set_device_index(device)
    # torch's DeviceMesh takes the device of LOCAL_RANK, even if a launcher hides it, unless a device is in use before.
    torch.empty(1, device=device)


def choose_neuron_core(device: torch.device) -> None:
    """Take one of the visible NeuronCores as this rank's device; ConfigError if there are too few for all ranks."""
    cores = visible_neuron_cores() if device.type != "cpu" else []
    if 1 < len(cores) <= device.index:
        raise ConfigError(
            f"NEURON_RT_VISIBLE_CORES ({os.environ['NEURON_RT_VISIBLE_CORES']}) must name a core for each rank of this "
            f"machine, and has {len(cores)}: rank {device.index} has none; start fewer ranks, or show more cores"
        )
    if len(cores) > 1:
        os.environ["NEURON_RT_VISIBLE_CORES"] = str(cores[device.index])


def require_build_for(kind: str) -> None:
    """Raise ConfigError unless this torch is built for a kind of device, which the machine need not have."""
    missing = kind == "cuda" and not torch.backends.cuda.is_built()
    try:
        torch.device(kind)
    except RuntimeError:
        missing = True
    if missing:
        raise ConfigError(
            f"--device {kind} needs a torch that is built for it, and {torch.__version__} is not: install one that is, "
            "or compile on a machine with one such device, which is enough for all ranks"
        )


def backend(device: torch.device) -> str:
    """The process-group backend of a device: gloo for the CPU, NCCL for CUDA, the accelerator's own elsewhere."""
    return dist.get_default_backend_for_device(device)


def is_neuron(backend_name: str) -> bool:
    """True for TorchNeuron's process groups: they bind no device, and an all-to-all takes runs of one length only."""
    return backend_name == "neuron"


def has_all_to_all(backend_name: str, ranks: Sequence[int]) -> bool:
    """True if a process-group backend has an all-to-all of these ranks of the job.

    TorchNeuron's is for 4, 8, 16 or a multiple of 32 neighbours, of which the first is a multiple of their number.
    """
    size = len(ranks)
    are_neighbours = ranks[0] % size == 0 and [*ranks] == [*range(ranks[0], ranks[0] + size)]
    return not is_neuron(backend_name) or (are_neighbours and (size in (4, 8, 16) or size % 32 == 0))


def lacks_messages(error: BaseException) -> bool:
    """True if an exception says that the library of a device sends no messages from rank to rank.

    Torch says so of a group such as TorchNeuron's of April 2026, which has collectives and no backend below them.
    """
    return isinstance(error, NotImplementedError) or "No backend type associated" in str(error)


def without_messages(key: str, device: torch.device, instead: str, error: Exception) -> str:
    """The error text where a device's library sends no messages from rank to rank, for a key that needs them."""
    return (
        f"{key} needs messages from rank to rank, which the library of this device ({device.type}) does not send: "
        f"{error}; set {instead}, or install a release of it that does"
    )


def name(device: torch.device) -> str:
    """The device's product name, as its driver gives it; its kind where none is here, and for the CPU."""
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    # TorchNeuron has its kind, such as `trn2`, in the properties only; CUDA and XPU read their name there too.
    is_told = hasattr(module, "get_device_properties") and module.is_available()
    return str(module.get_device_properties(device).name) if is_told else device.type


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the host does not wait for the copy, since it is made from pinned memory."""
    if device.type == "cpu":
        return host
    return (host.pin_memory() if has_data(host) else host).to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work; a CPU has no queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def side_stream(device: torch.device) -> torch.Stream | None:
    """A stream of an accelerator for work beside that of the training; None for the CPU."""
    return None if device.type == "cpu" else torch.Stream(device)


def add_in_one_order(device: torch.device, threads: int) -> None:
    """Make the device's kernels deterministic: they add in the same order each time.

    On a CPU the order depends on the number of threads. On CUDA, attention's backward pass adds in a changing order
    unless torch is told otherwise; an operator that has no other kernel then raises an error.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads)
        return
    # Torch demands it, and cuBLAS reads it with its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Torch would fill each new tensor, which costs a pass; nothing here reads what was not written.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def use_flash_attention_3(device: torch.device) -> None:
    """Switch a device's attention kernels to FlashAttention 3 (arXiv:2407.08608); ConfigError if it has none."""
    if device.type == "cuda":
        if torch.cuda.is_available() and (found := torch.cuda.get_device_capability(device)) != (9, 0):
            where = f"compute capability {found[0]}.{found[1]}: its kernels are for 9.0, such as an H100"
            raise ConfigError(f"train.switches (flash_attention_3) must be left out on a GPU of {where}")
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (AttributeError, ImportError, RuntimeError, ValueError) as error:
            needs = "train.switches (flash_attention_3) needs torch 2.11 and the module flash_attn_interface"
            raise ConfigError(f"{needs}: {error}; install them, or leave it out") from None
        torch.backends.cuda.enable_cudnn_sdp(False)  # which torch would prefer


class CapturedCall:
    """A function of a CUDA device's tensors of equal shapes, which from call 4 on is replayed as a CUDA graph."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._calls = 0
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, function: Callable[[dict[str, Tensor]], Tensor], tensors: dict[str, Tensor]) -> Tensor:
        self._calls += 1
        if self._calls < 4:
            # On the stream of the capture, with which autograd's nodes stay.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                result = function(tensors)
            torch.cuda.current_stream().wait_stream(self._stream)
            return result
        if self._calls == 4:
            self._kept = {name: tensor.clone() for name, tensor in tensors.items()}
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._result = function(self._kept)
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor)
        self._graph.replay()
        return self._result.clone()


def captured_call(device: torch.device) -> CapturedCall | None:
    """A `CapturedCall` on a CUDA device; None on other devices."""
    return CapturedCall() if device.type == "cuda" else None


def least_flex_head_width(device: torch.device) -> int:
    """The least width of a head for which a device has kernels of FlexAttention."""
    return 16 if device.type == "cuda" else 1


@functools.cache
def attends_by_document(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the device has a kernel that attends to documents of any length in one call (`varlen_attn`).

    Kernels and releases of torch differ in the dtypes and widths that they take, in windows, in keys that queries share
    and in whether they have a backward pass. A small call answers for all.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn  # slow to import

        # The last document is empty.
        bounds = torch.tensor([0, 1, 4, 4], dtype=torch.int32, device=device)
        if not has_data(bounds):
            return False
        with torch.enable_grad():
            q = torch.zeros(4, 2, head_dim, dtype=dtype, device=device)
            k = torch.zeros(4, 1, head_dim, dtype=dtype, device=device)
            numbers = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=dtype, device=device)
            v = numbers.view(4, 1, 1).repeat(1, 1, head_dim).requires_grad_()
            out = cast(Tensor, varlen_attn(q, k, v, bounds, bounds, 3, 3, window_size=(1, 0), enable_gqa=True))
            (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
        # Each query has the mean of its own value and of the one before, if that is of its document.
        return out[:, 0, 0].tolist() == [1.0, 2.0, 3.0, 6.0] and dv[:, 0, 0].tolist() == [2.0, 3.0, 2.0, 1.0]
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        return False


Mark: TypeAlias = float | torch.Event
"""A time by `time.perf_counter`, or an event in an accelerator's stream."""


def mark_time(device: torch.device) -> Mark:
    """Mark the time of a device: on an accelerator, the time when it has done the work that is queued so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds between two marks of a device, which must have reached both."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


_process = functools.cache(psutil.Process)  # to find a process takes longer than to ask it


def memory_in_use(device: torch.device) -> int:
    """Ask a device for the bytes that this process holds now: allocated on an accelerator, resident on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.memory_allocated(device))
    return int(_process(os.getpid()).memory_info().rss)


def peak_memory(device: torch.device) -> int:
    """Ask a device for the peak bytes of this process: allocated on an accelerator, resident on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def allocator_bytes(device: torch.device) -> dict[str, int]:
    """Ask a device's allocator for its bytes: `allocated` by tensors, `reserved` for them, and the most of each.

    Empty on the CPU. The host does not wait.
    """
    if device.type == "cpu":
        return {}
    memory = torch.accelerator
    return {
        "allocated": int(memory.memory_allocated(device)),
        "reserved": int(memory.memory_reserved(device)),
        "most_allocated": int(memory.max_memory_allocated(device)),
        "most_reserved": int(memory.max_memory_reserved(device)),
    }


def utilization() -> float | None:
    """Ask this rank's device, a GPU, for its utilization, 0 to 1; None where no library tells it."""
    try:
        return torch.cuda.utilization() / 100
    except Exception:  # noqa: BLE001  no library, no driver, or a device that NVML does not see
        return None


def total_memory(device: torch.device) -> int | None:
    """Ask an accelerator for the bytes of its memory; None for the CPU, and where the device does not tell."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the device multiplies matrices of this dtype."""
    if dtype == torch.float64:
        return widest_dtype(device) == dtype
    try:
        matrix = torch.zeros(2, 2, dtype=dtype, device=device)
        return (matrix @ matrix).dtype == dtype
    except (NotImplementedError, RuntimeError, TypeError):
        return False


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """True if the device multiplies matrices in 8-bit floating point."""
    try:
        matrix = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        product = scaled_matmul(matrix.to(torch.float8_e5m2), matrix, scale, scale, torch.float32)
        return bool((product == 16.0).all())
    except (NotImplementedError, RuntimeError, TypeError):
        return False


_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    # torch says so of a tensor that no memory could hold.
    "Storage size calculation overflowed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception of any device says that its memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@functools.cache
def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that does not compute in float64.

    Apple's GPUs refuse it; TorchNeuron computes in float32 and gives the result the wider type.
    """
    try:
        total = torch.zeros((), dtype=torch.float64, device=device) + 1.0 + 2.0**-40
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64 if not has_data(total) or total.item() > 1.0 else torch.float32


@functools.cache
def has_wide_integers(device: torch.device) -> bool:
    """True if the device computes in 64-bit integers; TorchNeuron computes in 32 bits and widens the result."""
    if device.type in ("cpu", "meta"):
        return True
    number = torch.full((2,), 1, dtype=torch.int64, device=device) << 40
    return not has_data(number) or number.tolist() == [1 << 40] * 2


def shares_memory(device: torch.device, ranks: int) -> bool:
    """True if the devices of so many neighbouring ranks are GPUs with access to each other's memory (CUDA peers)."""
    if device.type != "cuda" or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) % ranks:
        return False
    first = (device.index or 0) // ranks * ranks
    peers = [index for index in range(first, first + ranks) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)


def has_fused_adamw(device: torch.device) -> bool:
    """True if AdamW has a fused kernel there (`torch.optim.AdamW(fused=True)`)."""
    return device.type in ("cpu", "cuda")


@functools.cache
def compiles_kernels(device: torch.device) -> bool:
    """True if `torch.compile` makes kernels for the device within seconds, so that a step may use them unasked."""
    if device.type != "cuda" or not has_triton():
        return False
    # Triton compiles the calls of its kernels by the host's compiler.
    return "CC" in os.environ or any(shutil.which(name) is not None for name in ("gcc", "clang", "cc"))


@functools.cache
def cpu_prefers_onednn() -> bool:
    """True if this rank's device, a CPU that is not Intel's, runs float32 matmuls faster by oneDNN than by MKL."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    vendor = next((line for line in lines if line.startswith("vendor_id")), None)
    return vendor is not None and not vendor.endswith("GenuineIntel")


@functools.cache
def draws_on_host(device: torch.device) -> bool:
    """True if an accelerator's dropout draws its masks from the host's generator, as TorchNeuron's does."""
    before = torch.default_generator.get_state()
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    torch.native_dropout(torch.ones(64, device=device), 0.5, True)
    after = torch.default_generator.get_state()
    torch.default_generator.set_state(before)
    module.set_rng_state(state, device)
    return not torch.equal(before, after)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the generators that the device draws from start from `seed`; afterwards they are as before."""
    with ExitStack() as states:
        if device.type == "cpu" or draws_on_host(device):
            states.callback(torch.default_generator.set_state, torch.default_generator.get_state())
            torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            states.callback(module.set_rng_state, module.get_rng_state(device), device)
            module.manual_seed(seed)
        yield


# ---- what errors of the libraries mean that carry messages between ranks


def is_lost_connection(error: BaseException) -> bool:
    """True if an exception of gloo, NCCL or another device's library says that the connection to a rank is lost."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER_WORDS)


_LOST_PEER_WORDS = (
    "gloo",
    # gloo says so, without its name, of a rank that did not answer in time.
    "Application timeout caused pair closure",
    # NCCL says so of a rank whose process has exited, and of network errors.
    "ncclRemoteError",
    # NCCL says so where a socket was closed.
    "ncclSystemError",
    # NCCL's watchdog aborts the communicator of a collective that does not end.
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
    "Connection closed by remote peer",
)


def is_shared_device(error: BaseException) -> bool:
    """True if an exception of NCCL says that two ranks use one device."""
    return isinstance(error, RuntimeError) and "Duplicate GPU detected" in str(error)
