"""The change of memory and of bytes sent where ranks that divide experts have unequal loads."""

from __future__ import annotations

from dataclasses import replace

from shardwise.base import units
from shardwise.config import Config, Layout
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import memory_of, neediest_rank
from shardwise.estimates.rank_workload import RankWorkload


def sentences(config: Config, layout: Layout, accelerator: bool, name: str) -> list[str]:
    """Return a sentence on the experts of a model at the layout of this name; none for a model without."""
    text = experts_text(config, layout, accelerator)
    return [f"Experts of {name}: {text}."] if text else []


def experts_text(config: Config, layout: Layout, accelerator: bool) -> str:
    """Return the experts of a model in words, with what a larger load of a rank adds; empty for a model without."""
    model = config.shapes
    routing = None if model is None else model.any_routing
    if model is None or routing is None:
        return ""
    blocks = sum(model.routing(layer) is not None for layer in range(model.num_hidden_layers))
    text = f"{routing.per_token} of {routing.experts} for each token in {units.counted(blocks, 'block')}"
    if layout.expert == 1:
        return f"{text}, all on each rank"
    rank = neediest_rank(config, layout, accelerator)
    workload = RankWorkload.of(config, layout, accelerator, rank)
    assert workload is not None, "the shapes of the model are known"
    needed, sent = [], []
    for imbalance in (1.0, 2.0):
        needed.append(memory_of(replace(workload, imbalance=imbalance)).total)
        transfers = step_transfers(config, layout, accelerator, pipeline_rank=rank, imbalance=imbalance)
        sent.append(sum((wire_bytes(transfers) or {}).values()))
    return (
        f"{text}, {routing.experts // layout.expert} on each rank; loads are taken for balanced (1.0): a rank with f "
        f"times the rows needs (f - 1) × {units.size(needed[1] - needed[0])} more memory and sends (f - 1) × "
        f"{units.size(sent[1] - sent[0])} more"
    )
