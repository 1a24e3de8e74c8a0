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
from tests.sweeps import few
from tests.unit.estimates.families import MODELS, family, make_config, meta_model, section


def sizes(family: str, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> Any:
    """A `model` section."""
    return {
        "family": family,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def gpt(hidden: int, layers: int, heads: int) -> Any:
    return {"family": "gpt", "vocab_size": 50257, "n_embd": hidden, "n_layer": layers, "n_head": heads}


LLAMA2_7B = sizes("llama", 32000, 4096, 11008, 32, 32)
GPT2_XL = gpt(1600, 48, 25)
BERT_LARGE = sizes("bert", 30522, 1024, 4096, 24, 16)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2 7B": (LLAMA2_7B, 6_738_415_616),
    "Llama-3 8B": (sizes("llama", 128256, 4096, 14336, 32, 32, num_key_value_heads=8), 8_030_261_248),
    "Llama-3.2 1B": (
        sizes("llama", 128256, 2048, 8192, 16, 32, num_key_value_heads=8, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Mistral 7B": (sizes("mistral", 32768, 4096, 14336, 32, 32, num_key_value_heads=8), 7_248_023_552),
    "Qwen2.5 7B": (sizes("qwen2", 152064, 3584, 18944, 28, 28, num_key_value_heads=4), 7_615_616_512),
    "Qwen3 0.6B": (
        sizes("qwen3", 151936, 1024, 3072, 28, 16, num_key_value_heads=8, tie_word_embeddings=True),
        596_049_920,
    ),
    "OLMo-2 7B": (sizes("olmo2", 100352, 4096, 11008, 32, 32), 7_298_617_344),
    "OLMo-3, of the same shapes": (sizes("olmo3", 100352, 4096, 11008, 32, 32), 7_298_617_344),
    "SmolLM3 3B": (sizes("smollm3", 128256, 2048, 11008, 36, 16, num_key_value_heads=4), 3_075_098_624),
    "Gemma 3 1B": (
        sizes("gemma3", 262144, 1152, 6912, 26, 4, num_key_value_heads=1, head_dim=256, sliding_window=512),
        999_885_952,
    ),
    "GPT-2": (gpt(768, 12, 12), 124_439_808),
    "GPT-2 XL": (GPT2_XL, 1_557_611_200),
    "Pythia 6.9B": (sizes("gpt_neox", 50432, 4096, 16384, 32, 32), 6_857_302_016),
    "GPT-NeoX 20B": (sizes("gpt_neox", 50432, 6144, 24576, 44, 64), 20_554_567_680),
    "BERT-large": (BERT_LARGE, 336_226_108),
}


def model(section: dict[str, Any], **changes: object) -> Any:
    return family(make_config(section | changes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    published, count = PUBLISHED[name]
    assert parameter_count(model(published)) == count


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
        llama = model(LLAMA2_7B, tie_word_embeddings=tied)
        assert matmul_parameter_count(llama) == 6_738_415_616 - 65 * 4096 - 32000 * 4096
        assert matmul_parameter_count(llama, "prediction") == 32000 * 4096
    blocks = 48 * 12 * 1600**2
    assert matmul_parameter_count(model(GPT2_XL)) == blocks + 50257 * 1600
    assert matmul_parameter_count(model(GPT2_XL), "token") == blocks
