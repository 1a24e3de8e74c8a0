"""The summary of a run as rows of text, with its cost by `estimates`: in a dry run and at the start of a run.

The rows tell batch, layout, parameters, compute, memory, disk and communication. Imports no torch, which a dry run does
without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shardwise.base import hardware, units
from shardwise.base.errors import listing
from shardwise.base.yaml_and_json import dump_yaml
from shardwise.config import Config, Layout, ModelConfig, Precision, size_stages_of, tokens_of_run
from shardwise.config.layout import LayoutStage
from shardwise.config.optimizer import OptimizerConfig
from shardwise.estimates.device_peaks import peak_flops
from shardwise.estimates.memory import (
    MemoryEstimate,
    checkpoint_bytes,
    config_for_memory_estimate,
    expected_memory,
    memory_by_rank,
    memory_of_machine,
    neediest_rank,
    offloaded_bytes,
)
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.models import parameter_counts
from shardwise.models.flops import flops_per_token, recomputed_flops_per_token
from shardwise.models.parameter_counts import OwnShapes
from shardwise.optim.learning_rate import learning_rate
from shardwise.pipeline.partition import compute_shares, partition_by_rank
from shardwise.runs.folder import json_text

_CURVE_WIDTH, _CURVE_HEIGHT = 64, 5
_BLOCKS = " ▁▂▃▄▅▆▇█"
_UNKNOWN = "not known for a model of your own"
_PROCESS_BYTES = 300 * 2**20
"""Python and torch in a process on a CPU: 260 MiB after all imports with torch 2.11, and its process group."""
_PYTHON_AND_TORCH = f"about {units.size(_PROCESS_BYTES)} for Python and torch"

_Rows = list[tuple[str, str]]


class _ClusterDevice(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> float:
        """Its bytes."""

    @property
    def is_accelerator(self) -> bool: ...

    def require_fp8(self) -> float:
        """Return its FLOP/s in fp8. Raises ConfigError if it has none."""


class Cluster(Protocol):
    """The facts that a dry run's summary asks of a cluster, which need not be here."""

    @property
    def device(self) -> _ClusterDevice: ...

    @property
    def world(self) -> int: ...


@dataclass(frozen=True)
class PredictedStep:
    """What the summary of a training's dry run says on a step of a cluster, which need not be here."""

    cluster: str
    rows: Sequence[tuple[str, str]]  # rows on the time of a step, its parts, and the memory that is left or lacks
    seconds: float | None  # time of a step; None if it is not known
    facts: Mapping[str, Any] | None = None  # figures as `shardwise plan --json` has them; None if they are not known
    problems: Sequence[str] = ()  # the reason why no rank can hold its part, if so


def training_summary(
    recipe: str,
    config: Config,
    layout: Layout,
    device: str,
    accelerator: bool,
    inputs: Sequence[tuple[str, str]] = (),
    predicted: PredictedStep | None = None,
    *,
    continued: Sequence[tuple[str, str]] = (),
    full: bool = False,
    recipe_config: Config | None = None,
    counts: OwnShapes | None = None,
    as_json: bool = False,
) -> str:
    """The summary of a training as comments, then its keys as YAML: the text can be saved as a recipe.

    Args:
        predicted: prediction for other machines; None for this machine.
        full: show every key, not only those that differ from their defaults.
        recipe_config: configuration whose keys are shown, without choices by memory; None: `config`.
        counts: what was counted of a model of the user's own; None: nothing, or a model of a family.
    """
    summary = _Summary(config, layout, accelerator)
    sized = summary
    if counts is not None:
        sized = _Summary(config_for_memory_estimate(config, counts, accelerator), layout, accelerator, counts)
    hint = "" if accelerator else "; use --device h100:8 to size for GPUs"
    shown_device = f"{device} (this machine){hint}" if predicted is None else f"{predicted.cluster} (--device)"
    rows = [
        *continued,
        *summary.work(shown_device, counts),
        *([] if predicted is None else predicted.rows),
        *sized.pipeline(),
        *sized.compute(),
        *sized.needs(),
        ("checkpoints", summary.when_saved(None if predicted is None else predicted.seconds)),
        *(sized.host_memory() if predicted is None and not accelerator else []),
        *inputs,
    ]
    lines = [f"{recipe}: a dry run, nothing was started", "", *(f"{name:<14} {value}" for name, value in rows)]
    lines += ["", f"learning rate: {config.optimizer.schedule}", *_rate_curve(config.optimizer, config.train.steps)]
    comments = "\n".join(f"# {line}".rstrip() for line in lines)
    keys, title = (recipe_config or config).recorded(), "all keys"
    if not full:
        keys, title = config.run.without_defaults(keys), "keys that differ from their defaults (--full shows all)"
        if config.data.key != "data.dataset":
            # That of the recipe, in whose place other data are read.
            keys.get("data", {}).pop("dataset", None)
    if as_json:
        facts = {"recipe": recipe, "device": device, **sized.facts(counts), "prediction": None, "keys": keys}
        facts |= {"continues": [*map(_fact, continued)], "inputs": [*map(_fact, inputs)]}
        facts |= {} if predicted is None else {"device": predicted.cluster, "prediction": predicted.facts}
        return json_text(facts, indent=2, ascii=True)
    return f"{comments}\n\n# {title}\n{dump_yaml(keys)}".rstrip()


