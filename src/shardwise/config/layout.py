"""Divides a world of ranks over the axes of the mesh, and a model over pipeline stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from shardwise.base import mesh_axes
from shardwise.base.errors import ConfigError, listing, raise_problems, see
from shardwise.base.units import counted
from shardwise.config.base_section import divisors, nearest_multiples
from shardwise.config.sections import TrainConfig


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a world of ranks, whose order is that of `mesh_axes.AXES`.

    Raises:
        ConfigError: `world` is no multiple of `tensor` × `context` × `pipeline`.
    """

    world: int
    # tensor, pipeline, context: degrees.
    tensor: int = 1
    sequence_parallel: bool = False  # true if activations are cut along the sequence between tensor-parallel layers
    pipeline: int = 1
    virtual: int = 1  # pipeline stages on each rank
    context: int = 1
    expert: int = 1  # ranks, of those of data and context parallelism, that divide the experts of a block among them

    def __post_init__(self) -> None:
        numbers = {"number of ranks": self.world}
        numbers |= {axis.title: getattr(self, axis.degree) for axis in mesh_axes.CHOSEN_AXES}
        problems = [f"the {name} ({value}) must be at least 1" for name, value in numbers.items() if value < 1]
        # Before the next rule, which divides by the degrees.
        raise_problems(ConfigError, problems)
        if self.world % self.ranks_of_one_model:
            near = listing(nearest_multiples(self.world, self.ranks_of_one_model), "or")
            raise ConfigError(
                f"the number of ranks ({self.world}) must be a multiple of {mesh_axes.degree_keys_text(self.degrees)}: "
                f"nearest {near} (--nproc, or the world size of torchrun)"
                f"{see('runs#number-of-ranks')}"
            )

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis by its name."""
        return {axis.degree: getattr(self, axis.degree) for axis in mesh_axes.AXES}

    @cached_property
    def ranks_of_one_model(self) -> int:
        """Ranks that compute one micro-batch: tensor × context × pipeline."""
        return math.prod(getattr(self, axis.degree) for axis in mesh_axes.CHOSEN_AXES)

    @cached_property
    def data(self) -> int:
        """The data-parallel degree: world / (tensor × context × pipeline)."""
        return self.world // self.ranks_of_one_model

    @cached_property
    def replicas(self) -> int:
        """Ranks that have the same part of the model, and add up its gradients: data × context."""
        return self.data * self.context

    @property
    def replicas_axis(self) -> str:
        """The name of the group of these ranks (`Mesh.replicas`)."""
        return mesh_axes.replica_axes_name(self.data, self.context)

    def alike_axis(self, parts: int) -> str:
        """The name of the group of ranks that hold the same experts, or the same one of so many parts of a bucket."""
        return f"{self.replicas_axis}/{mesh_axes.ALIKE if parts == self.expert else 'copies'}"

    @property
    def exchanges_tokens(self) -> bool:
        """True if ranks divide the experts of a block: tokens travel between them, and loads differ."""
        return self.expert > 1

    @cached_property
    def inside_a_stage(self) -> tuple[int, bool, int, int]:
        """The degrees on which a rank's part of a block depends, and of its tokens."""
        return self.tensor, self.sequence_parallel, self.context, self.expert

    @property
    def stages(self) -> int:
        """The number of stages into which the model is cut."""
        return self.pipeline * self.virtual

    @property
    def sequence_parts(self) -> int:
        """The number of parts of a sequence between tensor-parallel regions: each rank has S / `sequence_parts`."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank of the job along each axis, by the axis' short name."""
        return mesh_axes.rank_coordinates(rank, self.degrees)

    def pipeline_rank(self, rank: int) -> int:
        """The place of a rank of the job along the pipeline."""
        return self.coordinates(rank)[mesh_axes.PIPELINE.name]

    def ranks_at(self, pipeline_rank: int) -> range:
        """The ranks of the job that hold the stages of one pipeline rank: neighbours, as the pipeline is outermost."""
        count = self.world // self.pipeline
        return range(pipeline_rank * count, (pipeline_rank + 1) * count)

    def ranks_of(self, pipeline_rank: int) -> str:
        """The ranks of the job at one place of the pipeline as a text, such as `ranks 4-7`."""
        ranks = self.ranks_at(pipeline_rank)
        return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"

    def product(self) -> str:
        """The degrees and their product, such as `TP 2 + SP × PP 1 × DP 4 = 8 ranks`."""
        return f"{mesh_axes.layout_text(self.facts(), sequence=self.sequence_parallel)} = {counted(self.world, 'rank')}"

    def recorded(self) -> dict[str, int]:
        """The fields, as the manifests of checkpoints record them."""
        # The names are those of the file format, which stay.
        return {
            "world": self.world,
            "tensor": self.tensor,
            "sequence": self.sequence_parallel,
            "pipeline": self.pipeline,
            "virtual": self.virtual,
            "data": self.data,
            **self._optional_degrees,
        }

    @property
    def _optional_degrees(self) -> dict[str, int]:
        axes = (axis for axis in mesh_axes.AXES if axis.is_optional and mesh_axes.names_axis(axis, self.degrees))
        degrees = {axis.degree: self.degrees[axis.degree] for axis in axes}
        return {**degrees, "expert": self.expert} if self.expert > 1 else degrees

    def facts(self) -> dict[str, int]:
        """The degrees, as the files of a run and the results of an evaluation record them."""
        return {
            "ranks": self.world,
            "tensor": self.tensor,
            "sequence": self.sequence_parallel,
            "pipeline": self.pipeline,
            "data": self.data,
            **self._optional_degrees,
        }

    def accumulation(self, train: TrainConfig) -> int:
        """Micro-batches per optimizer step on each rank: global batch / (micro batch × data).

        Raises:
            ConfigError: the result is no whole number.
        """
        portion = train.micro_batch * self.data
        if train.global_batch % portion:
            fix = f"nearest {listing(nearest_multiples(train.global_batch, portion), 'or')}"
            if train.global_batch % self.data == 0:
                fitting = max(n for n in divisors(train.global_batch // self.data) if n <= train.micro_batch)
                fix = f"set train.micro_batch={fitting}, which leaves the training as it is, or another batch ({fix})"
            raise ConfigError(
                f"train.global_batch ({train.global_batch}) must be a multiple of train.micro_batch × data-parallel "
                f"degree ({train.micro_batch} × {self.data} = {portion}): {fix}"
                f"{see('runs#global-batch')}"
            )
        return train.global_batch // portion


@dataclass(frozen=True)
class LayoutStage:
    """A pipeline stage of a configured layout: consecutive blocks; the first has the embedding too, the last the head.

    Attributes:
        index: number of the stage from 0, in the order of the model.
        rank: the pipeline rank that holds it.
    """

    index: int
    rank: int
    layers: range
    stages: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def block_range(self) -> str:
        """The numbers of the blocks: `4-7`, or `4`."""
        first = self.layers[0]
        last = self.layers[-1]
        return f"{first}" if first == last else f"{first}-{last}"
