"""All layouts of a recipe on a number of devices that its rules allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shardwise.config import Config, Layout, OwnConfig, check_layout
from shardwise.config.sections import SINGLE_STAGE, V_SHAPED, Recompute, Schedule
from shardwise.errors import ConfigError

_SCHEDULES: tuple[Schedule, ...] = (
    "1f1b", "gpipe", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev",
)  # fmt: skip
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_MOST_IN_MICRO_BATCH = 16
FIXABLE = (
    "parallel.tensor", "parallel.sequence", "parallel.pipeline", "parallel.schedule", "parallel.virtual_stages",
    "parallel.stages", "train.micro_batch", "train.recompute", "optimizer.zero",
)  # fmt: skip
"""Keys that a layout sets, and that may keep the recipe's value instead."""


@dataclass(frozen=True)
class Choice:
    """The keys that a layout sets."""

    tensor: int
    sequence: bool
    pipeline: int
    schedule: Schedule
    virtual: int | None
    micro_batch: int
    recompute: Recompute
    zero: int

    def applied(self, config: Config) -> Config:
        """The configuration with this layout."""
        pipeline = {"pipeline": self.pipeline, "schedule": self.schedule, "virtual_stages": self.virtual}
        parallel = {"tensor": self.tensor, "sequence": self.sequence, **pipeline}
        if len(config.parallel.stages or ()) != self.pipeline * (self.virtual or 1):
            parallel["stages"] = None
        train = {"micro_batch": self.micro_batch, "recompute": self.recompute}
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "train": config.train.model_copy(update=train),
                "optimizer": config.optimizer.model_copy(update={"zero": self.zero}),
            }
        )

    def text(self) -> str:
        """Such as `TP 8 + SP × PP 4 (interleaved, 3 stages a rank), micro-batch 2, recompute none, ZeRO-1`."""
        tensor = f"TP {self.tensor}{' + SP' if self.sequence else ''}"
        stages = f", {self.virtual} stages a rank" if self.virtual else ""
        schedule = f" ({self.schedule}{stages})" if self.pipeline > 1 else ""
        rest = f"micro-batch {self.micro_batch}, recompute {self.recompute}, ZeRO-{self.zero}"
        return f"{tensor} × PP {self.pipeline}{schedule}, {rest}"


def choices(config: Config, world: int, per_node: int, fixed: Collection[str] = ()) -> Iterator[tuple[Choice, Layout]]:
    """Every layout on `world` devices. A key in `fixed` keeps the recipe's value.

    Tensor parallelism stays within a node, unless the recipe's own degree is larger.
    """
    base = config.model_copy(update={"parallel": config.parallel.model_copy(update={"stages": None})})
    if "parallel.stages" in fixed:
        base = config
    for one in _shapes(config, world, per_node, fixed):
        for micro_batch in _micro_batches(config, fixed):
            first = Choice(*one, micro_batch, "none", 1)
            data = world // (first.tensor * first.pipeline)
            if config.train.global_batch % (micro_batch * data):
                continue
            try:
                layout = check_layout(first.applied(base), world)
            except ConfigError:
                continue
            zeros = (1, 0) if data > 1 else (config.optimizer.zero,)
            for zero in (config.optimizer.zero,) if "optimizer.zero" in fixed else zeros:
                recompute: Recompute
                for recompute in (config.train.recompute,) if "train.recompute" in fixed else _RECOMPUTES:
                    yield Choice(*one, micro_batch, recompute, zero), layout


def _micro_batches(config: Config, fixed: Collection[str]) -> list[int]:
    if "train.micro_batch" in fixed:
        return [config.train.micro_batch]
    own = config.train.micro_batch
    return sorted({own, *(2**n for n in range(_MOST_IN_MICRO_BATCH.bit_length()))})


def _shapes(
    config: Config, world: int, per_node: int, fixed: Collection[str]
) -> Iterator[tuple[int, bool, int, Schedule, int | None]]:
    """Tensor degree, sequence parallelism, pipeline degree, schedule and virtual stages."""
    parallel, model = config.parallel, config.model
    assert not isinstance(model, OwnConfig)
    most = per_node if "parallel.tensor" not in fixed else parallel.tensor
    tensors = [n for n in range(1, most + 1) if world % n == 0 and model.num_attention_heads % n == 0]
    if "parallel.tensor" in fixed:
        tensors = [parallel.tensor]
    for tensor in tensors:
        sequences = (True, False) if tensor > 1 else (False,)
        if "parallel.sequence" in fixed:
            sequences = (parallel.sequence and tensor > 1,)
        rest = world // tensor
        pipelines = [n for n in range(1, model.num_hidden_layers + 1) if rest % n == 0]
        for pipeline in [parallel.pipeline] if "parallel.pipeline" in fixed else pipelines:
            for schedule, virtual in _schedules(config, pipeline, fixed):
                for sequence in sequences:
                    yield tensor, sequence, pipeline, schedule, virtual


def _schedules(config: Config, pipeline: int, fixed: Collection[str]) -> Iterator[tuple[Schedule, int | None]]:
    if pipeline == 1:
        yield ("1f1b", None)
        return
    for schedule in (config.parallel.schedule,) if "parallel.schedule" in fixed else _SCHEDULES:
        if schedule in SINGLE_STAGE:
            yield schedule, None
        elif schedule in V_SHAPED:
            yield schedule, 2
        elif "parallel.virtual_stages" in fixed:
            yield schedule, config.parallel.virtual_stages
        else:
            assert not isinstance(config.model, OwnConfig)
            layers = config.model.num_hidden_layers
            yield from (
                (schedule, virtual)
                for virtual in range(2, layers // pipeline + 1)
                if layers % (pipeline * virtual) == 0
            )
