"""Arguments of layers and losses: the ranks that share them, and arguments of other libraries."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import torch

from shardwise.base.errors import ArgumentError, listing, refuse_unknown_arguments
from shardwise.distributed.mesh import Group, Ranks, job_rank, job_size

_GIVE_GROUP = "give group="
_SAME_AT_ANY_DEGREE = "leave it out: with seed= and name= the weights are the same at any degree"
_PADDED = "leave it out: a vocabulary is padded by itself, see row_multiple=, and other sizes must be divisible"
_NOT_NEEDED = "leave it out, nothing replaces it"
_NOT_SUPPORTED = "leave it out, it is not supported"
_FOREIGN: dict[str, tuple[str, tuple[object, ...]]] = {
    "tensor_model_parallel_group": (_GIVE_GROUP, (None,)),
    "tp_group": (_GIVE_GROUP, (None,)),
    "process_group": (_GIVE_GROUP, (None,)),
    "rank_ordering": ("give group=, whose order counts", (None,)),
    "config": ("give group=, sequence_parallel_enabled=, dtype= and seed= by themselves", ()),
    "init_method": ("give init=, such as shardwise.Init.normal(0.02)", (None,)),
    "params_dtype": ("give dtype=", ()),
    "reduce_scatter_embeddings": ("give sequence_parallel_enabled=", (False,)),
    "skip_weight_param_allocation": ("ParallelLMHead takes tied_weight=", (False,)),
    "skip_bias_add": ("give bias=False and add a bias of your own", (False,)),
    "bias": ("leave it out: LayerNorm has a bias, and RMSNorm and embeddings have none", ()),
    "elementwise_affine": ("leave it out: a norm always has a weight", (True,)),
    "stride": ("leave it out: MergedColumnParallelLinear holds several layers of one input", (1,)),
    "fuse_qkv": ("leave it out: Q, K and V are always one matmul", (True,)),
    "shard_across_embedding": ("leave it out: the table is cut along the vocabulary", (False,)),
    "sequence_dimension": ("leave it out: the sequence is dim 0", (None, 0)),
    "reduce_dtype": ("leave it out: sums are made in the dtype of the activations", ()),
    "reduce_output": ("leave it out: the output is always summed over the group", (True,)),
    "collect_output": ("leave it out: the output is always summed over the group", (True,)),
    "reduction": ("leave it out: the loss of each token is returned", ("none",)),
    "keep_master_weight": (_SAME_AT_ANY_DEGREE, (False,)),
    "keep_master_weight_for_test": (_SAME_AT_ANY_DEGREE, (False,)),
    "use_cpu_initialization": (_SAME_AT_ANY_DEGREE, (False,)),
    "perform_initialization": (_SAME_AT_ANY_DEGREE, (True,)),
    "pad": (_PADDED, (False,)),
    "pad_alignment_size_per_rank": (_PADDED, (1,)),
    "keep_padded_output": (_PADDED, (False,)),
    "async_tensor_model_parallel_allreduce": (_NOT_NEEDED, (True, False)),
    "no_async_tensor_model_parallel_allreduce": (_NOT_NEEDED, (True, False)),
    "gradient_accumulation_fusion": (_NOT_NEEDED, (True, False)),
    "disable_grad_reduce": (_NOT_NEEDED, (False,)),
    "embedding_activation_buffer": (_NOT_NEEDED, (None,)),
    "grad_output_buffer": (_NOT_NEEDED, (None,)),
    "tp_comm_buffer_name": (_NOT_NEEDED, (None,)),
    "tile_cc": (_NOT_NEEDED, (True, False)),
    "use_spmd_rank": (_NOT_NEEDED, (False,)),
    "is_expert": (_NOT_SUPPORTED, (False,)),
    "max_norm": (_NOT_SUPPORTED, (None,)),
    "norm_type": (_NOT_SUPPORTED, (2.0, 2)),
    "scale_grad_by_freq": (_NOT_SUPPORTED, (False,)),
    "sparse": (_NOT_SUPPORTED, (False,)),
}
"""Argument of neuronx-distributed's or Megatron-LM's class or loss of the same name → advice for its users, and values.

The values change nothing here: a call with them runs.
"""
_ADVICE = {name: advice for name, (advice, _) in _FOREIGN.items()}
_NEUTRAL = {name: values for name, (_, values) in _FOREIGN.items()}
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


def refuse_unknown(owner: type | Callable[..., object], given: Mapping[str, object], known: Iterable[str] = ()) -> None:
    """Refuse keyword arguments that a layer or loss does not take, unless their value changes nothing.

    Args:
        owner: the class or function.
        given: keyword arguments of the call beside its named arguments.
        known: names of the keyword arguments that it takes.

    Raises:
        ArgumentError: some are unknown; the message says what replaces each.
    """
    unknown = set(without_neutral(given, _NEUTRAL)) - set(known)
    if not unknown:
        return
    # Only for the message: a signature takes long to read, and a model makes many layers.
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [argument.name for argument in inspect.signature(owner).parameters.values() if argument.kind in kinds]
    refuse_unknown_arguments(
        owner.__name__, [name for name in given if name in unknown], [*named, *sorted(known)], _ADVICE
    )


def without_neutral(given: Mapping[str, object], neutral: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Return the arguments of a call but for those whose value changes nothing.

    Args:
        given: the arguments of a call by name.
        neutral: the values that change nothing, by the argument's name. Types must agree: 1 does not stand for True.
    """
    return {
        name: value
        for name, value in given.items()
        if not any(type(value) is type(unused) and value == unused for unused in neutral.get(name, ()))
    }


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
