"""A class of the user's own that is cut into pipeline stages: what a stage has, and why one is refused."""

from typing import Any

import pytest

from examples.own_model import plain
from shardwise import pipelined
from shardwise.base.errors import ConfigError
from shardwise.models.blocks import ModelPart
from tests.dist.own_blocks import MODULES
from tests.unit.models.own_classes import build, config, problem

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
PIPELINE = {"parallel": {"pipeline": 2}}


class Tied(plain.Decoder):
    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.head.weight = self.embedding.weight


class Shorter(plain.Decoder):
    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        del self.blocks[3]


TiedStages, ShorterStages = (pipelined(kind, *MODULES) for kind in (Tied, Shorter))
NormlessStages = pipelined(plain.Decoder, "embedding", "blocks", "head")
NamelessStages = pipelined(plain.Decoder, "embeddings", "blocks")
PlainDecoder = plain.Decoder


def test_a_stage_has_its_blocks_and_a_class_without_any_is_told() -> None:
    chosen = config("tests.dist.own_blocks:Plain", PIPELINE, **SIZES)
    whole = dict(build(chosen).named_parameters())
    first = dict(build(chosen, part=ModelPart(range(2), True, False)).named_parameters())
    last = dict(build(chosen, part=ModelPart(range(2, 4), False, True)).named_parameters())
    assert first.keys() | last.keys() == whole.keys()
    assert not first.keys() & last.keys()
    assert {"embedding.weight", "blocks.1.mlp.up.bias"} <= first.keys()
    assert {"head.weight", "norm.weight", "blocks.2.mlp.up.bias"} <= last.keys()
    family = f"{__name__}:PlainDecoder"
    said = problem(config(family, PIPELINE, **SIZES))
    assert said.startswith(f"parallel.pipeline (2) must be 1 with {family}, which names no blocks: `Trained = shard")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TiedStages", "embedding.weight must be in one module .* and is in embedding and head"),
        ("NormlessStages", "norm.weight must be in one module .* and is in none"),
        ("ShorterStages", r"model.num_hidden_layers \(4\) must be the number of blocks \(3\) in the one torch.nn"),
        ("NamelessStages", "shardwise.pipelined must name modules of the class: .*no attribute `embeddings`"),
    ],
)
def test_what_cannot_be_cut_is_named(name: str, said: str) -> None:
    chosen = config(f"{__name__}:{name}", PIPELINE, **SIZES)
    with pytest.raises(ConfigError, match=rf"model.family \({__name__}:{name}\): {said}"):
        build(chosen, part=ModelPart(range(2), True, False))
