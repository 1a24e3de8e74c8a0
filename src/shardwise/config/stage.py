"""The section of a stage of the data, `data.stages`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from shardwise.config.base_section import Section
from shardwise.config.token_counts import step_field


class StageConfig(Section):
    """The weights, and the sizes of a step, from a step on."""

    at: int = step_field(gt=0, description="the number of steps after which the stage begins")
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="the weights of all sources that are read from then on, by name; left out = as before",
        examples=[{"web": 0.5}],
    )
    sequence_length: int | None = Field(
        default=None, gt=0, description="train.sequence_length from then on; null = as before"
    )
    global_batch: int | None = Field(
        default=None, gt=0, description="train.global_batch from then on, a number; null = as before"
    )
    micro_batch: int | None = Field(default=None, gt=0, description="train.micro_batch from then on; null = as before")
    rope_theta: float | None = Field(default=None, gt=0, description="model.rope_theta from then on; null = as before")
    rope_scaling: dict[str, Any] | None = Field(
        default=None,
        examples=[{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}],
        description="model.rope_scaling from then on; null = as before, {rope_type: default} = none",
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The keys that are set: the others are as before."""
        return {key: value for key, value in write(self).items() if value}

    @property
    def sizes(self) -> dict[str, Any]:
        """The keys of `train` and `model` that the stage changes, with their values."""
        keys = type(self).model_fields.keys() - {"at", "weights"}
        return {key: value for key in sorted(keys) if (value := getattr(self, key)) is not None}
