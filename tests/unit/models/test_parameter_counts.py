"""Counts of parameters and FLOPs against hand-made ones."""

from typing import Any

import pytest
import torch.distributed as dist

from shardwise.config import BertConfig, LlamaConfig, load_config, recipe_names
from shardwise.config.decoders import Qwen2Config
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import of_or_whole, placements
from shardwise.models.build import build_model
from shardwise.models.flops import flops_per_token, model_flops_utilization, recomputed_flops_per_token
from shardwise.models.parameter_counts import (
    LocalParameter,
    canonical_tensor_count,
    local_parameter_count,
    local_parameters,
    matmul_parameter_count,
    parameter_count,
)
from tests.rows import rows_of
from tests.sweeps import few
from tests.unit.estimates.families import MODELS, OWN, family, make_config, meta_model, section

ROWS = rows_of(__file__)
KEYS = ("family", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def published(name: str) -> dict[str, Any]:
    """The `model` section of a published model."""
    *sizes, others, _ = ROWS[name]
    return {key: size for key, size in zip(KEYS, sizes, strict=True) if size is not None} | others


def model(section: dict[str, Any], **changes: object) -> Any:
    return family(make_config(section | changes))


@pytest.mark.parametrize("name", ROWS)
def test_published_models(name: str) -> None:
    assert parameter_count(model(published(name))) == ROWS[name][-1]


@pytest.mark.parametrize(
    "recipe", few(recipe_names(), "bert-tiny", "glm4-moe-tiny", "gpt3-tiny", "llama2-7b", "gpt-neox-20b")
)
def test_recipes_count_what_their_models_have(recipe: str) -> None:
    config = load_config(recipe)
    found = [of_or_whole(parameter).numel for parameter in meta_model(config).parameters()]  # without padding
    assert parameter_count(config.model) == sum(found)


def as_stored(name: str, tensor: int, sequence: bool) -> list[LocalParameter]:
    """What rank 1 of the model that is trained stores, by its placements."""
    config = make_config(section(name))
    group = Group(dist.new_group(list(range(tensor)))) if tensor > 1 else Group()
    stored = []
    for _, parameter, record in placements(build_model(config, group, sequence_parallel=sequence, device="meta")):
        partial = [piece for piece in record.pieces if piece.partial]
        offset = min((piece.local.start[0] for piece in partial), default=0)
        stored.append(
            LocalParameter(
                parameter.numel(),
                matrix=len(record.pieces[0].shape) > 1,
                tensors=len({piece.name for piece in record.pieces}),
                partial_from=offset * (parameter.numel() // parameter.shape[0]),
                partial_over=partial[0].copies.size if partial else 1,
            )
        )
    return stored


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_models_in_its_order(name: str, tensor: int, sequence: bool) -> None:
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        stored = as_stored(name, tensor, sequence)
    finally:
        dist.destroy_process_group()
    chosen = family(make_config(section(name)))
    found = list(local_parameters(chosen, tensor, sequence))
    for ours, real in zip(found, stored, strict=True):
        assert (ours.elements, ours.matrix, ours.tensors) == (real.elements, real.matrix, real.tensors)
        assert ours.partial_over == real.partial_over
        assert ours.partial_over == 1 or ours.partial_from == real.partial_from
    assert local_parameter_count(chosen, tensor) == sum(each.elements for each in stored)
    assert canonical_tensor_count(chosen) == sum(each.tensors for each in stored)


def test_matmuls_attention_recompute_and_utilization() -> None:
    for tied in (False, True):
        llama = model(published("Llama-2 7B"), tie_word_embeddings=tied)
        assert matmul_parameter_count(llama) == 6_738_415_616 - 65 * 4096 - 32000 * 4096
        assert matmul_parameter_count(llama, "prediction") == 32000 * 4096
    blocks, gpt2_xl = 48 * 12 * 1600**2, model(published("GPT-2 XL"))
    assert matmul_parameter_count(gpt2_xl) == blocks + 50257 * 1600
    assert matmul_parameter_count(gpt2_xl, "token") == blocks
    matmuls = 6 * 6_607_077_376
    # Forward a token takes 2·q·S for the scores and 2·q·S for the sum of values; backward twice that; half is masked.
    attention = 3 * (2 + 2) * 4096 * 4096 * 32 / 2
    assert matmul_parameter_count(LLAMA2_7B) == 6_607_077_376
    assert flops_per_token(LLAMA2_7B, 4096) == matmuls + attention
    assert flops_per_token(LLAMA2_7B, 4096, count_masked=True) == matmuls + 2 * attention
    layers, attention = 24 * 12 * 1024**2, 12 * 24 * 1024 * 128
    masked, once = (30522 + 1024) * 1024, (1024 + 2) * 1024
    assert flops_per_token(BERT_LARGE, 128, 20) == 6 * (layers + masked * 20 / 128 + once / 128) + attention
    assert flops_per_token(BERT_LARGE, 128) == flops_per_token(BERT_LARGE, 128, 20)  # ⌈0.15 · 128⌉
    core, blocks = 4 * 32 * 4096 * 2048, 2 * (6_607_077_376 - 32000 * 4096)
    for fused in (False, True):
        assert recomputed_flops_per_token(LLAMA2_7B, 4096, "none", fused_attention=fused) == 0
        assert recomputed_flops_per_token(LLAMA2_7B, 4096, "selective", fused_attention=fused) == (0 if fused else core)
        assert recomputed_flops_per_token(LLAMA2_7B, 4096, "full", fused_attention=fused) == core + blocks
    assert model_flops_utilization(1e9, 4000.0, 8, 1e12) == pytest.approx(0.5)
    assert model_flops_utilization(1e9, 4000.0, 8, None) is None
    assert model_flops_utilization(flops_per_token(OWN.model, 128), 4000.0, 8, 1e12) is None
    assert recomputed_flops_per_token(OWN.model, 128, "full", fused_attention=True) is None


LLAMA2_7B = LlamaConfig(
    family="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32,
)  # fmt: skip
BERT_LARGE = BertConfig(
    family="bert", vocab_size=30522, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
    num_attention_heads=16,
)  # fmt: skip


@pytest.mark.parametrize("window", [1024, 8192])
def test_a_window_of_w_tokens_leaves_w_times_s_less_half_w(window: int) -> None:
    """A query sees all that come before it, up to w; in the blocks that have the window."""
    seen = min(window, 4096)
    model = Qwen2Config(
        **LLAMA2_7B.model_dump(include={"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"}),
        family="qwen2",
        num_hidden_layers=32,
        num_key_value_heads=32,
        sliding_window=window,
        layer_types=4,  # type: ignore[arg-type]
    )
    attention = 12 * 4096 * (24 * seen * (4096 - seen / 2) + 8 * 4096**2 / 2) / 4096
    assert flops_per_token(model, 4096) == pytest.approx(6 * 6_607_077_376 + attention)
