"""Arguments of layers and losses: the ranks that share them, and arguments of other libraries."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Literal

import torch

from shardwise.base.errors import ArgumentError, listing, nearest_name
from shardwise.distributed.mesh import Group, Ranks, job_rank, job_size

_warned: list[str] = []  # the layer or loss of which this process warned. It warns once: the first one stands for all


def sharing_group(owner: str, group: Ranks | None, *, needed: bool = True) -> Group:
    """Return the ranks that share a layer or loss; without `group`, this rank alone.

    In a job of several ranks the first layer or loss without a group causes a warning, from the job's first rank: the
    other ranks run the same script.

    Args:
        owner: the name of the class or function.
        group: argument of its caller.
        needed: true if it would compute something else with a group.
    """
    # While the compiler traces a loss, a warning would break the graph.
    if group is None and needed and not torch.compiler.is_compiling() and not _warned and job_size() > 1:
        _warned.append(owner)
        if job_rank() == 0:
            _warn_unshared(owner)
    return Group.of(group)


def _warn_unshared(owner: str) -> None:
    # Layers make layers, so the number of frames between the user and this one is not fixed.
    package = __name__.partition(".")[0]
    level = 0
    for number, caller in enumerate(inspect.stack(0)):
        if caller.frame.f_globals.get("__name__", "").partition(".")[0] != package:
            level = number
            break
    warnings.warn(
        f"{owner} was given no group=, so each of the {job_size()} ranks of this job holds and computes all of it: "
        "pass the ranks that share it, such as group=mesh.tp of mesh = Mesh(tensor=2), or group=Group() if nothing "
        "shall be shared (said once, by the first rank; it holds for every layer and loss without group=)",
        stacklevel=level + 1,
    )


def refuse_unknown(
    owner: type | Callable[..., object],
    given: Mapping[str, object],
    known: Iterable[str] = (),
    kind: Literal["layers", "optimizer"] = "layers",
) -> None:
    """Refuse keyword arguments that a layer or a loss does not take.

    Args:
        kind: arguments of other libraries for which the message says what replaces them (`config/other_names.yaml`).

    Raises:
        ArgumentError: some are unknown; the message says what replaces each.
    """
    known = sorted(known)
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    # Only now: a signature takes long to read, the names of other libraries are in a file, and a model has many layers.
    from shardwise.config.other_names import ARGUMENTS

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [argument.name for argument in inspect.signature(owner).parameters.values() if argument.kind in kinds]
    takes = dict.fromkeys([*named, *known])
    hints: dict[str, str | None] = {}
    for name in unknown:
        near = nearest_name(name, takes, cutoff=0.75)
        hints[name] = ARGUMENTS[kind].get(name) or (near and f"did you mean {near}?")
    shown = [f"{name} ({hint})" if hint else name for name, hint in hints.items()]
    known_names = "" if all(hints.values()) else f"; it takes {listing(takes)}"
    raise ArgumentError(f"{owner.__name__} does not take {listing(shown, 'or')}{known_names}")


def layer_sizes(given: object, count: int, problem: str) -> tuple[int, ...]:
    """Return a layer's sizes, one or several; ArgumentError of `problem` unless they are `count` numbers above 0."""
    sizes = tuple(given) if isinstance(given, Sequence) else (given,)
    if len(sizes) != count or not all(isinstance(size, Integral) and int(size) > 0 for size in sizes):
        raise ArgumentError(problem)
    return tuple(map(int, sizes))
