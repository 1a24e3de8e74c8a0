"""How a world of ranks is divided over tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.sections import TrainConfig
from shardwise.errors import ConfigError, listing, nearest_multiples


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of a world of ranks; rank order is [pipeline, data, tensor], tensor fastest.

    Attributes:
        world: ranks of the job.
        tensor, pipeline: degrees.
        sequence: whether activations are cut along the sequence between tensor-parallel regions.
        virtual: pipeline stages on each rank.

    Raises:
        ConfigError: `world` is no multiple of `tensor` × `pipeline`.
    """

    world: int
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"the {name} ({value}) must be at least 1"
            for name, value in (
                ("world size", self.world),
                ("tensor-parallel degree", self.tensor),
                ("pipeline degree", self.pipeline),
            )
            if value < 1
        ]
        if not problems:
            problems = world_problems(self.world, self.tensor, self.pipeline)
        if problems:
            raise ConfigError(problems)

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
            "sequence": self.sequence,
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
        problems = batch_problems(train, self.data)
        if problems:
            raise ConfigError(problems)
        return train.global_batch // (train.micro_batch * self.data)


def world_problems(world: int, tensor: int, pipeline: int = 1) -> list[str]:
    """Why `world` ranks cannot hold whole copies of a model cut over `tensor` × `pipeline`; empty if they can."""
    model_ranks = tensor * pipeline
    if world % model_ranks == 0:
        return []
    near = listing(nearest_multiples(world, model_ranks), "or")
    keys = f"parallel.tensor ({tensor})"
    if pipeline > 1:
        keys = f"parallel.tensor × parallel.pipeline ({tensor} × {pipeline} = {model_ranks})"
    return [
        f"the number of ranks ({world}) must be a multiple of {keys}: "
        f"nearest {near} (--nproc, or the world size of torchrun)"
    ]


def batch_problems(train: TrainConfig, data: int) -> list[str]:
    """Why the global batch does not divide into micro-batches over `data` replicas; empty if it does."""
    portion = train.micro_batch * data
    if train.global_batch % portion == 0:
        return []
    near = listing(nearest_multiples(train.global_batch, portion), "or")
    return [
        f"train.global_batch ({train.global_batch}) must be a multiple of train.micro_batch × data-parallel degree "
        f"({train.micro_batch} × {data} = {portion}): nearest {near}"
    ]
