"""All uses of private names of torch, and why each is needed. Nothing else imports `torch.*._name`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend
from torch.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwise.base.errors import nearest_name

_COMPILER = "torch._dynamo"


def onednn_linear(x: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
    """`x weightᵀ`, or `total + x weightᵀ`, by torch's private operators of oneDNN; float32 on a CPU; no gradient.

    x `[…, K]`, weight `[N, K]`, total `[…, N]` → `[…, N]`. `torch.nn.functional.linear` always uses MKL for float32.
    These operators are those that torch's own compiler emits for linear layers on a CPU.
    """
    product: Tensor
    if total is None:
        product = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    else:
        product = torch.ops.mkldnn._linear_pointwise.binary(x, total, weight, None, "add")
    return product


def scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`a b` of fp8 numbers with scales `[]`, by torch's private `_scaled_mm`: a `[M, K]`, b `[K, N]`; no gradient.

    With `fast`, an NVIDIA GPU adds with fewer bits. A CPU multiplies and adds in float32, which holds each product of
    two fp8 numbers exactly.
    """
    if a.device.type == "cpu":
        product: Tensor = torch.ops.shardwise.scaled_matmul(a, b, scale_a, scale_b, dtype)
        return product
    # Kernels of GPUs read both operands along K.
    b = b.t().contiguous().t()
    return torch._scaled_mm(a.contiguous(), b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


def _scaled_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).mul_(scale_a).mul_(scale_b).to(dtype)


# CPUs without AMX compute torch's operator like this one. With AMX it calls oneDNN, which for two e4m3 operands has a
# kernel hundreds of times slower. It is an operator, as a compiler of its parts would add in another order.
_OPERATORS = torch.library.Library("shardwise", "FRAGMENT")
_OPERATORS.define("scaled_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor")
_OPERATORS.impl("scaled_matmul", _scaled_matmul, "CompositeExplicitAutograd")


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of the same memory, which torch tells in private."""
    is_alias: bool = torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]
    return is_alias


def has_fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, *, causal: bool, is_grouped: bool
) -> bool:
    """Return whether torch's private choice of attention for these tensors is a fused kernel, which keeps no scores."""
    choice = torch._fused_sdp_choice(q, k, v, mask, p, causal, enable_gqa=is_grouped)
    return choice != SDPBackend.MATH.value


def set_allocator(settings: str) -> None:
    """Set torch's allocator of accelerators as the variable `PYTORCH_ALLOC_CONF` does, by a private function."""
    cast(Any, torch._C)._accelerator_setAllocatorSettings(settings)


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention by torch's private kernel for CPUs, and the logarithms of its sums, `[B, n, S]`.

    q `[B, n, S, d]`; k and v `[B, m, L, d]`, where m divides n. The mask is added to the scores; or `causal`, with
    S = L: each query sees the keys up to it.
    """
    if q.shape[1] != k.shape[1] and mask is None and not causal:
        # The queries of all heads that share a key follow one another: the kernel is faster with more queries.
        heads = (k.shape[1], -1)
        out, log_sums = cpu_attention(q.unflatten(1, heads).flatten(2, 3), k, v, scale=scale)
        lengths = (-1, q.shape[2])
        return out.unflatten(2, lengths).flatten(1, 2), log_sums.unflatten(2, lengths).flatten(1, 2)
    out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, log_sums


def cpu_attention_gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of torch's private `cpu_attention`, or their terms if `out` and `log_sums` are over more keys."""
    if q.shape[1] != k.shape[1] and mask is None and not causal:
        heads = (k.shape[1], -1)
        rows = (t.unflatten(1, heads).flatten(2, 3) for t in (dy, q, out, log_sums))
        dy_rows, q_rows, out_rows, sums_rows = rows
        dq, dk, dv = cpu_attention_gradients(dy_rows, q_rows, k, v, out_rows, sums_rows, scale=scale)
        return dq.unflatten(2, (-1, q.shape[2])).flatten(1, 2), dk, dv
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, out, log_sums, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


def fused_all_gather_matmul(x: Tensor, weights: list[Tensor], group: ProcessGroup) -> tuple[Tensor, list[Tensor]]:
    """Torch's private operator of x `[n, …, K]` of g ranks → `[g·n, …, K]`, and its products with weights `[K, N]`.

    A CUDA operator that copies over NVLink through symmetric memory, which each rank of the group can address.
    """
    import torch.distributed._symmetric_memory  # defines the operator

    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, weights, 0, group.group_name)
    return gathered, products


