"""The canonical tensors of a family's model, without building it on a device."""

from __future__ import annotations

from shardwise.config import FamilyConfig, config_from
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model


def canonical_shapes(model: FamilyConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor of a model, in its order; nothing is allocated."""
    # The model needs a whole configuration; keys of the training have any valid value.
    sections = {
        "model": model.model_dump(),
        "train": {"steps": 1, "global_batch": 1, "sequence_length": 1},
        "optimizer": {"lr": 1.0},
    }
    built = build_model(config_from(sections), Group(), sequence_parallel=False, device="meta")
    return {piece.name: piece.shape for _, _, record in placements(built) for piece in record.pieces}
