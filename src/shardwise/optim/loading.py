"""Which optimizer the state may be loaded into that `ZeroRedundancyOptimizer.state_dict` gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import listing
from shardwise.mesh import Group
from shardwise.optim.buckets import Bucket
from shardwise.optim.elementwise import kept_state


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
    state_dict: Mapping[str, Any],
    inner: torch.optim.Optimizer,
    groups: Sequence[dict[str, Any]],
    layout: dict[str, Any],
) -> None:
    """Refuse state of another layout, or of a class that keeps other state; nothing is changed.

    Args:
        state_dict: what is to be loaded.
        inner: the wrapped optimizer that is to have it.
        groups: its parameter groups, whose options those of the state replace.
        layout: of the optimizer.

    Raises:
        ValueError: the state is of another layout, bucket size, model or class.
    """
    stored = state_dict.get("layout")
    if stored != layout:
        raise ValueError(f"optimizer state is of layout {stored}, which must be this optimizer's {layout}")
    # torch refuses another number of groups.
    options = [{**own, **loaded} for own, loaded in zip(groups, state_dict["param_groups"], strict=False)]
    kept = {name for name, value in kept_state(inner, options).items() if value is not None}
    name, saved = type(inner).__name__, state_dict.get("class")
    for state in state_dict["state"].values() or ([{}] if state_dict.get("steps") else []):
        held = {key for key, value in state.items() if value is not None}
        # A class may make more state in later steps than in its first.
        if not kept <= held or (saved != name and held - kept):
            ours, theirs = (listing(sorted(names)) or "nothing" for names in (kept, held))
            raise ValueError(
                f"optimizer state ({theirs}, of {saved or 'another class'}) must be what {name} keeps ({ours}): make "
                "the optimizer of the class whose state it is"
            )
