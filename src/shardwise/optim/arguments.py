"""Arguments of the ZeRO optimizers of other libraries, and what replaces them in `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.errors import refuse_unknown_arguments
from shardwise.parallel.arguments import by_name, without_neutral

_LEAVE_OUT = {
    # neuronx-distributed and torch_xla
    "pin_layout": "the layouts of collectives need no pinning",
    "lazy_init": "state is made at the first step",
    "coalesce_cc": "collectives move whole buckets",
    "use_grad_acc_hook": "gradients accumulate in flat buckets, in gradient_dtype",
    "save_master_weights": "state_dict() has the masters",
    "use_world_for_grad_norm": "the norm is that of the whole model",
    # torch
    "parameters_as_bucket_view": "parameters always are views of buckets",
    # Megatron-LM
    "overlap_param_gather": "step() gathers the parameters bucket by bucket",
}
_USE = {
    # neuronx-distributed and torch_xla
    "sharding_groups": "group= or mesh=, the ranks that share the state",
    "grad_norm_groups": "mesh=, over whose ranks the norm is taken",
    "bucket_cap_mb_all_gather": "bucket_mib=",
    "bucket_cap_mb_reduce_scatter": "bucket_mib=",
    "higher_cc_precision": "reduce_dtype=torch.float32",
    "use_fp32_grad_acc": "gradient_dtype=torch.float32",
    "keep_master_weight": "optimizer_dtype=torch.float32: parameters of another dtype then have masters",
    "use_master_weights": "optimizer_dtype=torch.float32: parameters of another dtype then have masters",
    "max_grad_norm": "max_norm=",
    # torch
    "process_group": "group=",
    "overlap_with_ddp": "the parameters of the model without DDP, and accumulate(last=True) around the last backward()",
    # Megatron-LM
    "clip_grad": "max_norm=",
    "use_distributed_optimizer": "shard=",
    "overlap_grad_reduce": "accumulate(last=True) around the last backward()",
    "data_parallel_group": "group= or mesh=",
    "model_parallel_group": "mesh=",
    "params_dtype": "parameters of this dtype",
    "main_params_dtype": "optimizer_dtype=",
    "main_grads_dtype": "gradient_dtype=",
    "grad_reduce_in_fp32": "reduce_dtype=torch.float32",
}
REPLACED = {name: f"leave it out: {why}" for name, why in _LEAVE_OUT.items()} | {
    name: f"use {what}" for name, what in _USE.items()
}


_POSITIONAL = ("pin_layout", "sharding_groups", "grad_norm_groups", "lazy_init")
"""The arguments of torch_xla's class after `max_norm`, in its order."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "pin_layout": (True, False, None),
    "sharding_groups": (None,),
    "grad_norm_groups": (None,),
    "lazy_init": (False,),
    "coalesce_cc": (True, False),
    "bucket_cap_mb_all_gather": (0, None),
    "bucket_cap_mb_reduce_scatter": (0, None),
    "use_grad_acc_hook": (False,),
    "save_master_weights": (True, False),
    "use_world_for_grad_norm": (True, False),
    "higher_cc_precision": (False,),
    "use_fp32_grad_acc": (False,),
    "keep_master_weight": (False,),
    "use_master_weights": (False,),
    "process_group": (None,),
    "parameters_as_bucket_view": (True, False),
    "overlap_with_ddp": (False,),
    "overlap_param_gather": (True, False),
}
"""Values of other libraries' arguments that change nothing here: a call that gives them runs as it is."""


def known_options(
    sharded: type[torch.optim.Optimizer],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    given: Mapping[str, object],
    further: Sequence[object] = (),
) -> dict[str, Any]:
    """Return the arguments of a call that are for the wrapped class.

    Args:
        sharded: the class that is called.
        optimizer_class: the class that it wraps.
        given: keyword arguments of the call that `sharded` does not name.
        further: torch_xla's positional arguments after `max_norm`.

    Raises:
        ArgumentError: neither class takes an argument; the message says what replaces it.
    """
    taken = inspect.signature(optimizer_class).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    passed_on = [*taken, *given] if takes_any else [*taken]
    foreign = {name: values for name, values in _NEUTRAL.items() if name not in passed_on}
    options = without_neutral(by_name(sharded.__name__, further, _POSITIONAL, given), foreign)
    named = [name for name in inspect.signature(sharded).parameters if name not in ("further", "defaults")]
    refuse_unknown_arguments(sharded.__name__, options, dict.fromkeys([*named, *passed_on]), REPLACED)
    return options
