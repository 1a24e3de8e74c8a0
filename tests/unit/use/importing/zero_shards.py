"""The state of AdamW as torch_xla's ZeroRedundancyOptimizer saves it, by its layout and not from our reader.

Layout: torch_xla/distributed/zero_redundancy_optimizer.py of 2.9 (`_shard_tensor`, `state_dict`). Groups: those of
neuronx-distributed's examples/training/llama/training_utils.py (`get_param_groups_by_weight_decay`), which its other
scripts and NeMo's `get_params_for_weight_decay_optimization` make too. tests/interop/torch-xla runs the class itself.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.use.importing.checks import in_module

State = dict[str, Any]
STEP = 6


def _shard(tensor: Tensor, ranks: int, rank: int) -> Tensor:
    """As `_pad_to_world_size` and `_shard_tensor`; padding is not 0 here, so that a reader must leave it out."""
    padding = -len(tensor) % ranks
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, padding], value=5.0)
    return padded.chunk(ranks)[rank].clone()


def state_dicts(
    moments: Mapping[str, tuple[Tensor, Tensor]], masters: Mapping[str, Tensor] | None = None, *, dp: int | None = 2,
    words: tuple[str, ...] = ("bias", "norm"), double: bool = False, shape_info: bool = True, step: int = STEP,
    **options: Any,
) -> list[State]:  # fmt: skip
    """What each data-parallel rank saves of a rank's parameters, which are in order; `dp` None: without ZeRO-1.

    words: parts of the names in the second group; none: one group. double: as with XLA_DOWNCAST_BF16.
    """
    free = [name for name in moments if any(word in name for word in words)]
    ordered = [[name for name in moments if name not in free], *([free] if words else [])]
    fixed = {"lr": 1e-4, "initial_lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False}
    groups, numbers = [], {}
    for names, decay in zip(ordered, (0.01, 0.0), strict=False):
        first = len(numbers)
        numbers |= {name: first + place for place, name in enumerate(names)}
        groups.append({**fixed, **options, "weight_decay": decay, "params": list(range(first, len(numbers)))})
    dtype = torch.float64 if double else torch.float32

    def cut(tensor: Tensor, rank: int) -> Tensor:
        return _shard(tensor.to(dtype), dp or 1, rank)

    found = []
    for rank in range(dp or 1):
        state = {
            number: {
                "step": torch.tensor(float(step)),
                "exp_avg": cut(moments[name][0], rank),
                "exp_avg_sq": cut(moments[name][1], rank),
            }
            for name, number in numbers.items()
        }
        if dp is None:
            found.append({"state": state, "param_groups": groups})
            continue
        saved: State = {"state": {}, "param_groups": groups, "base_state": state}
        if shape_info:
            saved["shape_info"] = {number: moments[name][0].shape for name, number in numbers.items()}
        if masters is not None:
            saved["sharded_master_weights"] = {number: cut(masters[name], rank) for name, number in numbers.items()}
        found.append(saved)
    return found


def save(saved: Any, path: Path, reference: tuple[str, type, Callable[[int, Tensor], Any]] | None = None) -> None:
    """As torch.save, or as xser.save with `reference`: the module of its class, the class, and what makes one.

    xser.save makes lists of tuples, torch.Size too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if reference is None:
        torch.save(saved, path)
        return
    module, kind, make = reference
    folder = path.with_name(f"{path.name}.tensors")
    folder.mkdir()
    count = 0

    def transformed(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Tensor):
            torch.save(value, folder / f"tensor_{count}.pt")
            count += 1
            return make(count - 1, value)
        if isinstance(value, dict):
            return {name: transformed(each) for name, each in value.items()}
        return [transformed(each) for each in value] if isinstance(value, list | tuple) else value

    rewritten = transformed(saved)
    with in_module(module, kind):
        torch.save(rewritten, path)
