"""What users do to a block from outside, beside its ways that overwrite memory and call no module: hooks, wrappers,
selective checkpoints and hooks of saved tensors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.distributed.mesh import Group
from shardwise.layers.dropout import DropoutKey
from shardwise.layers.matmul import let_products_add
from shardwise.models.build import build_model
from shardwise.models.llama import Llama
from tests.unit.estimates.families import make_config, section

PRODUCTS = ("aten.mm", "aten.addmm", "_linear_pointwise", "aten.linear")
IDS = torch.randint(16, (9, 2), generator=torch.Generator().manual_seed(0))
MODULES = ("self_attn.qkv", "mlp", "mlp.gate_up", "mlp.down_proj")


def make() -> Any:
    """A model whose products add to gradients in bfloat16, and which owns what lies between them."""
    model = Llama(cast(Any, make_config(section("llama")).model), Group(), seed=1, dtype=torch.bfloat16)
    let_products_add(p for p in model.parameters() if p.dim() == 2)
    return model


def gradients(model: Any, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    with inside():
        loss = model(IDS[:-1], IDS[1:]).sum()
    loss.backward()
    return {name.replace(".base", ""): p.grad for name, p in model.named_parameters()}


def test_a_selective_checkpoint_keeps_products() -> None:
    kept = set()

    def policy(_context: Any, operator: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
        is_product = any(name in str(operator) for name in PRODUCTS)
        kept.add(is_product)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    wanted = gradients(make())
    model = make()
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context_fn)
    found = gradients(model)
    assert kept == {True, False}
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_what_hooks_of_saved_tensors_keep_stays_as_it_was() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.detach(), tensor.detach().clone()))
        return tensor

    wanted = gradients(make())
    found = gradients(make(), partial(saved_tensors_hooks, pack, lambda tensor: tensor))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert kept
    assert all(torch.equal(tensor, before) for tensor, before in kept)


def forward_hooks(module: nn.Module, fired: list[str], name: str) -> Iterator[Any]:
    yield module.register_forward_pre_hook(lambda *_: fired.append(name))
    yield module.register_forward_hook(lambda *_: fired.append(name))


def backward_hooks(module: nn.Module, fired: list[str], name: str) -> Iterator[Any]:
    yield module.register_full_backward_pre_hook(lambda *_: fired.append(name))
    yield module.register_full_backward_hook(lambda *_: fired.append(name))


@pytest.mark.parametrize("hooks", [forward_hooks, backward_hooks])
def test_hooks_of_modules_fire(hooks: Callable[[nn.Module, list[str], str], Iterator[Any]]) -> None:
    model = make()
    wanted = gradients(model)
    fired: list[str] = []
    modules = [model.layers[0].get_submodule(name) for name in MODULES]
    handles = [handle for module, name in zip(modules, MODULES, strict=True) for handle in hooks(module, fired, name)]
    found = gradients(model)
    assert sorted(fired) == sorted(2 * MODULES)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    for handle in handles:
        handle.remove()
    gradients(model)
    assert len(fired) == len(handles)


class Adapted(nn.Module):
    """Layers, and a product of low rank that is added to what they return (LoRA)."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, inputs, generator=generator).bfloat16())
        self.up = nn.Parameter(torch.randn(outputs, 2, generator=generator).bfloat16())
        self.calls = 0

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        added = F.linear(F.linear(x, self.down), self.up)
        out = self.base(x)
        if isinstance(out, Tensor):
            return added + out
        return tuple(map(torch.add, added.split([part.shape[-1] for part in out], dim=-1), out))


@pytest.mark.parametrize("name", ["self_attn.qkv", "mlp"])
def test_a_wrapped_layer_is_called_and_finds_its_input_as_it_was(name: str) -> None:
    model = make()
    gradients(model)  # what a step before has noted of layers must not outlive them
    base: Any = model.layers[0].get_submodule(name)
    first, last = (base.gate_up, base.down_proj) if name == "mlp" else (base, base)
    wrapper = Adapted(base, first.weight.shape[1], last.weight.shape[0])
    model.layers[0].set_submodule(name, wrapper)
    found = gradients(model)
    assert wrapper.calls == 1
    wanted = gradients(model, partial(saved_tensors_hooks, torch.clone, lambda tensor: tensor))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize(("name", "mode"), [("gpt", "fast"), ("gpt_neox", "invariant")])
def test_ffn_dropout_drops_what_comes_out_of_the_activation(name: str, mode: Any) -> None:
    model: Any = build_model(make_config(section(name, ffn_dropout=0.5)), Group(), sequence_parallel=False)
    inputs: list[torch.Tensor] = []
    mlp = model.layers[0].mlp
    kept = mlp.dropout.register_forward_hook(lambda _module, args, y: inputs.extend((args[0], y)))
    ids = torch.arange(32).view(16, 2)
    model.hidden(ids, dropout=DropoutKey(1, 1, torch.arange(2), 0, mode))
    kept.remove()
    before, after = (x.detach() for x in inputs)
    assert before.min() > -0.2, "GELU has no value below -0.17: this is not what comes out of it"
    assert abs(float((after == 0).float().mean()) - 0.5) < 0.1
    assert torch.allclose(after[after != 0], 2 * before[after != 0])
    plain, dropped = model.hidden(ids), model.hidden(ids, dropout=DropoutKey(1, 1, torch.arange(2), 0, mode))
    assert not torch.allclose(plain, dropped), "what was dropped reached the last projection"
