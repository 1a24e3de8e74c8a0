"""Arguments of layers and losses: the ranks that share them, and arguments of other libraries."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from shardwise.base.errors import ArgumentError, listing, refuse_unknown_arguments
from shardwise.distributed.mesh import Group, Ranks, job_rank, job_size

_SAME_AT_ANY_DEGREE = "leave it out: with seed= and name= the weights are the same at any degree"
_PADDED = "leave it out: a vocabulary is padded by itself, see row_multiple=, and other sizes must be divisible"
_NOT_NEEDED = "leave it out, nothing replaces it"
_NOT_SUPPORTED = "leave it out, it is not supported"
_REPLACED = {
    "tensor_model_parallel_group": "give group=",
    "tp_group": "give group=",
    "process_group": "give group=",
    "rank_ordering": "give group=, whose order counts",
    "config": "give group=, sequence_parallel_enabled=, dtype= and seed= by themselves",
    "init_method": "give init=, such as shardwise.Init.normal(0.02)",
    "params_dtype": "give dtype=",
    "reduce_scatter_embeddings": "give sequence_parallel_enabled=",
    "skip_weight_param_allocation": "ParallelLMHead takes tied_weight=",
    "skip_bias_add": "give bias=False and add a bias of your own",
    "bias": "leave it out: LayerNorm has a bias, and RMSNorm and embeddings have none",
    "elementwise_affine": "leave it out: a norm always has a weight",
    "stride": "leave it out: MergedColumnParallelLinear holds several layers of one input",
    "fuse_qkv": "leave it out: Q, K and V are always one matmul",
    "shard_across_embedding": "leave it out: the table is cut along the vocabulary",
    "sequence_dimension": "leave it out: the sequence is dim 0",
    "reduce_dtype": "leave it out: sums are made in the dtype of the activations",
    "reduce_output": "leave it out: the output is always summed over the group",
    "collect_output": "leave it out: the output is always summed over the group",
    "reduction": "leave it out: the loss of each token is returned",
    "keep_master_weight": _SAME_AT_ANY_DEGREE,
    "keep_master_weight_for_test": _SAME_AT_ANY_DEGREE,
    "use_cpu_initialization": _SAME_AT_ANY_DEGREE,
    "perform_initialization": _SAME_AT_ANY_DEGREE,
    "pad": _PADDED,
    "pad_alignment_size_per_rank": _PADDED,
    "keep_padded_output": _PADDED,
    "async_tensor_model_parallel_allreduce": _NOT_NEEDED,
    "no_async_tensor_model_parallel_allreduce": _NOT_NEEDED,
    "gradient_accumulation_fusion": _NOT_NEEDED,
    "disable_grad_reduce": _NOT_NEEDED,
    "embedding_activation_buffer": _NOT_NEEDED,
    "grad_output_buffer": _NOT_NEEDED,
    "tp_comm_buffer_name": _NOT_NEEDED,
    "tile_cc": _NOT_NEEDED,
    "use_spmd_rank": _NOT_NEEDED,
    "is_expert": _NOT_SUPPORTED,
    "max_norm": _NOT_SUPPORTED,
    "norm_type": _NOT_SUPPORTED,
    "scale_grad_by_freq": _NOT_SUPPORTED,
    "sparse": _NOT_SUPPORTED,
}
"""Argument of neuronx-distributed's or Megatron-LM's class or loss of the same name → advice for its users."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tensor_model_parallel_group": (None,),
    "tp_group": (None,),
    "process_group": (None,),
    "rank_ordering": (None,),
    "init_method": (None,),
    "reduce_scatter_embeddings": (False,),
    "skip_weight_param_allocation": (False,),
    "skip_bias_add": (False,),
    "elementwise_affine": (True,),
    "stride": (1,),
    "fuse_qkv": (True,),
    "shard_across_embedding": (False,),
    "sequence_dimension": (None, 0),
    "reduce_output": (True,),
    "collect_output": (True,),
    "reduction": ("none",),
    "keep_master_weight": (False,),
    "keep_master_weight_for_test": (False,),
    "use_cpu_initialization": (False,),
    "perform_initialization": (True,),
    "pad": (False,),
    "pad_alignment_size_per_rank": (1,),
    "keep_padded_output": (False,),
    "async_tensor_model_parallel_allreduce": (True, False),
    "no_async_tensor_model_parallel_allreduce": (True, False),
    "gradient_accumulation_fusion": (True, False),
    "disable_grad_reduce": (False,),
    "embedding_activation_buffer": (None,),
    "grad_output_buffer": (None,),
    "tp_comm_buffer_name": (None,),
    "tile_cc": (True, False),
    "use_spmd_rank": (False,),
    "is_expert": (False,),
    "max_norm": (None,),
    "norm_type": (2.0, 2),
    "scale_grad_by_freq": (False,),
    "sparse": (False,),
}
"""Values of these arguments that change nothing here: a call with them runs."""

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
    if group is None and needed and not torch.compiler.is_compiling() and not _warned and job_size() > 1:
        _warned.append(owner)
        if job_rank() == 0:
            _warn_unshared(owner)
    return Group.of(group)


def _warn_unshared(owner: str) -> None:
    """Warn at the line of the user's code that made the layer."""
    level = 0
    for number, caller in enumerate(inspect.stack(0)):
        if not _is_of_package(caller.frame.f_globals.get("__name__", "")):
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
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [argument.name for argument in inspect.signature(owner).parameters.values() if argument.kind in kinds]
    refuse_unknown_arguments(
        owner.__name__, [name for name in given if name in unknown], [*named, *sorted(known)], _REPLACED
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


def by_name(
    owner: str, further: Sequence[object], names: Sequence[str], given: Mapping[str, object], *, last: str = ""
) -> dict[str, object]:
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
    return {**positional, **given}


def _is_of_package(module: str) -> bool:
    return module.split(".")[0] == __name__.split(".")[0]
