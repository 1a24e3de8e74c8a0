"""Whatever the layout: the same canonical tensors, the same sample."""

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import Config, config_from_sections
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model
from shardwise_use.generation import GenerativeModel, _continue_text
from tests.dist.dense import mesh as shared_mesh
from tests.sweeps import few

SIZES: dict[str, Any] = {
    "vocab_size": 131,  # odd: the vocabulary is padded at every degree
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA: dict[str, Any] = {"family": "llama", "num_key_value_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": LLAMA,
    "tied-biased": LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "one-kv-head": LLAMA | {"num_key_value_heads": 1},
    "gpt": {"family": "gpt"},
    "neox": {"family": "gpt_neox"},
    "bert": {"family": "bert"},
}
# (ranks, TP, sequence parallelism): what is not TP is data parallelism.
LAYOUTS = {
    "tp2": (2, 2, False),
    "tp4": (4, 4, False),
    "tp4-sp": (4, 4, True),
    "tp2-dp2": (4, 2, False),
    "dp2": (2, 1, False),
}
OFTEN = ("tp4-sp", "tp2-dp2")


def config(variant: str, tensor: int = 1, sequence: bool = False) -> Config:
    return config_from_sections(
        {
            "model": SIZES | VARIANTS[variant],
            "parallel": {"tensor": tensor, "sequence": sequence},
            "train": {"steps": 1, "global_batch": 8, "sequence_length": 16, "seed": 5},
            "optimizer": {"lr": 1e-3},
        }
    )


def build(chosen: Config) -> tuple[nn.Module, Mesh]:
    """The model, with rubbish in the rows by which the vocabulary is padded."""
    mesh = shared_mesh(chosen.parallel.tensor)
    sequence = chosen.parallel.sequence and mesh.tp.size > 1
    model = build_model(chosen, mesh.tp, sequence_parallel=sequence, dtype=torch.float32)
    with torch.no_grad():
        for _, parameter, placement in placements(model):
            inside = torch.zeros_like(parameter, dtype=torch.bool)
            for piece in placement.pieces:
                inside[piece.local.slices] = True
            parameter[~inside] = 1e4
    return model, mesh


def digests(chosen: Config) -> dict[str, str]:
    """Of each canonical tensor, as this rank sees it."""
    model, _ = build(chosen)
    return {
        name: f"{tuple(tensor.shape)} {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()}"
        for name, tensor in canonical_tensors(model)
    }


def sample(chosen: Config, window: int) -> list[int]:
    model, mesh = build(chosen)
    assert isinstance(model, GenerativeModel)
    return _continue_text(model, mesh, [3, 1, 4, 1, 5], 12, window=window, seed=7)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", few(LAYOUTS, *OFTEN))
def test_canonical_tensors_are_those_of_one_process(layout: str, variant: str, ranks: Any) -> None:
    world, tensor, sequence = LAYOUTS[layout]
    wanted = digests(config(variant))
    heads = {"untied": "lm_head.weight", "one-kv-head": "lm_head.weight", "neox": "embed_out.weight"}
    found_heads = [name for name in wanted if name in heads.values()]
    assert found_heads == ([heads[variant]] if variant in heads else []), "a tied head is no tensor of its own"
    for rank, found in enumerate(ranks(world).run(digests, config(variant, tensor, sequence))):
        assert list(found) == list(wanted), f"rank {rank} has other tensors, or another order"
        differing = [name for name in wanted if found[name] != wanted[name]]
        assert not differing, f"{layout}, rank {rank}: {differing} differ from one process"


@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize("layout", ["tp2", "tp4-sp"])
def test_the_sample_is_that_of_one_process(layout: str, window: int, ranks: Any) -> None:
    """With a window of 8 the context slides; its length, 5 to 8, is filled up where it does not divide by TP."""
    world, tensor, sequence = LAYOUTS[layout]
    wanted = sample(config("untied"), window)
    assert len(set(wanted)) > 3, "a sample that repeats one token shows nothing"
    for rank, found in enumerate(ranks(world).run(sample, config("untied", tensor, sequence), window)):
        assert found == wanted, f"rank {rank} of {layout} continues the text in another way"
