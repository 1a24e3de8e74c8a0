"""What the tests run on ranks with the strict device. Imported by ranks; the test process never loads the device."""

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import Config
from shardwise.layers import norm
from shardwise.models import attention
from shardwise.train.build import build_trainer
from tests.dist import cells
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import make_data
from tests.rank_pool import RankPool
from tests.strict import device


def prepare() -> None:
    """Register the device in a rank, and let the tests' functions use it."""
    os.environ["TEST_DEVICE"] = "strict"
    device.load()


def prepare_unlike_cuda() -> None:
    """Likewise, as an accelerator that is not CUDA."""
    os.environ["STRICT_CUDA_LIKE"] = "0"
    prepare()


def prepare_like_neuron() -> None:
    """Likewise, as TorchNeuron's devices."""
    os.environ["STRICT_NEURON_LIKE"] = "1"
    prepare()


def losses(cell: cells.Cell, steps: int) -> list[float]:
    return cells.measure(cell, steps).losses


def default_device(default: bool = True) -> AbstractContextManager[object]:
    """Inside, this rank's device is torch's default, as after `torch.set_default_device`; not if `default` is false."""
    return torch.device("strict", torch.accelerator.current_device_index()) if default else nullcontext()


@dataclass(frozen=True)
class OnDevice:
    """Ranks in whose functions the device is torch's default, and which return tensors of the host.

    Takes the place of CPU ranks in tests of programs that name no device.
    """

    pool: RankPool

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool.run(_on_device, function, *args)


def _on_device(function: Callable[..., Any], *args: Any) -> Any:
    with default_device():
        return _to_host(function(*args))


def _to_host(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: _to_host(value) for key, value in found.items()}
    return type(found)(map(_to_host, found)) if isinstance(found, list | tuple) else found


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the CPU's fused kernel, which keeps what those of accelerators keep: its output and log-sum-exp.

    torch computes it step by step on a device that it does not know. Nothing is dropped: a fused kernel draws its mask
    again in its backward pass, and keeps none.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return out


def fused_norm(x: Tensor, weight: Tensor, eps: float, sums: norm.Sums = norm._SUMS) -> Tensor:
    """RMSNorm that keeps its input and 1/rms, as torch's kernels for accelerators do.

    torch computes it by single operations on a device that it does not know, which also keep the normalised input.
    """
    out: Tensor = norm._RMSNorm.apply(x, weight, eps, sums)  # type: ignore[no-untyped-call]
    return out


def step_peak(config: Config) -> tuple[int, int]:
    """This rank's pipeline rank, and the most bytes that the second optimizer step holds, the model's included."""
    torch.set_num_threads(1)
    mesh = shared_mesh(config.parallel.tensor, config.parallel.pipeline)
    pairs = "nsp" in config.model.objectives
    data: Any = make_data(config.model.vocab_size, length=config.train.sequence_length, pairs=pairs)
    gc.collect()  # what an earlier cell left in cycles would be freed in the middle of this one
    before = torch.accelerator.memory_allocated()
    kernel = patch.object(F, "scaled_dot_product_attention", fused_attention)
    choice = patch.object(attention, "has_fused_attention", lambda *_, **__: True)  # a mock would hold its arguments
    with kernel, choice, patch.object(norm, "rms_norm", fused_norm):
        trainer = build_trainer(config, mesh, data)
        trainer.step()
        torch.accelerator.reset_peak_memory_stats()
        record = trainer.step()
    most = torch.accelerator.max_memory_allocated()
    assert record.peak_memory_bytes == record.allocator["most_allocated"] == most, "a step records other bytes"
    return mesh.pp.rank, most - before
