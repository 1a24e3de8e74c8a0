"""The change of memory and of bytes sent where routers send unequal numbers of tokens to the ranks."""

from __future__ import annotations

from dataclasses import replace

from shardwise.base import units
from shardwise.config import Config, FamilyConfig, Layout
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import estimated_memory, neediest_rank
from shardwise.estimates.rank_workload import RankWorkload


def unequal_load_rows(config: Config, layout: Layout, accelerator: bool) -> list[tuple[str, str]]:
    """Estimate the memory and bytes sent that a larger load of experts adds, as rows of text; none without routers."""
    rows = [] if config.shapes is None else _expert_rows(config.shapes, layout)
    if not layout.exchanges_tokens:
        return rows
    rank = neediest_rank(config, layout, accelerator)
    workload = RankWorkload.of(config, layout, accelerator, rank)
    assert workload is not None, "the shapes of the model are known"
    needed, sent = [], []
    for imbalance in (1.0, 2.0):
        needed.append(estimated_memory(replace(workload, imbalance=imbalance)).total)
        transfers = step_transfers(config, layout, accelerator, pipeline_rank=rank, imbalance=imbalance)
        sent.append(sum((wire_bytes(transfers) or {}).values()))
    further = (
        f"; loads are taken for balanced (1.0): a rank with f times the rows needs (f - 1) × "
        f"{units.size(needed[1] - needed[0])} more memory and sends (f - 1) × {units.size(sent[1] - sent[0])} more"
    )
    return [(name, text + further) for name, text in rows]


def _expert_rows(model: FamilyConfig, layout: Layout) -> list[tuple[str, str]]:
    """The experts of a model as a row beside the estimates of a dry run; none for a dense model."""
    rule = model.any_routing
    if rule is None:
        return []
    local_experts = "all" if layout.expert == 1 else rule.experts // layout.expert
    blocks = units.counted(len(model.routings), "block")
    return [("experts", f"{rule.per_token} of {rule.experts} for each token in {blocks}, {local_experts} on each rank")]
