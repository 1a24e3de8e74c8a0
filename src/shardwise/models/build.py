"""A model built from its configuration: one of the families, or a class of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.config import (
    BertConfig,
    Config,
    DecoderConfig,
    FamilyConfig,
    GPTConfig,
    GPTNeoXConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
)
from shardwise.distributed.mesh import ExpertRanks, Group, Mesh
from shardwise.layers.execution import Compiler, Execution, made_with
from shardwise.layers.matmul import adds_products
from shardwise.models.blocks import ModelPart

if TYPE_CHECKING:
    from shardwise.layers.balance import Balance

_ARCHITECTURES: dict[type[FamilyConfig], str] = {
    DecoderConfig: "llama:Llama",
    GPTConfig: "gpt:GPT",
    GPTNeoXConfig: "gpt_neox:GPTNeoX",
    BertConfig: "bert:Bert",
}
"""The class of a family's configuration, or a base of it → module of this room and class. Only the file of the model
that is built is imported; this table is here, as configurations do not import torch."""


def build_model(
    config: Config,
    group: Group,
    *,
    sequence_parallel: bool,
    mesh: Mesh | None = None,
    balance: Balance | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    part: ModelPart | None = None,
    deferred: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    compiler: Compiler | None = None,
) -> nn.Module:
    """Build this rank's shard of the model that `config.model` describes; weights depend on (seed, canonical name).

    Args:
        group, sequence_parallel, device, dtype, part, deferred: as in `FamilyModel`.
        mesh: the ranks that share samples, and those that divide the experts of a block; None: there are none.
        balance: objectives of routers in training.
        loss, compiler: as in `Execution`.

    Raises:
        ConfigError: `model.family` names a class of the user's that cannot be imported or built; or widths or a lack of
            layers that `precision.matmul` refuses.
    """
    context_group = Group() if mesh is None else mesh.cp
    chosen = Execution(
        overlap=config.parallel.tensor_overlap,
        regathers=config.regathers,
        fp8=config.precision.matmul is not None,
        passes_keys=config.passes_keys,
        context_group=context_group,
        experts=ExpertRanks() if mesh is None else mesh.experts,
        balance=balance,
        loss=loss,
        compiler=compiler,
    )
    model = config.model
    with made_with(chosen):
        if model.is_own:
            from shardwise.models.user_model import build_user_model

            return build_user_model(
                config, group, sequence_parallel=sequence_parallel, device=device, dtype=dtype, part=part
            )
        return _architecture(model)(
            model,
            group,
            sequence_parallel=sequence_parallel,
            recompute=config.recompute,
            part=part,
            vocab_multiple=config.parallel.vocab_multiple,
            context_group=context_group,
            seed=config.train.seed,
            device=device,
            dtype=dtype,
            deferred=deferred,
        )


def _architecture(model: FamilyConfig) -> Callable[..., nn.Module]:
    module, _, name = next(path for record, path in _ARCHITECTURES.items() if isinstance(model, record)).partition(":")
    architecture: Callable[..., nn.Module] = getattr(import_module(f"{__package__}.{module}"), name)
    return architecture


def build_balance(config: Config, layout: Layout, mesh: Mesh) -> Balance | None:
    """Build the objectives of routers for `build_model`, as the configuration names them; None if there are none."""
    coefficients: dict[str, Any] = {**config.optimizer.router_losses}
    if not coefficients or config.model.is_own:
        return None
    from shardwise.layers.balance import Balance

    routings = config.known_shapes.routings
    return Balance(
        **coefficients,
        samples=config.train.global_batch,
        length=config.train.sequence_length,
        layers=len(routings),
        experts=next(iter(routings.values())).experts,
        replicas=mesh.replicas,
        stages=mesh.pp,
        counts_first=layout.accumulation(config.train) > 1 or layout.pipeline > 1,
    )


def add_step_hooks(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ModelConfig, settings: OptimizerConfig, mesh: Mesh
) -> None:
    """Let each step of an optimizer update what no gradient does in a built model."""
    if config.is_own or config.is_sparse:
        from shardwise.layers.experts import balance_experts

        balance_experts(model, optimizer, mesh.replicas, settings.router_bias_rate)


def model_adds_products(config: Config, device: torch.device) -> bool:
    """True if `build_model` makes linear layers that add products to float32 gradients, or return them in float32.

    Those of a bit-equal training keep the roundings of its parts, and a model of the user's own may ask autograd for
    gradients of weights, as split backward passes do.
    """
    precision = config.precision.resolved(device.type != "cpu")
    is_plain = config.model.is_own or config.is_bit_equal or precision.gradient != "float32"
    return not is_plain and adds_products(device)


def model_adds_products_in_graphs(config: Config, device: torch.device) -> bool:
    """True if `build_model` makes compiled blocks that add products to gradients, which one graph takes as inputs.

    With ZeRO-2 and 3 gradients have no memory before the first one of a step.
    """
    return config.optimizer.zero < 2 and not config.splits_backward and model_adds_products(config, device)