def _fact(row: tuple[str, str]) -> dict[str, str]:
    return {"name": row[0].strip(), "text": row[1]}


def start_rows(
    config: Config,
    layout: Layout,
    *,
    device_name: str,
    parameters: int,
    memory: Mapping[str, int],
    token_flops: float | None,
    steps: tuple[int, int],
    epochs: str,
    run_path: Path,
) -> _Rows:
    """The rows of the summary that a training prints at its start.

    Args:
        memory: expected bytes by kind on the rank that needs most; for a user's own model without activations.
        token_flops: FLOPs of a token, forward and backward; None where they are not known.
        steps: steps done by earlier runs, and the last step of this run.
        epochs: text on how often the training reads its data; empty if that is not known.
    """
    summary = _Summary(config, layout, not device_name.startswith("cpu"))
    precision = config.precision.resolved(summary.accelerator)
    train = config.train
    steps_before, end = steps
    samples = (config.last_step - config.steps_before) * train.global_batch
    tokens = samples * train.sequence_length
    begin = f", {steps_before:,} of them done" if steps_before else ""
    # A run of several stages, and one that does not do all steps.
    stage = "" if config.run is config else f", {config.steps_before + 1:,} to {config.last_step:,} in this stage"
    stop = "" if end == train.steps else f", this run stops at {end:,}"
    roles = {"gradient": precision.gradient, "reduce": precision.reduce, "optimizer": precision.optimizer}
    dtypes = "".join(f", {role} {dtype}" for role, dtype in roles.items() if dtype != precision.parameter)
    parts = ", ".join(f"{name} {units.size(size)}" for name, size in memory.items() if size)
    known = f"{summary.memory_text(sum(memory.values()))}: {parts}"
    if config.model.is_own:
        known = f"{parts} on each rank; a dry run tells activations"
    return [
        ("model", f"{config.model.family}, {units.count(parameters)} parameters ({parameters:,})"),
        ("steps", f"{train.steps:,}{begin}{stage}{stop}"),
        *config.optimizer.long_warmup(train.steps),
        ("samples", f"{samples:,} × {train.sequence_length:,} tokens = {tokens:,} tokens{epochs and f', {epochs}'}"),
        ("batch", summary.batch),
        ("layout", summary.layout_text),
        ("device", f"{device_name}, {precision.parameter}{dtypes}{_numbers(precision)}{summary.advice(precision)}"),
        ("memory", known),
        ("MFU", summary.utilization(device_name, precision, token_flops)),
        ("run", str(run_path)),
    ]


