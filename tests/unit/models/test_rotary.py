"""Rotary tables against Hugging Face's, bit for bit, for every `rope_type`."""

import copy
from typing import Any

import pytest
import torch
import transformers

from shardwise.config import GPTNeoXConfig, LlamaConfig, checked_model_section
from shardwise.config.hugging_face import from_hugging_face
from shardwise.config.rope_scaling import LENGTH
from shardwise.models.rotary import Rotary, RotateJoined, rotate
from tests.rows import rows_of

ROWS = rows_of(__file__)

LONGEST = 64
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any] | None] = ROWS["scalings"]


def modeling_llama() -> Any:
    return transformers.models.llama.modeling_llama  # imported now, as it is slow


def models(name: str) -> tuple[LlamaConfig, Any]:
    scaling = SCALINGS[name]
    theirs = transformers.LlamaConfig(**SIZES, rope_theta=1000.0, rope_scaling=scaling and dict(scaling))
    ours = LlamaConfig(family="llama", **SIZES, rope_theta=1000.0, rope_scaling=scaling)
    return ours, modeling_llama().LlamaRotaryEmbedding(theirs)


@pytest.mark.parametrize("length", [8, 33, 3 * LONGEST])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_hugging_faces(name: str, length: int) -> None:
    ours, theirs = models(name)
    cos, sin = Rotary(ours).tables(length, torch.zeros(1))
    wanted_cos, wanted_sin = theirs(torch.zeros(1), torch.arange(length)[None])
    for what, found, wanted in (("cosine", cos, wanted_cos), ("sine", sin, wanted_sin)):
        found = torch.cat((found, found), dim=-1).view(length, -1)
        assert torch.equal(found, wanted[0]), f"{what} is off by {float((found - wanted[0]).abs().max()):.1e}"


FILES: dict[str, dict[str, Any]] = ROWS["files"]


@pytest.mark.parametrize("name", FILES)
def test_fault_10_fields_of_a_file_mean_what_they_mean_to_transformers(name: str) -> None:
    file = {"model_type": "llama", **SIZES, "rope_theta": 1000.0, **FILES[name]}
    ours = checked_model_section(from_hugging_face(file, "config.json"), "config.json")
    assert isinstance(ours, LlamaConfig)
    theirs = modeling_llama().LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(copy.deepcopy(file)))
    for length in (16, LONGEST, 3 * LONGEST):
        found, _ = Rotary(ours).tables(length, torch.zeros(1))
        wanted = theirs(torch.zeros(1), torch.arange(length)[None])[0][0, :, :8]
        assert torch.equal(found.view(length, -1), wanted), f"{length} positions"


def test_fault_10_old_names_and_parts_of_a_head_are_read_as_transformers_does() -> None:
    old, new = (
        {"model_type": "llama", **SIZES, "rope_scaling": {"rope_type": kind, "type": "linear", "factor": 3.0}}
        for kind in (None, "linear")
    )
    assert from_hugging_face(old, "config.json") == from_hugging_face(new, "config.json")
    scaling = {"rope_type": None, "type": "linear", "factor": 3.0}
    assert LlamaConfig(family="llama", **SIZES, rope_scaling=scaling).rope_scaling == SCALINGS["linear"]
    scaling = {"rope_type": "dynamic", "type": None, "factor": 2.5, LENGTH: 16}
    file = {"model_type": "gpt_neox", **SIZES, "rotary_pct": 0.5, "rotary_emb_base": 1000, "rope_scaling": scaling}
    ours = checked_model_section(from_hugging_face(file, "config.json"), "config.json")
    assert isinstance(ours, GPTNeoXConfig)
    modeling = transformers.models.gpt_neox.modeling_gpt_neox
    theirs = modeling.GPTNeoXRotaryEmbedding(transformers.GPTNeoXConfig.from_dict(copy.deepcopy(file)))
    found, _ = Rotary(ours).tables(3 * LONGEST, torch.zeros(1))
    wanted = theirs(torch.zeros(1), torch.arange(3 * LONGEST)[None])[0][0, :, :4]
    assert torch.equal(found.view(3 * LONGEST, -1), wanted)


def test_turning_and_its_gradient_are_hugging_faces() -> None:
    ours, theirs = models("yarn")
    x = torch.randn(6, 2, 3, 16, requires_grad=True)  # [S, B, n, d]
    pull = torch.randn_like(x)
    before = x.detach().clone()
    found = rotate(x, *Rotary(ours).tables(6, x))
    (gradient,) = torch.autograd.grad(found, x, pull)
    cos, sin = theirs(x, torch.arange(6)[None])
    turned, _ = modeling_llama().apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), cos, sin)
    wanted = turned.permute(2, 0, 1, 3)
    (wanted_gradient,) = torch.autograd.grad(wanted, x, pull)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-5, rtol=0)
    assert torch.equal(x.detach(), before), "x was turned in place"


def test_queries_and_keys_side_by_side_have_the_bits_of_both_alone_and_second_derivatives() -> None:
    torch.manual_seed(0)
    widths = (3, 2, 2)
    x = torch.randn(6, 2, 7, 16, dtype=torch.bfloat16, requires_grad=True)
    tables = torch.randn(2, 6, 1, 1, 4).bfloat16().unbind()
    pull = torch.randn(6, 2, 7, 16).bfloat16().split(widths, dim=2)
    q, k, v = x.split(widths, dim=2)
    wanted = (rotate(q, *tables), rotate(k, *tables), v)
    product = x * 1
    found = RotateJoined.apply(product, widths, *tables)
    assert all(part.untyped_storage().data_ptr() == product.untyped_storage().data_ptr() for part in found)
    assert all(map(torch.equal, found, wanted))
    gradients = [torch.autograd.grad(parts, x, pull)[0] for parts in (found, wanted)]
    assert torch.equal(*gradients)
    x = torch.randn(2, 1, 4, 6, dtype=torch.float64, requires_grad=True)
    tables = torch.randn(2, 2, 1, 1, 2, dtype=torch.float64).unbind()

    def rotated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part * 1 for part in RotateJoined.apply(x * 1, (2, 1, 1), *tables))

    assert torch.autograd.gradgradcheck(rotated, x)
