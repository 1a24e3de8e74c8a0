"""Arguments of the ZeRO optimizers of other libraries, and what replaces them in `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

import torch

from shardwise.errors import ArgumentError, listing, refuse_unknown_arguments

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


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "pin_layout": (True, False), "sharding_groups": (None,), "grad_norm_groups": (None,), "lazy_init": (False,),
}  # fmt: skip
"""torch_xla's arguments after `max_norm`, in their order → the values that ask for nothing here."""


def require_known_options(
    sharded: type[torch.optim.Optimizer],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    given: Iterable[str],
    further: Sequence[object] = (),
) -> None:
    """Raise ArgumentError, with what replaces each, for arguments that neither optimizer class takes.

    Args:
        given: names of keyword arguments.
        further: torch_xla's positional arguments after `max_norm`, which cannot be left out one by one.
    """
    if len(further) > len(_NEUTRAL):
        raise ArgumentError(f"{sharded.__name__} takes no positional argument after {listing(_NEUTRAL)}")
    asked = [name for (name, neutral), value in zip(_NEUTRAL.items(), further, strict=False) if value not in neutral]
    refuse_unknown_arguments(sharded.__name__, asked, (), REPLACED)
    taken = inspect.signature(optimizer_class).parameters
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        own = [name for name in inspect.signature(sharded).parameters if name not in ("further", "defaults")]
        known = dict.fromkeys([*own, *taken])
        refuse_unknown_arguments(sharded.__name__, given, known, REPLACED)
