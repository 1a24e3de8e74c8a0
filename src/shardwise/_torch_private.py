"""All uses of private names of torch, and why each is needed. Nothing else imports `torch.*._name`."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

_COMPILER = "torch._dynamo"


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weightᵀ` by oneDNN, for float32 on a CPU: x `[…, K]`, weight `[N, K]` → `[…, N]`; any strides; no gradient.

    `torch.nn.functional.linear` always uses MKL for float32. This operator is the one that torch's own compiler emits
    for linear layers on a CPU.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def fused_all_gather_matmul(x: Tensor, weights: list[Tensor], group: ProcessGroup) -> tuple[Tensor, list[Tensor]]:
    """x `[n, …, K]` of each of g ranks → `[g·n, …, K]`, and its products with weights `[K, N]`: piece by piece.

    A CUDA operator that copies over NVLink through symmetric memory, which each rank of the group can address.
    """
    import torch.distributed._symmetric_memory  # defines the operator

    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, weights, 0, group.group_name)
    return whole, products


def fused_matmul_reduce_scatter(x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """x `[g·n, …, K]` and weight `[K, N]` of each of g ranks → the sum of their products, this rank's `[n, …, N]`.

    A CUDA operator, as `fused_all_gather_matmul`.
    """
    import torch.distributed._symmetric_memory  # defines the operator

    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group.group_name)
    return out


def graph_is_kept() -> bool:
    """Whether the present backward pass keeps its graph for another one (`retain_graph`).

    If not, the tensors that an autograd function saved are freed after the pass, which may overwrite them.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def version_of(tensor: Tensor) -> int:
    """The number of in-place changes of a tensor's memory, by it or a view of it; changes by `.data` do not count."""
    return tensor._version


def _unwrapped_without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that leaves out the decorators of `method` as long as nobody has imported torch's compiler."""
    unwrapped = inspect.unwrap(method)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return (method if _COMPILER in sys.modules else unwrapped)(*args, **options)

    return call


class WithoutCompiler(torch.optim.Optimizer):
    """An optimizer that is made, saved and loaded without importing torch's compiler, as slow as importing torch.

    Some methods of `torch.optim.Optimizer` must not be traced by the compiler; their decorators import it at the first
    call. As long as nobody else imported the compiler, nothing can trace them, and they work without decorators.
    """

    add_param_group = _unwrapped_without_compiler(torch.optim.Optimizer.add_param_group)
    state_dict = _unwrapped_without_compiler(torch.optim.Optimizer.state_dict)
    load_state_dict = _unwrapped_without_compiler(torch.optim.Optimizer.load_state_dict)


def without_compiler(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of the same name; methods that `optimizer_class` does not override are those of `WithoutCompiler`."""
    module = {"__module__": optimizer_class.__module__, "__doc__": optimizer_class.__doc__}
    return types.new_class(
        optimizer_class.__name__, (optimizer_class, WithoutCompiler), exec_body=lambda body: body.update(module)
    )


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without importing torch's compiler; step hooks run only where the compiler was imported."""
    if _COMPILER in sys.modules:
        optimizer.step()
    else:
        with torch.no_grad():  # as the decorators of `step` do
            inspect.unwrap(type(optimizer).step)(optimizer)


def call_forward_pre_hooks(module: nn.Module) -> None:
    """Do what a call of the module does before its forward, for another method that uses its parameters."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def leave_events_without_names() -> None:
    """Let torchrun's rendezvous record its events, which nobody reads, without the names of the methods they are from.

    It finds each name by `inspect.stack()`: together 0.4 s of processor time of each start.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    if hasattr(dynamic_rendezvous, "get_method_name"):
        dynamic_rendezvous.get_method_name = lambda depth=2: ""


@contextmanager
def named_messages(name: Callable[[Any], str]) -> Iterator[None]:
    """Inside, the profiler shows each message of a pipeline's schedule by name: its send and its wait.

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


class _NamedWork:
    """A message that was started, whose wait has a name in the profiler."""

    def __init__(self, work: Any, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> None:
        with record_function(self._name):
            self._work.wait()


def open_connections_to_others(stages: Iterable[Any]) -> None:
    """Keep a rank with two neighbouring stages from sending to itself when a schedule opens its connections.

    Releases before torch 2.13 send from each stage to the next, even on the same rank, which gloo refuses.
    """
    for stage in stages:
        plain = stage._get_init_p2p_neighbors_ops

        def to_others(plain: Callable[[], list[Any]] = plain, here: int = stage.group_rank) -> list[Any]:
            return [op for op in plain() if op.group_peer != here]

        stage._get_init_p2p_neighbors_ops = to_others


def skip_pipeline_warm_up(schedule: Any, stages: Iterable[Any]) -> None:
    """Let a pipeline schedule's first step skip the messages that open its connections.

    This is for a process group that delivers nothing. In torch 2.13 the stages exchange whether they know their shapes,
    and read the answer; here every stage does. Releases before it send numbers that nobody reads.
    """
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining._utils import InferenceMode

        def answered(stages: Iterable[Any], *_: Any) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = answered
    else:
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list
