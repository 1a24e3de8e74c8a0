"""One rank's block of Llama 2 7B by what torch's dispatcher is asked to do, in any tree of this package.

`python block_rank.py RECOMPUTE DEVICE TOKENS RANKS` prints a line of JSON. On the device `meta` nothing is computed;
`strict` is that of tests/strict. The kernels that CUDA has and these devices lack are operators of their own here: of a
norm, of attention, and of a product that is added to a gradient in float32. Collectives are torch's fake ones.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # lists functions of torch when it is imported, and none of those here
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise.config import load_config
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.torch_private import fake_process_group
from shardwise.models import attention, blocks
from shardwise.models.build import build_model

LIBRARY = torch.library.Library("bench", "FRAGMENT")
LIBRARY.define("norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
LIBRARY.define("norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)")
LIBRARY.define("add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()")


PASSES = 60
WITHOUT_BYTES = ("_unsafe_view", "empty", "empty_like", "new_empty", "_fused_sdp_choice")


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inverse = x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight).to(x.dtype), inverse


def _norm_backward(dy: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    unit = x * inverse
    dy_unit = dy * unit
    mean = (dy_unit @ weight.float()).div_(x.shape[-1]).unsqueeze(-1)
    dx = (dy * weight).float().addcmul_(unit, mean, value=-1).mul_(inverse)
    return dx.to(x.dtype), dy_unit.flatten(0, -2).sum(0).to(weight.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.device.type != "meta":
        total.add_(a @ b)


for _name, _function in (("norm", _norm), ("norm_backward", _norm_backward), ("add_product", _add_product)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse = torch.ops.bench.norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.bench.norm_backward(grads[0], *ctx.saved_tensors), None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Causal attention by the kernel of accelerators, whose results torch knows the shapes and strides of."""
    if q.device.type != "meta":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def is_fused(*arguments: Any, causal: bool, is_grouped: bool) -> bool:
    torch._fused_sdp_choice(*arguments, causal, enable_gqa=is_grouped)
    return True


class Operations(TorchDispatchMode):
    """Counts operators, the bytes that they read and write, and the bytes of tensors that somebody holds, at most.

    A tensor that is changed in place counts twice, and a view or an empty tensor not at all.
    """

    def __init__(self, ignored: list[Tensor]) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.live = self.peak = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in ignored:
            self._hold(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.operators[name] += 1
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not (
            is_view
            or name in ("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "_fused_sdp_choice")
        ):
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            held = {id(t) for t in read}
            is_written_once = "out" in kwargs or "grad_input" in kwargs or name == "copy_" or func.namespace == "c10d"
            changed = [] if is_written_once else self._changed(schema, args)
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and id(t) not in held]
            self.moved[name] += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*read, *changed, *made))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._hold(tensor, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return out

    @staticmethod
    def _changed(schema: Any, args: Any) -> list[Tensor]:
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        return [t for t, is_written in zip(args, written, strict=False) if is_written and isinstance(t, Tensor)]

    def _hold(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return

        def gone(_: object) -> None:
            del self._held[key]
            self.live -= size

        self._held[key] = weakref.ref(storage, gone)
        self.live += size


@contextmanager
def kernels() -> Iterator[Any]:
    """Inside, this device has the kernels of CUDA; yields the module whose `add_product_` adds to a gradient."""
    try:
        products = importlib.import_module("shardwise.layers.weight_gradients")  # of earlier trees
    except ModuleNotFoundError:
        products = importlib.import_module("shardwise.layers.matmul")
    home = products if hasattr(products, "adds_products") else devices  # the second: of earlier trees
    with (
        patch.object(home, "adds_products", return_value=True),
        patch.object(products, "add_product_", torch.ops.bench.add_product),
        patch.object(attention, "has_fused_attention", is_fused),
        patch.object(torch, "is_autocast_enabled", return_value=False),
        patch.object(F, "scaled_dot_product_attention", fused_attention),
        patch.object(F, "rms_norm", lambda x, _, weight, eps: _Norm.apply(x, weight, eps)),
    ):
        yield products


def figures(recompute: str, device: torch.device, tokens: int, ranks: int, passes: int) -> dict[str, Any]:
    """Figures of a block on one of some tensor-parallel ranks, whose fake process group exists."""
    keys = [f"parallel.tensor={ranks}", f"parallel.sequence={str(ranks > 1).lower()}", "train.micro_batch=1"]
    keys += [f"train.recompute={recompute}", f"train.sequence_length={tokens}", "parallel.sequence_regather=false"]
    config = load_config("llama2-7b", keys)
    part_class = getattr(blocks, "ModelPart", None) or blocks.Part  # of earlier trees
    part = part_class(range(1), is_first=False, is_last=False)
    group = Mesh(tensor=ranks, device=device).tp
    with kernels() as products:
        model = build_model(config, group, sequence_parallel=ranks > 1, device=device, dtype=torch.bfloat16, part=part)
        block = model.layers[0]
        x = torch.randn(tokens // ranks, 1, 4096, dtype=torch.bfloat16, device=device).requires_grad_()
        dy = torch.randn_like(x)
        context = blocks.BlockContext(rotary_tables={None: model.rotary.tables(tokens, x)})
        kept = [x, dy, *context.rotary_tables[None]]
        for parameter in block.parameters():
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
            kept += [parameter, parameter.grad]
        products.let_products_add([p for p in block.parameters() if p.dim() == 2])
        seconds = []
        for _ in range(passes):
            x.grad = None
            start = time.perf_counter()
            block(x, context).backward(dy)
            seconds.append(time.perf_counter() - start)
        x.grad = None
        with Operations(kept) as found:
            y = block(x, context)
            forward, saved = found.operators.total(), found.live - y.nbytes
            y.backward(dy)
    return {
        "host_ms": median(seconds) * 1e3,
        "dispatches": found.operators.total(),
        "forward": forward,
        "moved": found.moved.total(),
        "live": found.peak,
        "saved": saved,
        "operators": dict(found.operators.most_common()),
        "moved_by": dict(found.moved.most_common()),
    }


def main(recompute: str, device_name: str, tokens: str, ranks: str) -> None:
    if device_name == "strict":
        sys.path.insert(0, str(Path(shardwise.__file__).parents[2]))
        importlib.import_module("tests.strict.device").load()
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        torch.distributed.Backend.backend_capability["fake"].append("strict")
    fake_process_group(0, int(ranks))
    passes = PASSES if device_name == "meta" else 1
    print(json.dumps(figures(recompute, torch.device(device_name), int(tokens), int(ranks), passes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