def fused_matmul_reduce_scatter(x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """Torch's private operator of x `[g·n, …, K]` and weight `[K, N]` of g ranks → this rank's sum `[n, …, N]`.

    A CUDA operator, as `fused_all_gather_matmul`.
    """
    import torch.distributed._symmetric_memory  # defines the operator

    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group.group_name)
    return out


def register_group_name(name: str, group: ProcessGroup) -> None:
    """Register a process group under one more name, for collectives of compiled graphs; RuntimeError if it is taken.

    Torch's names number the groups that a process has made, so that they differ from rank to rank.
    """
    torch._C._distributed_c10d._register_process_group(cast(Any, name), group)


def traced_all_reduce(x: Tensor, op: str, group_name: str) -> Tensor:
    """The reduction over a group, `sum` or `max`, as a node of a compiled graph."""
    return _arrived(torch.ops._c10d_functional.all_reduce(x, op, group_name))


def traced_all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    """The tensors of a group's ranks along dim 0, as a node of a compiled graph."""
    return _arrived(torch.ops._c10d_functional.all_gather_into_tensor(x, size, group_name))


def traced_reduce_scatter(x: Tensor, size: int, group_name: str) -> Tensor:
    """This rank's part, along dim 0, of the sum over a group, as a node of a compiled graph."""
    return _arrived(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", size, group_name))


def traced_all_to_all(x: Tensor, size: int, group_name: str) -> Tensor:
    """Each rank's r-th part along dim 0 goes to rank r, by a private operator that torch's compiler keeps in graphs."""
    rows = [len(x) // size] * size
    return _arrived(torch.ops._c10d_functional.all_to_all_single(x, rows, rows, group_name))


def _arrived(pending: Tensor) -> Tensor:
    tensor: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return tensor


def graph_is_kept() -> bool:
    """True if the present backward pass keeps its graph (`retain_graph`), which autograd tells in private.

    If not, the tensors that an autograd function saved are freed after the pass, which may overwrite them.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def has_data(tensor: Tensor) -> bool:
    """True unless a tensor is torch's private FakeTensor, without numbers. By name, as the class is slow to import."""
    return type(tensor).__name__ != "FakeTensor"


def version_of(tensor: Tensor) -> int:
    """Torch's private count of in-place changes of a tensor's memory, also by views; those by `.data` do not count."""
    return tensor._version


def _unwrapped_without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that leaves out the decorators of `method` as long as nobody has imported torch's compiler."""
    unwrapped = inspect.unwrap(method)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return (method if _COMPILER in sys.modules else unwrapped)(*args, **options)

    return call


class WithoutCompiler(torch.optim.Optimizer):
    """An optimizer without torch's private decorators, which import torch's compiler: that is slow.

    Some methods of `torch.optim.Optimizer` must not be traced by the compiler; their decorators import it at the first
    call. As long as nobody else imported the compiler, nothing can trace them, and they work without decorators.
    """

    add_param_group = _unwrapped_without_compiler(torch.optim.Optimizer.add_param_group)
    state_dict = _unwrapped_without_compiler(torch.optim.Optimizer.state_dict)
    load_state_dict = _unwrapped_without_compiler(torch.optim.Optimizer.load_state_dict)


def without_compiler(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Make a torch optimizer a `WithoutCompiler`: a subclass without torch's private decorators."""
    module = {"__module__": optimizer_class.__module__, "__doc__": optimizer_class.__doc__}
    return types.new_class(
        optimizer_class.__name__, (optimizer_class, WithoutCompiler), exec_body=lambda body: body.update(module)
    )


def step_optimizer(optimizer: torch.optim.Optimizer, divisor: Tensor | None = None) -> None:
    """`optimizer.step()` without torch's private decorators, which import its compiler; step hooks run only with them.

    Where the optimizer `divides_gradients`, it divides them by a `divisor` `[]`, by the way that gradient scalers use.
    """
    scaling = {} if divisor is None else {"grad_scale": divisor, "found_inf": None}
    vars(optimizer).update(scaling)
    try:
        if _COMPILER in sys.modules:
            optimizer.step()
        else:
            # The decorators of `step` do this too.
            with torch.no_grad():
                inspect.unwrap(type(optimizer).step)(optimizer)
    finally:
        for name in scaling:
            delattr(optimizer, name)


def divides_gradients(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """True if a fused kernel of torch's divides gradients as it reads them, which a private attribute tells."""
    is_torchs = inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")
    return is_torchs and bool(group.get("fused")) and getattr(optimizer, "_step_supports_amp_scaling", False)


@contextmanager
def calling_hooks(module: nn.Module) -> Iterator[None]:
    """Call a module's private forward hooks around another method, whose backward pass needs no parameters."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    yield
    for hook in module._forward_hooks.values():
        hook(module, (), None)


def calls_only_forward(module: nn.Module, kind: type[nn.Module]) -> TypeGuard[Any]:
    """True if a module's call is the forward of `kind` alone: no wrapper, compiler or private list of hooks."""
    if torch.compiler.is_compiling() or getattr(module.forward, "__func__", None) is not kind.forward:
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not (any(hooks) or module._compiled_call_impl or torch.nn.modules.module._has_any_global_hook())


def others_keep_tensors() -> bool:
    """True if torch's private stacks hold a selective checkpoint or a user's hooks, which may keep saved tensors."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_users = hooks and not str(hooks[0].__module__).startswith(("shardwise.", "torch.utils.checkpoint"))
    return bool(is_users) or any("checkpoint" in type(mode).__module__ for mode in _get_current_dispatch_mode_stack())


def call_without_overrides(function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch with `__torch_function__` of all arguments disabled, by torch's private switch."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is under way, by the private queue of autograd's engine."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def backward_number() -> int:
    """Return torch's private number of the backward pass that is under way, which no other pass of this process has."""
    return torch._C._current_graph_task_id()


def tensors_in(output: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, by torch's private `_pytree`."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def set_default_timeout(limit: timedelta) -> None:
    """Set torch's private timeouts of process groups made from here on, also of a `DeviceMesh`: 10 or 30 minutes."""
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, limit)


@contextmanager
def named_messages(name: Callable[[Any], str]) -> Iterator[None]:
    """Inside, torch's profiler shows the sends and waits of torch's pipeline schedules by name (a private function).

    The schedules send and receive through one function of their module, and wait for its results. `name` gives the name
    of a `P2POp`.
    """
    from torch.distributed.pipelining import schedules

    plain = schedules._batch_p2p

    def named(p2p_ops: list[Any], desc: str | None = None) -> list[Any]:
        names = [name(op) for op in p2p_ops]
        with ExitStack() as spans:
            for op, text in zip(p2p_ops, names, strict=True):
                if op.op is torch.distributed.isend:
                    spans.enter_context(record_function(text))
            works = plain(p2p_ops, desc)
        one_each = len(works) == len(names)
        return [_NamedWork(work, names[i] if one_each else ", ".join(names)) for i, work in enumerate(works)]

    schedules._batch_p2p = named
    try:
        yield
    finally:
        schedules._batch_p2p = plain


class _CompilerCounts(NamedTuple):
    """Private counters of torch's compiler: graphs captured, or loaded in place of that, and those of cached code."""

    graphs: int
    hits: int


def has_triton() -> bool:
    """True if torch finds Triton, to write kernels for an accelerator of this machine (a private function of torch)."""
    from torch.utils._triton import has_triton

    return has_triton()


def compiler_counts() -> _CompilerCounts:
    """The private counters of torch's compiler in this process so far."""
    from torch._dynamo.utils import counters

    return _CompilerCounts(counters["stats"]["unique_graphs"], counters["aot_autograd"]["autograd_cache_hit"])


def let_length_change(tensor: Tensor) -> None:
    """Let graphs of torch's compiler take any length of this tensor from 2 on (private `mark_dynamic`)."""
    from torch._dynamo import mark_dynamic

    mark_dynamic(tensor, 0)


def prepare_compiler(threads: int) -> None:
    """Set private options of torch's compiler for this process: how many compilers run at once, and what is cached.

    The user's TORCHINDUCTOR_COMPILE_THREADS goes before `threads`. A graph with an autograd function written in Python
    is cached only where this setting says so.
    """
    import torch._functorch.config
    import torch._inductor.config

    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    with suppress(ImportError):
        from tqdm import tqdm  # type: ignore[import-untyped]

        # The compiler makes one of its bars. Its own lock is a semaphore of the system, which a rank that ends by
        # `os._exit` leaves behind; Python 3.14 warns of it.
        tqdm.set_lock(RLock())
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        torch._inductor.config.compile_threads = threads


def kept_function(path: Path, traced: Any, args: tuple[Any, ...]) -> Any:
    """Load torch's compiled function from a file, or compile it into the file, by private names; None if that fails.

    `traced` is of `torch.compile`. The function is `fn` of what is returned; `guard_check` tells if arguments fit it.
    """
    if Version(torch.__version__).release < (2, 13):
        return None  # may check less
    from unittest.mock import patch

    from torch._dynamo.utils import counters
    from torch._inductor import codecache, cpu_vec_isa

    # The machine is like that which compiled: nothing need try its instructions, or compile headers for kernels.
    trials = patch.object(cpu_vec_isa.VecISA, "_probe_load", lambda *_: True, create=True)
    headers = patch.object(codecache.CppPythonBindingsCodeCache, "_get_uncompiled_header", lambda _: None)
    with suppress(Exception), path.open("rb") as file, trials, headers:
        kept = torch.compiler.load_compiled_function(file)
        counters["stats"]["unique_graphs"] += 1
        counters["aot_autograd"]["autograd_cache_hit"] += 1
        return kept
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        kept = traced.aot_compile((args, {}))
        kept.save_compiled_function(str(path))
        return kept


def inductor_options_problem(options: Mapping[str, Any]) -> str | None:
    """The reason why torch's backend `inductor` does not take these options (a private list); None if it does."""
    from torch import _TorchCompileInductorWrapper
    from torch._inductor import list_options

    known = list_options()
    for name in options:
        if name.replace("-", "_") not in known:
            near = nearest_name(name, known)
            return f"inductor has no option {name}" + (f"; did you mean {near}?" if near else "")
    try:
        _TorchCompileInductorWrapper(None, dict(options), False)
    except RuntimeError as error:
        # An option has a value of another type.
        return str(error).partition("\n")[0]
    return None


def fake_process_group(rank: int, world: int) -> None:
    """Join torch's private fake process group, a job of this rank alone: collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


def fake_tensors() -> AbstractContextManager[object]:
    """Torch's private `FakeTensorMode`: inside, new tensors have a shape, a dtype and any device, and no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def trace_problem(error: BaseException) -> str | None:
    """The place and reason of a private error of torch's compiler, which captured no graph; None for other errors."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError

    if isinstance(error, FailOnRecompileLimitHit):
        return (
            "each block needs a graph of its own, as a number or text that it reads differs from block to block "
            "(TORCH_LOGS=recompiles names it); keep numbers in a buffer"
        )
    if not isinstance(error, Unsupported | UserError):
        return None
    stack = list(getattr(error, "real_stack", None) or [])
    reason = str(error).strip().partition("\n")[0]
    return f"{stack[-1].filename}:{stack[-1].lineno}: {reason}" if stack else reason


class _NamedWork:
    def __init__(self, work: Any, name: str) -> None:
        self._work = work
        self._name = name

    def wait(self) -> None:
        with record_function(self._name):
            self._work.wait()


def mend_split_backward() -> None:
    """Mend torch's private split backward pass: its second half begins with the gradients that the first has kept.

    Releases before torch 2.13 give the sum of the gradients of all outputs of an autograd function to the first one,
    and add what comes down from later uses of a weight to the gradient at a use that has it already (pytorch#180952).
    """
    if Version(torch.__version__).release < (2, 13):
        from torch.distributed.pipelining import stage

        cast(Any, stage).stage_backward_weight = add_weight_gradients


def add_weight_gradients(weights: Iterator[nn.Parameter], param_groups: list[dict[str, Any]]) -> None:
    """Add the gradients of a stage's weights to `grad`, in place of torch's private `stage_backward_weight`.

    Args:
        param_groups: weights (`params`), the nodes of the graph where their gradients leave the way to the stage's
            input (`intermediates`), and the gradients of each node's outputs (`grads`). They are released.
    """
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc

    by_node = {_get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    for group in param_groups:
        nodes = group.pop("intermediates")
        kept_gradients = group.pop("grads")
        edges = []
        gradients = []
        with ExitStack() as stack:
            for node, kept in zip(nodes, kept_gradients, strict=True):
                for number, gradient in enumerate(kept):
                    if gradient is not None:
                        edges.append(GradientEdge(node, number))
                        gradients.append(gradient)
                # What the kept gradient has already comes down again from the other nodes.
                if len(nodes) > 1:
                    stack.callback(node.register_prehook(lambda _, kept=kept: kept).remove)
            if not edges:
                continue
            ends = [GradientEdge(end, 0) for end in group["params"]]
            for end, gradient in zip(group["params"], torch.autograd.grad(edges, ends, gradients), strict=True):
                weight = by_node[end]
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def open_connections_to_others(stages: Iterable[Any]) -> None:
    """Mend torch's private opening of pipeline connections: a rank with two neighbouring stages sends none to itself.

    Releases before torch 2.13 send from each stage to the next, even on the same rank, which gloo refuses. torch 2.15
    opens no connections by messages.
    """
    for stage in stages:
        plain = getattr(stage, "_get_init_p2p_neighbors_ops", None)
        if plain is None:
            return

        # As defaults, the values of this stage: a name of the loop would mean the last one when the function is called.
        def to_others(plain: Callable[[], list[Any]] = plain, rank: int = stage.group_rank) -> list[Any]:
            return [op for op in plain() if op.group_peer != rank]

        stage._get_init_p2p_neighbors_ops = to_others
