"""1,024 ranks, one at a time, on PyTorch's fake process group: mesh, shapes of shards, placements."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.config import LlamaConfig
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import Placement, placements
from shardwise.models.llama import Llama

WORLD = 1024
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def as_rank() -> Iterator[Callable[[int], None]]:
    """Be one rank of 1,024; calling it again is another rank."""

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=WORLD)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 517, 1023])
@pytest.mark.parametrize(("tensor", "context", "pipeline"), [(8, 4, 4), (32, 1, 8), (1, 1, 1), (2, 1, 512)])
def test_axes_are_pipeline_data_context_tensor(
    tensor: int, context: int, pipeline: int, rank: int, as_rank: Callable[[int], None]
) -> None:
    as_rank(rank)
    mesh = Mesh(tensor=tensor, pipeline=pipeline, context=context, device="cpu")
    data = WORLD // (tensor * context * pipeline)
    inner = context * tensor
    pp, dp, cp, tp = rank // (data * inner), rank // inner % data, rank // tensor % context, rank % tensor
    wanted = {
        "tp": [(pp * data + dp) * inner + cp * tensor + i for i in range(tensor)],
        "cp": [(pp * data + dp) * inner + i * tensor + tp for i in range(context)],
        "dp": [(pp * data + i) * inner + cp * tensor + tp for i in range(data)],
        "pp": [(i * data + dp) * inner + cp * tensor + tp for i in range(pipeline)],
        "dp_cp": [pp * data * inner + i * tensor + tp for i in range(data * context)],
        "world": list(range(WORLD)),
    }
    places = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "dp_cp": dp * context + cp, "world": rank}
    for group in mesh.groups:
        place = places[group.name]
        if group.size == 1:
            assert len(wanted[group.name]) == 1
            continue
        assert list(group.ranks) == wanted[group.name], f"{group.name} of rank {rank}"
        assert group.rank == place
    assert wanted["tp"] == list(range(rank - tp, rank - tp + tensor)), "TP ranks must be neighbours"
    shared = f"cp={context}, " if context > 1 else ""
    assert repr(mesh) == f"Mesh(pp={pipeline}, dp={data}, {shared}tp={tensor}, rank={rank}, cpu)"


def test_a_world_that_does_not_divide_is_refused(as_rank: Callable[[int], None]) -> None:
    as_rank(0)
    with pytest.raises(ValueError, match=r"world size \(1024\) must be a multiple of tensor × pipeline \(3 × 1\)"):
        Mesh(tensor=3, device="cpu")


SHAPES = {
    "embed_tokens.weight": (17, 64),  # 131 rows over 8, padded
    "layers.0.input_layernorm.weight": (64,),
    "layers.0.self_attn.qkv.weight": (8 + 4 + 4, 64),  # 2 of 16 query heads; each K/V head on 4 ranks
    "layers.0.self_attn.out.weight": (64, 8),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.mlp.gate_up.weight": (24, 64),
    "layers.0.mlp.down_proj.weight": (64, 12),
    "norm.weight": (64,),
    "lm_head.weight": (17, 64),
}


def records(rank: int, as_rank: Callable[[int], None], *, sequence: bool) -> dict[str, Placement]:
    """On the meta device: nothing is allocated."""
    as_rank(rank)
    mesh = Mesh(tensor=8, device="cpu")
    model = Llama(LlamaConfig(family="llama", **SIZES), mesh.tp, sequence_parallel=sequence, seed=1, device="meta")
    assert {path: tuple(parameter.shape) for path, parameter, _ in placements(model)} == SHAPES
    return {path: record for path, _, record in placements(model)}


def test_the_ranks_of_one_tensor_group_tile_the_model(as_rank: Callable[[int], None]) -> None:
    """Ranks 512 … 519."""
    held: dict[str, torch.Tensor] = {}
    copies: dict[str, int] = {}
    for rank in range(512, 520):
        for record in records(rank, as_rank, sequence=True).values():
            for piece in record.pieces:
                held.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.int64))[piece.box.slices] += 1
                if piece.box.numel:
                    assert copies.setdefault(piece.name, piece.copies.size) == piece.copies.size
                    assert piece.copies.size == 1 or rank in piece.copies.ranks
    assert Counter(copies.values()) == {1: 7, 4: 2, 8: 3}, copies
    for name, count in held.items():
        assert bool((count == copies[name]).all()), f"{name} is held {count.unique().tolist()} times"


@pytest.mark.parametrize("rank", [515, 1023])
def test_copied_key_and_value_heads_are_summed_over_their_neighbours(rank: int, as_rank: Callable[[int], None]) -> None:
    q, k, v = records(rank, as_rank, sequence=False)["layers.0.self_attn.qkv.weight"].pieces
    first = rank // 4 * 4
    assert not q.partial
    for piece in (k, v):
        assert piece.partial
        assert piece.copies.ranks == tuple(range(first, first + 4))
        assert piece.box.start[0] == rank % 8 // 4 * 4
