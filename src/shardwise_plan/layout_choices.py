"""The layouts that a search tries: which degrees, schedules, micro-batches, recomputes and shardings there are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, get_args

from shardwise.base.errors import ConfigError
from shardwise.base.mesh_axes import CHOSEN_AXES, CHOSEN_DEGREES, layout_text
from shardwise.config import Config, Frequency, Layout, ParallelConfig, Recompute, Schedule, check_layout
from shardwise.config.base_section import divisors
from shardwise.config.optimizer import OptimizerConfig
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE, SCHEDULES
from shardwise.config.stand_in import StandIn, config_as_given
from shardwise_plan.data_stages import check_other_stages
from shardwise_plan.device_specs import Device

# The default comes first: among layouts that take equally long, the first is preferred.
_SCHEDULES: tuple[Schedule, ...] = (
    DEFAULT_SCHEDULE,
    *(name for name in get_args(Schedule) if name != DEFAULT_SCHEDULE),
)
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# An assumption: larger micro-batches take memory and gain little. The recipe's own is tried too.
_MOST_IN_MICRO_BATCH = 16
FIXABLE = (
    "parallel.tensor", "parallel.sequence", "parallel.context", "parallel.pipeline", "parallel.schedule",
    "parallel.virtual_stages", "parallel.stages", "parallel.expert", "parallel.replicate", "train.micro_batch",
    "train.recompute", "optimizer.zero", "optimizer.reduce",
)  # fmt: skip
"""Keys that a layout sets, and that may keep the recipe's value instead."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LayoutChoice:
    """The keys that a layout of the search sets."""

    tensor: int
    sequence: bool
    context: int
    pipeline: int
    schedule: Schedule
    virtual: int | None
    micro_batch: int
    recompute: Recompute
    zero: int
    replicate: int = 1
    reduce: Frequency | None = None
    regathers: bool = False
    passes_keys: bool = False
    expert: int = 1

    @staticmethod
    def of(config: Config, layout: Layout) -> LayoutChoice:
        """Return the choice that a configuration has made."""
        parallel = config.parallel
        return LayoutChoice(
            **{axis.degree: getattr(layout, axis.degree) for axis in CHOSEN_DEGREES},
            sequence=layout.sequence_parallel,
            schedule=parallel.schedule,
            virtual=parallel.stages_per_rank if parallel.stages_per_rank > 1 else None,
            micro_batch=config.train.micro_batch,
            recompute=config.recompute,
            zero=config.optimizer.zero,
            replicate=parallel.replicate,
            reduce=config.optimizer.reduce,
            regathers=config.regathers,
            passes_keys=config.passes_keys,
        )

    def applied(self, config: Config) -> Config:
        """Return the configuration with this layout."""
        parallel: dict[str, object] = dict(self.degrees)
        parallel |= {"sequence": self.sequence, "schedule": self.schedule, "virtual_stages": self.virtual}
        if self.regathers:
            parallel["sequence_regather"] = True
        if self.passes_keys:
            parallel["context_keys"] = "ring"
        # A recipe's sizes of stages are for its own number of stages.
        if len(config.parallel.stages or ()) != self.pipeline * (self.virtual or 1):
            parallel["stages"] = None
        train = {"micro_batch": self.micro_batch, "recompute": self.recompute}
        if isinstance(config.model, StandIn):
            config = config.model_copy(update={"model": config.model.cut_over(self.tensor)})
        return self.sharded(config.with_keys(parallel=parallel, train=train))

    def sharded(self, config: Config) -> Config:
        """Return a configuration with this sharding over data parallelism alone."""
        optimizer: dict[str, object] = {"zero": self.zero}
        if self.reduce != config.optimizer.reduce:
            optimizer["reduce"] = self.reduce
        if self.replicate != config.parallel.replicate:
            config = config.with_keys(parallel={"replicate": self.replicate})
        return config.with_keys(optimizer=optimizer)

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis that is chosen, by its name."""
        return {axis.degree: getattr(self, axis.degree) for axis in CHOSEN_DEGREES}

    def data(self, world: int) -> int:
        """Return the data-parallel degree on `world` ranks, 0 if they are too few."""
        ranks: int = math.prod(getattr(self, axis.degree) for axis in CHOSEN_AXES)
        return world // ranks

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are computed apart from those of activations."""
        return self.pipeline > 1 and SCHEDULES[self.schedule].splits_backward

    def text(self, world: int) -> str:
        """Return the choice on `world` ranks, such as `TP 8 + SP × PP 4 × DP 2, 1f1b, micro-batch 2, …`."""
        words = [layout_text({**self.degrees, "data": self.data(world)}, sequence=self.sequence)]
        if self.regathers:
            words.append("gathered again")
        if self.passes_keys:
            words.append("keys in a ring")
        if self.pipeline > 1:
            words.append(f"{self.schedule} with {self.virtual} stages a rank" if self.virtual else self.schedule)
        sharding = OptimizerConfig.model_construct(zero=self.zero, reduce=self.reduce).sharding_text(self.replicate)
        return ", ".join([*words, f"micro-batch {self.micro_batch}", f"recompute {self.recompute}", sharding])


