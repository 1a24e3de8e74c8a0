"""What does the device do during one training step, eager and compiled, and how long is it idle?"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from first_gpu.session import Figures, Session
from first_gpu.training import Setting, build
from shardwise.distributed import devices

TITLE = "One step, by kernels"
NOTE = (
    "One profiled step of 4 micro-batches of one sequence, no recompute. Shares are of the time from the first kernel "
    "to the last; two kernels at once count twice in their classes, and once for `idle`."
)
COLUMNS = "program kind name count ms share"
_LISTED = 40
_CLASSES = (
    ("optimizer", "adam|multi_tensor"),
    ("attention", "flash|fmha|sdpa|attention|dot_do_o"),
    ("matmul", "gemm|nvjet|cutlass|xmma|matmul|splitk|triton_tem|aten::(mm|addmm|bmm|linear)"),
    # The name of a kernel of the compiler lists all its operations, copies too.
    ("elementwise", "triton_poi"),
    ("reductions", "triton_red|triton_per"),
    ("copies", "memcpy|memset|copy|fill|catarray|aten::(cat|zero)"),
    ("reductions", "reduce|norm|softmax|aten::(sum|amax)"),
    ("elementwise", "elementwise|vectorized|foreach|aten::(mul|add|silu|sub|div|exp)"),
)
"""Class, and parts of the names of its kernels; the first that matches counts."""


def run(session: Session) -> None:
    for is_compiled in (False, True):
        setting = Setting(is_compiled, "none", 1)
        session.measure({"program": setting.labels["program"]}, lambda setting=setting: _profile(session, setting))


def _profile(session: Session, setting: Setting) -> Iterator[Figures]:
    trainer = build(session, setting.config(session, session.sizes.micro_batches[0]))
    for _ in range(2):
        trainer.step()
    on_gpu = session.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    devices.synchronize(session.device)
    with torch.profiler.profile(activities=[activity]) as profiler:
        start = time.perf_counter()
        trainer.step()
        devices.synchronize(session.device)
        step_ms = 1000 * (time.perf_counter() - start)
    trainer.feed.close()
    kernels = _kernels(profiler.events(), on_gpu)
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    whole_ms = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1000
    yield {"kind": "step", "name": "by the host's clock, profiled", "ms": step_ms}
    yield {"kind": "step", "name": "first kernel to last", "ms": whole_ms, "count": len(kernels), "share": 1.0}
    idle_ms = whole_ms - _busy(spans) / 1000
    yield {"kind": "class", "name": "idle", "ms": idle_ms, "share": idle_ms / whole_ms}
    yield from _sums("class", ((_class(event.name), event) for event in kernels), whole_ms)
    yield from _sums("kernel", ((event.name[:200], event) for event in kernels), whole_ms)


def _kernels(events: Iterable[Any], on_gpu: bool) -> list[Any]:
    seen = [event for event in events if event.time_range.end > event.time_range.start]
    if not on_gpu:
        return [event for event in seen if event.name.startswith("aten::") and not event.cpu_children]
    # The annotations of the host's code (`record_function`) are shown on the queues too.
    return [
        event
        for event in seen
        if str(event.device_type).endswith("CUDA") and not getattr(event, "is_user_annotation", False)
    ]


def _sums(kind: str, named: Iterable[tuple[str, Any]], whole_ms: float) -> Iterator[Figures]:
    """The largest sums of time by name."""
    total_us: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, event in named:
        total_us[name] += event.time_range.end - event.time_range.start
        count[name] += 1
    for name, us in total_us.most_common(_LISTED):
        ms = us / 1000
        yield {"kind": kind, "name": name, "count": count[name], "ms": ms, "share": ms / whole_ms}


def _class(name: str) -> str:
    return next((kind for kind, parts in _CLASSES if re.search(parts, name.lower())), "other")


def _busy(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds in which at least one kernel runs."""
    total = 0.0
    last = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