@dataclass(frozen=True)
class _Summary:
    """Rows on a configuration at a layout; with `counts`, `config` has the model that is like the user's own."""

    config: Config
    layout: Layout
    accelerator: bool
    counts: OwnShapes | None = None

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        """The memory of the rank that needs most; None for a model of the user's own that was not counted."""
        return expected_memory(self.config, self.layout, self.accelerator)

    @cached_property
    def rank(self) -> int:
        return neediest_rank(self.config, self.layout, self.accelerator)

    @property
    def rank_name(self) -> str:
        return f"pipeline rank {self.rank}" if self.layout.pipeline > 1 else "each rank"

    @property
    def batch(self) -> str:
        train = self.config.train
        return (
            f"{train.micro_batch} micro batch × {self.layout.accumulation(train)} accumulation × {self.layout.data} DP "
            f"= {train.global_batch} global batch"
        )

    @property
    def layout_text(self) -> str:
        """The layout with its stage of ZeRO, and a remark on what has no effect here.

        One rank has nothing to cut, and stage 1, the default, is then left out.
        """
        optimizer = self.config.optimizer
        replicate = self.config.parallel.replicate
        sharding = optimizer.sharding_text(replicate)
        idle = [f"optimizer.{key}" for key in optimizer.idle_keys]
        if replicate > 1 and not optimizer.zero:
            idle.append("parallel.replicate")
        if idle:
            sharding += f", {listing(idle)} without effect"
        if optimizer.offload and not self.accelerator:
            sharding += ", optimizer.offload without effect on a CPU"
        if optimizer.zero > 1 and self.layout.replicas == 1:
            sharding += ", no effect with DP 1"
        is_plain = self.layout.world == 1 and sharding == "ZeRO-1"
        return self.layout.product() if is_plain else f"{self.layout.product()}, {sharding}"

    def facts(self, counts: OwnShapes | None) -> dict[str, Any]:
        """The figures of the rows; None where they are not known for a model of the user's own."""
        from shardwise.estimates.communication import step_transfers, wire_bytes

        config, layout, train, memory = self.config, self.layout, self.config.train, self.memory
        wire = wire_bytes(step_transfers(config, layout, self.accelerator, pipeline_rank=self.rank))
        return {
            "layout": asdict(layout) | {"data": layout.data, "zero": config.optimizer.zero},
            "global_batch": train.global_batch,
            "micro_batch": train.micro_batch,
            "accumulation": layout.accumulation(train),
            "steps": train.steps,
            "tokens_per_step": train.global_batch * train.sequence_length,
            "tokens": tokens_of_run(config),
            "parameters": parameter_counts.parameter_count(config.model) if counts is None else counts.parameters,
            "precision": asdict(config.precision.resolved(self.accelerator)) | {"matmul": config.precision.matmul},
            "flops_per_token": _token_flops(config) if counts is None else counts.token_flops,
            "memory_bytes": None if memory is None else memory.total,
            "parts_memory_bytes": None if memory is None else dict(memory.rows()),
            "host_memory_bytes": offloaded_bytes(config, layout, self.accelerator),
            "checkpoint_bytes": checkpoint_bytes(config, self.accelerator),
            "communication_bytes": wire and {f"{axis} {kind}": size for (axis, kind), size in wire.items()},
            "learning_rate": str(config.optimizer.schedule),
        }

    def work(self, device: str, counts: OwnShapes | None = None) -> _Rows:
        """The layout, the batch, the steps, the parameters and their update."""
        from shardwise.estimates.unequal_loads import unequal_load_rows

        config = self.config
        train = config.train
        parameters = parameter_counts.parameter_count(config.model)
        shown_parameters = _UNKNOWN
        if counts is not None:
            shown_parameters = f"{units.count(counts.parameters)} ({counts.parameters:,}), built without data"
        if parameters is not None:
            most = units.count(max(count or 0 for _, count in partition_by_rank(config, self.layout)))
            share = "held by each rank" if self.layout.pipeline == 1 else "held by a rank at most"
            shown_parameters = f"{_parameters_text(config.model)}, {most} {share}"
        # stop_after ends one run of a training that several jobs share.
        stop = "" if train.stop_after is None else f"; this run stops after {train.stop_after:,}"
        tensors = parameter_counts.canonical_tensor_count(config.model)
        each_tensor = "each tensor" if tensors is None else f"each of {tensors:,} tensors"
        step_tokens = train.global_batch * train.sequence_length
        precision = config.precision.resolved(self.accelerator)
        products = "" if config.precision.matmul is None else f"products of blocks {config.precision.matmul}, "
        return [
            ("layout", self.layout_text),
            ("device", device),
            ("batch", self.batch),
            ("steps", f"{train.steps:,}{stop}"),
            *config.optimizer.long_warmup(train.steps),
            *self._stages(),
            ("tokens", f"{step_tokens:,} per step, {tokens_of_run(config):,} in all"),
            ("parameters", shown_parameters),
            *unequal_load_rows(config, self.layout, self.accelerator),
            (
                "precision",
                f"parameters {precision.parameter}, {products}gradients {precision.gradient}, reduction "
                f"{precision.reduce}, optimizer {precision.optimizer}{_numbers(precision)}",
            ),
            ("optimizer", config.optimizer.spec.summary.format(tensors=each_tensor)),
        ]

    def _stages(self) -> _Rows:
        stages = size_stages_of(self.config)
        if len(stages) == 1:
            return []
        shown = [
            f"{stage.train.global_batch:,} × {stage.train.sequence_length:,} tokens up to step {stage.last_step:,}"
            for stage in stages
        ]
        return [("stages", f"{', '.join(shown)}; the other rows are of the neediest")]

    def pipeline(self) -> _Rows:
        """The schedule with its bubble, and each pipeline rank's part of the model."""
        memory = memory_by_rank(self.config, self.layout, self.accelerator)
        if self.layout.pipeline == 1 or memory is None:
            return []
        shares = compute_shares(self.config, self.layout)
        rows = [("pipeline", self._schedule())]
        by_rank = zip(memory, partition_by_rank(self.config, self.layout), strict=True)
        for rank, (needed, (stages, count)) in enumerate(by_rank):
            text = (
                f"{self.layout.ranks_of(rank)}, {_named(stages)}: {units.count(count or 0)} parameters, "
                f"{sum(shares[stage.index] for stage in stages):.1%} of the compute, "
                f"{units.size(needed.activations)} of activations, {units.size(needed.total)} in all"
            )
            rows.append((f"  pp {rank}", text))
        return rows

    def _schedule(self) -> str:
        from shardwise.pipeline.timeline import bubble, simulate

        parallel = self.config.parallel
        micro_batches = self.layout.accumulation(self.config.train)
        shown = f"{parallel.schedule}, {self.layout.stages} stages, {micro_batches} micro-batches: bubble"
        formula = bubble(parallel, micro_batches)
        if formula is None:
            simulated = simulate(parallel, micro_batches, self.config.recompute).bubble
            return (
                f"{shown} {simulated:.1%} by its order of work, where stages are equal and a forward pass takes as "
                "long as each half of a backward pass"
            )
        # p ranks, m micro-batches, v stages on each rank: p - 1 slots are idle while the pipeline fills and drains.
        chunks = "v·m" if self.layout.virtual > 1 else "m"
        return f"{shown} {formula:.1%} where stages are equal, (p-1) / ({chunks}+p-1)"

    def compute(self) -> _Rows:
        """The FLOPs of the training, and those of what is computed again."""
        token_flops = _token_flops(self.config) if self.counts is None else self.counts.token_flops
        workload = RankWorkload.of(self.config, self.layout, self.accelerator)
        if token_flops is None or workload is None:
            return [("compute", _UNKNOWN)]
        total = 0.0
        for stage in size_stages_of(self.config):
            tokens = stage.train.global_batch * stage.train.sequence_length
            flops = _token_flops(stage) if self.counts is None else token_flops
            total += (flops or 0.0) * (stage.last_step - stage.steps_before) * tokens
        rows = [("compute", f"{units.count(token_flops)} FLOPs per token, {units.count(total)} FLOPs in all")]
        if self.config.recompute != "none":
            rows.append(("recompute", _recompute(workload, token_flops)))
        return rows

    def memory_text(self, total: int) -> str:
        where = f"on {self.rank_name}, which needs most" if self.layout.pipeline > 1 else "per rank"
        overhead = "the device's own context" if self.accelerator else _PYTHON_AND_TORCH
        return f"{units.size(total)} {where}, plus {overhead}"

    def needs(self) -> _Rows:
        """Memory, disk and communication; in a pipeline those of the pipeline rank that needs most memory."""
        from shardwise.estimates.communication import step_transfers, wire_bytes

        config = self.config
        wire = wire_bytes(step_transfers(config, self.layout, self.accelerator, pipeline_rank=self.rank))
        checkpoint = checkpoint_bytes(config, self.accelerator)
        if self.memory is None or wire is None or checkpoint is None:
            return [(name, _UNKNOWN) for name in ("memory", "disk", "communication")]
        rows = [("memory", self.memory_text(self.memory.total))]
        rows += [(f"  {kind}", units.size(size)) for kind, size in self.memory.rows()]
        if offloaded := offloaded_bytes(config, self.layout, self.accelerator):
            text = f"{units.size(offloaded)} of masters, optimizer state and gradients for each rank"
            rows.append(("host memory", text))
        rows.append(("disk", self.disk(checkpoint)))
        rows.append(("communication", f"{units.size(sum(wire.values()))} sent by {self.rank_name} per step"))
        rows += [(f"  {axis}", f"{units.size(size)} {kind.replace('_', '-')}") for (axis, kind), size in wire.items()]
        return rows

    def disk(self, checkpoint: int) -> str:
        """The size of one checkpoint, and of all that exist at once: a new one is complete before an old one goes."""
        settings = self.config.checkpoint
        steps = self.config.train.steps
        size = f"{units.size(checkpoint)} for each checkpoint"
        # Saves by the clock are not known before: they may come at any step.
        is_by_clock = settings.every_minutes is not None
        every = 1 if is_by_clock else settings.every or steps
        saved = None if is_by_clock else math.ceil(steps / every)
        at_once = saved
        if settings.keep is not None:
            stay = 0 if settings.keep_every is None else steps // math.lcm(every, settings.keep_every)
            most = settings.keep + stay + 1
            at_once = most if saved is None else min(saved, most)
        if at_once is None:
            return f"{size}, all of them kept (checkpoint.keep=null)"
        kept = f"checkpoint.keep={'null' if settings.keep is None else settings.keep}"
        return f"{size}, at most {at_once:,} at once ({kept}), {units.size(at_once * checkpoint)} in all"

    def utilization(self, device_name: str, precision: Precision, flops: float | None) -> str:
        """The definition of MFU: model FLOPs over the peak; published figures differ in their count of attention."""
        peak = peak_flops(device_name, precision.parameter)
        if peak is None:
            kind = "CPU" if device_name.startswith("cpu") else "device"
            return f"not shown: the peak FLOP/s of this {kind} is unknown"
        if flops is None:
            return _UNKNOWN
        is_half = self.config.model.causal and not self.config.model.is_own
        counted = "causal attention counts half" if is_half else "with all of attention"
        return f"of {peak / 1e12:,.1f} TFLOP/s; {units.count(flops)} FLOPs per token, forward and backward, {counted}"

    def host_memory(self) -> _Rows:
        """The memory of all ranks on this machine's CPU, and what the machine has available."""
        ranks = range(self.layout.world)
        needed = memory_of_machine(self.config, self.layout, ranks)
        available = hardware.available_memory()
        if needed is None or available is None:
            return []
        state, expected = needed
        expected += self.layout.world * _PROCESS_BYTES
        scope = " on each" if self.layout.world > 1 else ""
        text = (
            f"{units.size(expected)} expected for {units.counted(self.layout.world, 'rank')} on one machine, with "
            f"{_PYTHON_AND_TORCH}{scope}; this one has {units.size(available)} available"
        )
        if state > available:
            text += f", less than parameters, gradients and optimizer need ({units.size(state)}): training is refused "
            text += "here"
        elif expected > available:
            text += ", which is too little: the system may kill a rank here"
        if expected > available:
            from shardwise.estimates.memory_choice import remedies_of_machine

            text += f". What would help: {remedies_of_machine(self.config, self.layout, ranks)}"
        return [("host memory", text)]

    def when_saved(self, step_seconds: float | None) -> str:
        """The times at which checkpoints are saved; `step_seconds`: predicted time of a step, if it is known."""
        settings = self.config.checkpoint
        times = []
        if settings.every:
            taken = "" if step_seconds is None else f" (about {units.duration(settings.every * step_seconds)})"
            times.append(f"every {units.counted(settings.every, 'step')}{taken}")
        if settings.every_minutes is not None:
            is_one = settings.every_minutes == 1
            times.append("every minute" if is_one else f"every {settings.every_minutes:,g} minutes")
        times.append("after the last step")
        copied = settings.memory_every
        copies = f"; copies in memory every {units.counted(copied, 'step')}" if copied else ""
        return f"{listing(times)}{copies}"

    def advice(self, precision: Precision) -> str:
        """Advice where this processor would train faster in another precision; empty where it would not."""
        unit = None if self.accelerator else hardware.bfloat16_unit()
        if unit and precision.parameter == "float32":
            return f"; this processor has {unit}: precision.mode=mixed is faster"
        if unit == "" and precision.parameter == "bfloat16":
            return "; this processor does not multiply bfloat16: precision.mode=float32 is faster"
        return ""


