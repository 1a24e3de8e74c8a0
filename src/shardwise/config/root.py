"""The whole configuration of a run."""

from __future__ import annotations

from pydantic import Field

from shardwise.config.base import Section
from shardwise.config.data import DataConfig
from shardwise.config.model import AnyModel
from shardwise.config.sections import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)


class Config(Section):
    """Everything that a run reads, resolved and immutable."""

    model: AnyModel = Field(description="what is trained")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="how the model is cut")
    train: TrainConfig = Field(description="how long and in what portions")
    optimizer: OptimizerConfig = Field(description="the update rule, its schedule and its sharding")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="which dtype holds what")
    data: DataConfig = Field(default_factory=DataConfig, description="what the model reads")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="what is saved and kept, and what a run starts from"
    )
    log: LogConfig = Field(default_factory=LogConfig, description="what the run reports")
