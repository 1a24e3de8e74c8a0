"""Which ranks share a layer or a loss, from what its caller passes as `group`."""

from __future__ import annotations

import inspect
import warnings

import torch

from shardwise.mesh import Group, Ranks, job_size

_warned: list[str] = []
"""The layer or loss that this process was warned of: the first one stands for all."""


def sharing_group(owner: str, group: Ranks | None, *, needed: bool = True) -> Group:
    """The ranks that share a layer or loss. None: each rank has all of it; in a job of several, the first is warned of.

    owner: the name of the class or function. needed: whether it would do something else with a group.
    """
    if group is None and needed and not torch.compiler.is_compiling() and not _warned and job_size() > 1:
        _warned.append(owner)
        callers = enumerate(inspect.stack(0), start=1)
        level = next((i for i, each in callers if not _is_ours(each.frame.f_globals.get("__name__", ""))), 1)
        warnings.warn(
            f"{owner} was given no group=, so each of the {job_size()} ranks of this job holds and computes all of it: "
            "pass the ranks that share it, such as group=mesh.tp of mesh = Mesh(tensor=2), or group=Group() if nothing "
            "shall be shared (said once; it holds for every layer and loss without group=)",
            stacklevel=level,
        )
    return Group.of(group)


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == __name__.split(".")[0]