def _parameters_text(model: ModelConfig) -> str:
    count = parameter_counts.parameter_count(model)
    if count is None or model.is_own:
        return _UNKNOWN
    shown = f"{units.count(count)} ({count:,})"
    if not model.is_sparse:
        return shown
    return f"{shown}, {units.count(parameter_counts.active_parameter_count(model) or 0)} of them active"


def _rate_curve(optimizer: OptimizerConfig, last: int) -> list[str]:
    """Draw the learning rate of each step of the whole schedule, from 0 up, in lines of blocks."""
    width = min(last, _CURVE_WIDTH)
    steps = [1 + column * (last - 1) // max(1, width - 1) for column in range(width)]
    rates = [learning_rate(optimizer, last, step) for step in steps]
    largest = max(rates)
    if not largest:
        return []
    lines = []
    for row in reversed(range(_CURVE_HEIGHT)):
        eighths = [round(8 * (_CURVE_HEIGHT * rate / largest - row)) for rate in rates]
        blocks = "".join(_BLOCKS[min(8, max(0, height))] for height in eighths)
        lines.append(f"{f'{largest:.2e}' if row == _CURVE_HEIGHT - 1 else '':>9} │{blocks}")
    end = f"step {last:,}: {rates[-1]:.2e}"
    return [*lines, f"{'0':>9} └ 1{end:>{max(width - 2, len(end) + 1)}}"]


def _numbers(precision: Precision) -> str:
    rounding = ", rounded stochastically" if precision.rounding == "stochastic" else ""
    moments = f", moments {precision.moments}" if precision.moments != precision.optimizer else ""
    return rounding + moments


def _named(stages: list[LayoutStage]) -> str:
    """`stages 0 and 4 (blocks 0-1 and 8-9, embedding)`."""
    embedding = ", embedding" if any(stage.is_first for stage in stages) else ""
    head = ", head" if any(stage.is_last for stage in stages) else ""
    plural = "s" if len(stages) > 1 else ""
    numbers = listing(stage.index for stage in stages)
    return f"stage{plural} {numbers} (blocks {listing(stage.block_range for stage in stages)}{embedding}{head})"


def _token_flops(config: Config) -> float | None:
    length = config.train.sequence_length
    return flops_per_token(config.model, length, config.data.predictions(length))


def _recompute(workload: RankWorkload, token_flops: float) -> str:
    """The part that is computed again, and its FLOPs if it has matrix products."""
    config = workload.config
    fused = not workload.attends_step_by_step
    cheap = "norms, activations and rotary positions" if workload.model.rotary_dim else "norms and activations"
    if config.recompute == "selective" and fused:
        return f"{cheap}, no matrix product"
    part = "each block" if config.recompute == "full" else f"{cheap}, and the attention core"
    flops = recomputed_flops_per_token(
        config.model, config.train.sequence_length, config.recompute, fused_attention=fused
    )
    assert flops is not None, "the shapes of the model are known"
    return f"{part}: {units.count(flops)} FLOPs per token more ({flops / token_flops:+.1%})"