def with_compiled_blocks(config: Config, device: Device) -> Config:
    """Return the configuration to plan with compiled blocks on CUDA, unless its recipe chooses or its layout cannot."""
    is_able = not (config.splits_backward or config.parallel.tensor_overlap or config.regathers or config.passes_keys)
    is_able = is_able and not config.known_shapes.is_sparse
    if "enabled" in config.compile.model_fields_set or not (device.is_cuda and is_able):
        return config
    return config.with_keys(compile={"enabled": True})


def layout_choices(
    config: Config,
    world: int,
    per_node: int,
    fixed: Collection[str] = (),
    refused: Counter[str] | None = None,
    looked: Callable[[int], object] = int,
) -> Iterator[tuple[list[list[LayoutChoice]], Layout]]:
    """Yield every layout to search on `world` devices, with lists of shardings, whose first that fits is taken.

    Tensor parallelism stays within a node, unless the recipe's own degree is larger.

    Args:
        fixed: keys that keep the recipe's values.
        refused: numbers of layouts that a rule forbids, by the key of the rule; they are added to it.
        looked: is told 1 for each of `number_of_choices`.
    """
    refused = Counter() if refused is None else refused
    base = config_as_given(config)
    if "parallel.stages" not in fixed:
        base = base.with_keys(parallel={"stages": None})
    is_fixed = "train.recompute" in fixed and config.train.recompute != "auto"
    recomputes = (config.recompute,) if is_fixed else _RECOMPUTES
    for of_degrees in _degrees(config, world, per_node, fixed):
        looked(1)
        recipes = config.train.micro_batch
        powers = [2**n for n in range(_MOST_IN_MICRO_BATCH.bit_length())]
        for micro_batch in _values(fixed, "train.micro_batch", recipes, sorted({recipes, *powers})):
            # Recompute and ZeRO change no rule, so that one check serves all of their values.
            replicate = config.parallel.replicate if "parallel.replicate" in fixed else 1
            optimizer = config.optimizer
            sharding = (optimizer.zero, replicate, optimizer.reduce)
            first = of_degrees(micro_batch, "none", *sharding)
            data = first.data(world)
            if not data or config.train.global_batch % (micro_batch * data):
                refused["train.global_batch"] += len(recomputes)
                continue
            applied = first.applied(base)
            try:
                layout = check_layout(applied, world)
                check_other_stages(applied, layout)
            except ConfigError as error:
                key = re.search(r"[a-z]+\.[a-z_]+", error.problems[0])
                refused[key[0] if key else "the model"] += len(recomputes)
                continue
            shardings = list(_shardings(applied, layout, per_node, fixed))
            for recompute in recomputes:
                yield [[of_degrees(micro_batch, recompute, *cut) for cut in cuts] for cuts in shardings], layout


def number_of_choices(config: Config, world: int, per_node: int, fixed: Collection[str]) -> int:
    """Return the number of choices of degrees and schedule that a search tries."""
    return sum(1 for _ in _degrees(config, world, per_node, fixed))


_Sharding = tuple[int, int, Frequency | None]  # the stage of ZeRO, the number of copies, and when gradients are reduced


