"""Arguments of layers and losses: the ranks that share them, and arguments of other libraries."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeVar, cast

import torch

from shardwise.base.errors import ArgumentError, listing, refuse_unknown_arguments
from shardwise.distributed.mesh import Group, Ranks, job_rank, job_size

_Given = TypeVar("_Given", bound=Mapping[str, object])

_warned: list[str] = []
"""The layer or loss of which this process warned. It warns once: the first one stands for all."""


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
    """Warn at the line of the user's code that made the layer."""
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
    owner: type | Callable[..., object], given: Mapping[str, object], known: Collection[str] = ()
) -> None:
    """Refuse keyword arguments that a layer or loss does not take, unless their value changes nothing.

    Args:
        owner: the class or function.
        given: keyword arguments of the call beside its named arguments.
        known: names of the keyword arguments that it takes.

    Raises:
        ArgumentError: some are unknown; the message says what replaces each.
    """
    unknown = {name: value for name, value in given.items() if name not in known}
    if not unknown:
        return
    # Only now: a signature takes long to read, and a model makes many layers.
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [argument.name for argument in inspect.signature(owner).parameters.values() if argument.kind in kinds]
    refuse_unless_neutral(owner.__name__, unknown, [*named, *sorted(known)], "layers")


def refuse_unless_neutral(
    owner: str, unknown: Mapping[str, object], known: Iterable[str], kind: Literal["layers", "optimizer"]
) -> None:
    """Refuse arguments that a class or function does not take, unless their values change nothing.

    Args:
        owner: its name.
        unknown: the arguments.
        known: names that it takes.
        kind: the other libraries' arguments that count (`config/other_names.yaml`).

    Raises:
        ArgumentError: some values change something; the message says what replaces each.
    """
    # Reads the names of other libraries from a file.
    from shardwise.config.other_names import ARGUMENTS

    others = ARGUMENTS[kind]
    refused = [name for name, value in unknown.items() if name not in others or not others[name].changes_nothing(value)]
    refuse_unknown_arguments(owner, refused, known, {name: argument.advice for name, argument in others.items()})


def by_name(owner: str, further: Sequence[object], names: Sequence[str], given: _Given, *, last: str = "") -> _Given:
    """Return the keyword arguments of a call together with its further positional ones.

    Args:
        owner: the name of the class that is called.
        further: positional arguments after those that the class names.
        names: names that other libraries give to the arguments at these positions, in order.
        given: keyword arguments of the call.
        last: last argument that the class names, for a class without further ones.

    Raises:
        ArgumentError: there are more positional arguments than names, or one is given by keyword too.
    """
    if len(further) > len(names):
        raise ArgumentError(
            f"{owner} takes no positional argument after {listing(names) or last}: give the others by keyword"
        )
    positional = dict(zip(names, further, strict=False))
    if twice := [name for name in positional if name in given]:
        raise ArgumentError(f"{owner} got {listing(twice)} by position and by keyword: give each argument once")
    return cast(_Given, {**positional, **given})


def two_sizes(output_sizes: object) -> tuple[int, int]:
    """Return the features of the queries and of the keys.

    Raises:
        ArgumentError: they are not two numbers above 0.
    """
    sizes = tuple(output_sizes) if isinstance(output_sizes, Sequence) else (output_sizes,)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ArgumentError(
            f"output_sizes ({output_sizes!r}) must be two numbers above 0: the features of the queries and those of "
            "the keys, which the values have too"
        )
    return sizes[0], sizes[1]


def features_per_head(kv_size: int, multiplier: object, ranks: int) -> int:
    """Return the features of a rank's part of the keys, if each part stands on `multiplier` of the ranks.

    Raises:
        ValueError: the keys cannot be cut into such parts.
    """
    if not isinstance(multiplier, int) or multiplier < 1 or ranks % multiplier or kv_size * multiplier % ranks:
        raise ValueError(
            f"kv_size_multiplier ({multiplier}) must divide the group's size ({ranks}), and the key/value size "
            f"({kv_size}) must be divisible by their quotient: give head_dim=, the features of a head, instead"
        )
    return kv_size * multiplier // ranks
