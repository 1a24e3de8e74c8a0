"""How a world of ranks is divided over tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.base.errors import ConfigError, listing, nearest_multiples, see
from shardwise.config.sections import TrainConfig


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a world of ranks; rank order is [pipeline, data, tensor], tensor fastest.

    Attributes:
        world: ranks of the job.
        tensor, pipeline: degrees.
        sequence_parallel: true if activations are cut along the sequence between tensor-parallel layers.
        virtual: pipeline stages on each rank.

    Raises:
        ConfigError: `world` is no multiple of `tensor` × `pipeline`.
    """

    world: int
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    virtual: int = 1

    def __post_init__(self) -> None:
        degrees = {
            "number of ranks": self.world,
            "tensor-parallel degree": self.tensor,
            "pipeline degree": self.pipeline,
        }
        problems = [f"the {name} ({value}) must be at least 1" for name, value in degrees.items() if value < 1]
        if problems:
            raise ConfigError(problems)
        model_ranks = self.tensor * self.pipeline
        if self.world % model_ranks:
            near = listing(nearest_multiples(self.world, model_ranks), "or")
            keys = f"parallel.tensor ({self.tensor})"
            if self.pipeline > 1:
                keys = f"parallel.tensor × parallel.pipeline ({self.tensor} × {self.pipeline} = {model_ranks})"
            raise ConfigError(
                f"the number of ranks ({self.world}) must be a multiple of {keys}: "
                f"nearest {near} (--nproc, or the world size of torchrun)"
                f"{see('runs#number-of-ranks')}"
            )

    def pipeline_rank(self, rank: int) -> int:
        """The place of a rank of the job along the pipeline."""
        return rank // (self.data * self.tensor)

    @property
    def data(self) -> int:
        """The data-parallel degree: world / (tensor × pipeline)."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def stages(self) -> int:
        """The number of stages into which the model is cut."""
        return self.pipeline * self.virtual

    def facts(self) -> dict[str, int]:
        """The degrees, as the files of a run and the results of an evaluation record them."""
        return {
            "ranks": self.world,
            "tensor": self.tensor,
            "sequence": self.sequence_parallel,
            "pipeline": self.pipeline,
            "data": self.data,
        }

    def ranks_of(self, pipeline_rank: int) -> str:
        """The global ranks of one pipeline rank, such as `ranks 4-7`."""
        count = self.tensor * self.data
        first = pipeline_rank * count
        return f"ranks {first}-{first + count - 1}" if count > 1 else f"rank {first}"

    def accumulation(self, train: TrainConfig) -> int:
        """Micro-batches per optimizer step on each rank: global batch / (micro batch × data).

        Raises:
            ConfigError: that is no whole number.
        """
        portion = train.micro_batch * self.data
        if train.global_batch % portion:
            near = listing(nearest_multiples(train.global_batch, portion), "or")
            raise ConfigError(
                f"train.global_batch ({train.global_batch}) must be a multiple of train.micro_batch × data-parallel "
                f"degree ({train.micro_batch} × {self.data} = {portion}): nearest {near}"
                f"{see('runs#global-batch')}"
            )
        return train.global_batch // portion