def _shardings(config: Config, layout: Layout, per_node: int, fixed: Collection[str]) -> Iterator[list[_Sharding]]:
    """Yield lists of shardings that send more and hold less from one to the next: the first that fits is the fastest.

    Shards are those of all ranks with the same part of the model, or of those of a node with copies on other nodes.
    """
    optimizer = config.optimizer
    if layout.replicas == 1:
        # On one rank all are the same.
        yield [(optimizer.zero, config.parallel.replicate, optimizer.reduce)]
        return
    replicates = [1]
    replicas = layout.replicas
    in_node = per_node // layout.tensor
    if "parallel.replicate" in fixed:
        replicates = [config.parallel.replicate]
    elif in_node > 1 and per_node % layout.tensor == 0 and replicas % in_node == 0 and replicas > in_node:
        replicates += [replicas // in_node] if in_node % layout.expert == 0 else []
    for replicate in replicates:
        stages = [(zero, replicate, reduce) for zero, reduce in _stages(config, layout, fixed)]
        if stages:
            yield stages
    if "optimizer.zero" not in fixed or optimizer.zero == 0:
        yield [(0, config.parallel.replicate, optimizer.reduce)]


def _stages(config: Config, layout: Layout, fixed: Collection[str]) -> Iterator[tuple[int, Frequency | None]]:
    """Yield stages of ZeRO above 0, each with the time of its reductions, which hold less and less memory.

    Stage 2 holds all gradients where it reduces them once a step, and stage 3 all weights where it gathers them once a
    step: neither then holds less than stage 1.
    """
    optimizer = config.optimizer
    stages = (optimizer.zero,) if "optimizer.zero" in fixed else (1, 2, 3)
    for zero in stages:
        if zero == 0 or (zero > 1 and len(stages) > 1 and config.gather == "step"):
            continue
        if zero == 1 or "optimizer.reduce" in fixed:
            yield zero, optimizer.reduce
            continue
        if zero == 3 and layout.accumulation(config.train) > 1:
            yield zero, "step"
        if len(stages) == 1 or not config.is_bit_equal:
            yield zero, None


def _values(fixed: Collection[str], key: str, recipes: _Value, tried: Sequence[_Value]) -> Sequence[_Value]:
    return [recipes] if key in fixed else tried


# An assumption: with shorter chunks of a sample, matrices are small, and the other axes are the better ones.
_LEAST_CHUNK = 1024


def _degrees(config: Config, world: int, per_node: int, fixed: Collection[str]) -> Iterator[partial[LayoutChoice]]:
    """Yield choices of degrees that divide the world and the model, which the other keys complete.

    `check_layout` has further rules.
    """
    parallel = config.parallel
    model = config.known_shapes
    named_heads = config_as_given(config).model.num_attention_heads or 0
    heads = [n for n in range(1, per_node + 1) if world % n == 0 and named_heads % n == 0]
    for tensor in _values(fixed, "parallel.tensor", parallel.tensor, heads):
        sequences = _values(
            fixed, "parallel.sequence", parallel.sequence and tensor > 1, [True, False] if tensor > 1 else [False]
        )
        for context in _contexts(parallel.context, config.train.sequence_length, world // tensor, fixed):
            ranks = world // (tensor * context)
            layers = [n for n in range(1, model.num_hidden_layers + 1) if ranks % n == 0]
            for pipeline in _values(fixed, "parallel.pipeline", parallel.pipeline, layers):
                routing = model.any_routing
                common = math.gcd(world // (tensor * pipeline), 1 if routing is None else routing.experts)
                experts = _values(fixed, "parallel.expert", parallel.expert, sorted(divisors(common)))
                for schedule, virtual in _schedules(parallel, model.num_hidden_layers, pipeline, fixed):
                    for sequence in sequences:
                        for expert in experts:
                            yield partial(
                                LayoutChoice, tensor, sequence, context, pipeline, schedule, virtual, expert=expert
                            )


def _contexts(recipes: int, length: int, ranks: int, fixed: Collection[str]) -> Sequence[int]:
    """Return the degrees of context parallelism that divide the ranks: the recipe's, and all that leave long chunks.

    Each rank has two chunks of each sample of `length` tokens, of at least `_LEAST_CHUNK` tokens.
    """
    most = max(1, length // (2 * _LEAST_CHUNK))
    degrees = {recipes, *(n for n in range(1, most + 1) if n == 1 or length % (2 * n) == 0)}
    return _values(fixed, "parallel.context", recipes, [n for n in sorted(degrees) if ranks % n == 0])


def _schedules(
    parallel: ParallelConfig, layers: int, pipeline: int, fixed: Collection[str]
) -> Iterator[tuple[Schedule, int | None]]:
    if pipeline == 1:
        yield DEFAULT_SCHEDULE, None
        return
    for schedule in _values(fixed, "parallel.schedule", parallel.schedule, _SCHEDULES):
        spec = SCHEDULES[schedule]
        if spec.is_single_stage:
            yield schedule, None
        elif spec.is_v_shaped:
            yield schedule, spec.stages_per_rank
        else:
            equal = [n for n in range(spec.stages_per_rank, layers // pipeline + 1) if layers % (pipeline * n) == 0]
            for virtual in _values(fixed, "parallel.virtual_stages", parallel.virtual_stages, equal):
                yield schedule, virtual
