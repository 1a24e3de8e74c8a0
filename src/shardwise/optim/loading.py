"""Which optimizer the state may be loaded into that `ZeroRedundancyOptimizer.state_dict` gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import listing
from shardwise.mesh import Group
from shardwise.optim.buckets import Bucket
from shardwise.optim.elementwise import MakeOptimizer, is_of_elements, kept_state, may_continue

_KEYS = ("state", "param_groups", "masters", "layout")


def layout_of(buckets: Sequence[Bucket], ranks: Group) -> dict[str, Any]:
    """What decides which elements' state a rank has; `ranks`: those that share the state."""
    orders = [b.orders for b in buckets]
    are_turned = any(list(order) != sorted(order) for of_bucket in orders for order in of_bucket)
    return {
        **({"orders": orders} if are_turned else {}),
        "rank": ranks.rank,
        "ranks": ranks.size,
        "buckets": [b.numel for b in buckets],
        "dtypes": [f"{b.values.dtype}/{b.master.dtype}" for b in buckets],
    }


def require_loadable(
    state_dict: object,
    inner: torch.optim.Optimizer,
    make: MakeOptimizer,
    layout: dict[str, Any],
) -> None:
    """Refuse state of another layout, or of a class that keeps other state; nothing is changed.

    Args:
        state_dict: what is to be loaded.
        inner: the wrapped optimizer that is to have it.
        make: makes an optimizer of its class from a parameter group.
        layout: of the optimizer.

    Raises:
        ValueError: the state is no `state_dict()` of this optimizer, or is of another layout, bucket size, model or
            class.
    """
    given = state_dict if isinstance(state_dict, Mapping) else {}
    lacked = [key for key in _KEYS if key not in given]
    if lacked:
        raise ValueError(
            f"optimizer state must be what ZeroRedundancyOptimizer.state_dict() gave, and it lacks {listing(lacked)}: "
            "state of another optimizer cannot be loaded"
        )
    stored = given["layout"]
    if stored != layout:
        raise ValueError(f"optimizer state is of layout {stored}, which must be this optimizer's {layout}")
    groups, loaded_groups = inner.param_groups, given["param_groups"]
    sizes, loaded_sizes = ([len(group["params"]) for group in of] for of in (groups, loaded_groups))
    if sizes != loaded_sizes:
        raise ValueError(
            f"optimizer state has parameter groups of {loaded_sizes} buckets, which must be this optimizer's {sizes}"
        )
    states, saved = given["state"], given.get("class")
    for group, loaded in zip(groups, loaded_groups, strict=True):
        kept = kept_state(make, {**group, **loaded})
        unmade: list[dict[str, Any]] = [{}] if given.get("steps") and group["params"] and not states else []
        for state in [states[number] for number in loaded["params"] if number in states] or unmade:
            _require_kept(state, kept, type(inner), saved)
        for number, master in zip(loaded["params"], group["params"], strict=True):
            _require_shapes(states.get(number, {}), kept, master)
    masters = [master for group in groups for master in group["params"]]
    are_separate = [len({*dtypes.split("/")}) > 1 for dtypes in layout["dtypes"]]
    shapes = [list(m.shape) if is_apart else None for m, is_apart in zip(masters, are_separate, strict=True)]
    stored_shapes = [list(m.shape) if isinstance(m, torch.Tensor) else None for m in given["masters"] or ()]
    if stored_shapes != shapes:
        raise ValueError(f"optimizer state has masters of shapes {stored_shapes}, which must be {shapes}")


def _require_kept(
    state: Mapping[str, Any], kept: Mapping[str, Any], optimizer_class: type[torch.optim.Optimizer], saved: str | None
) -> None:
    """Raise ValueError for the state of a bucket that is not what the class keeps, or is of another class."""
    names = {key for key, value in state.items() if value is not None}
    name = optimizer_class.__name__
    # A class may make more state in later steps than in its first.
    is_whole = kept.keys() <= names and (saved == name or not names - kept.keys())
    if not is_whole or (saved is not None and not may_continue(optimizer_class, saved)):
        ours, theirs = (listing(sorted(of)) or "nothing" for of in (kept, names))
        raise ValueError(
            f"optimizer state ({theirs}, of {saved or 'another class'}) must be what {name} keeps ({ours}): make "
            "the optimizer of the class whose state it is"
        )


def _require_shapes(state: Mapping[str, Any], kept: Mapping[str, Any], master: torch.Tensor) -> None:
    """Raise ValueError for a tensor that holds a value for each element, and not for each of this bucket's."""
    for key, value in state.items():
        shape = list(getattr(value, "shape", ()))
        if is_of_elements(kept.get(key)) and shape != list(master.shape):
            raise ValueError(f"optimizer state has {key} of shape {shape}, which must be {list(master.shape)}")
