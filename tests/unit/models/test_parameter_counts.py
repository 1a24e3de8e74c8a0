"""Parameter counts against published models, the models that are trained, and hand-counted shards."""

from typing import Any

import pytest
import torch.distributed as dist

from shardwise.config import load_config, recipe_names
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import of_or_whole, placements
from shardwise.models.build import build_model
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
from tests.unit.estimates.families import MODELS, family, make_config, meta_model, section

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


def test_the_head_is_multiplied_even_when_tied_and_tables_never() -> None:
    for tied in (False, True):
        llama = model(published("Llama-2 7B"), tie_word_embeddings=tied)
        assert matmul_parameter_count(llama) == 6_738_415_616 - 65 * 4096 - 32000 * 4096
        assert matmul_parameter_count(llama, "prediction") == 32000 * 4096
    blocks, gpt2_xl = 48 * 12 * 1600**2, model(published("GPT-2 XL"))
    assert matmul_parameter_count(gpt2_xl) == blocks + 50257 * 1600
    assert matmul_parameter_count(gpt2_xl, "token") == blocks
