"""The summary of a run as rows of text, with its cost by the formulas of `planner`: in a dry run and at a run's start.

The rows tell batch, layout, parameters, compute, memory, disk and communication. Imports no torch, which a dry run does
without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.base import hardware, units
from shardwise.base.errors import listing
from shardwise.config import Config, Layout, Precision, dump_yaml, stages_of, tokens_of_run
from shardwise.config.layout import Stage
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.device_peaks import peak_flops
from shardwise.estimates.memory import (
    checkpoint_bytes,
    expected_memory,
    invariant_dropout,
    memory_by_rank,
    memory_of_machine,
    neediest_rank,
    offloaded_bytes,
)
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.models import parameter_counts
from shardwise.optim.learning_rate import rate_at, schedule_points
from shardwise.pipeline.partition import compute_shares, stage_plan
from shardwise.pipeline.timeline import bubble, simulate
from shardwise.train.memory_remedies import remedies_of_machine

_CURVE_WIDTH, _CURVE_HEIGHT = 64, 5
_BLOCKS = " ▁▂▃▄▅▆▇█"
_UNKNOWN = "not known for a model of your own"
_PROCESS_BYTES = 300 * 2**20
"""Python and torch in a process on a CPU: 260 MiB after all imports with torch 2.11, and its process group."""
_PYTHON_AND_TORCH = f"about {units.size(_PROCESS_BYTES)} for Python and torch"

_Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class PredictedStep:
    """The prediction for machines that need not be here.

    Attributes:
        cluster: the machines in words.
        rows: rows on the time of a step, its parts, and the memory that is left or lacks.
        seconds: time of a step; None if it is not known.
    """

    cluster: str
    rows: Sequence[tuple[str, str]]
    seconds: float | None


def dry_run(
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
) -> str:
    """What follows from a configuration as comments, then its keys as YAML: the text can be saved as a recipe.

    Args:
        device: kind of this machine's devices.
        accelerator: the ranks of the run have accelerators.
        inputs: rows about data and tokenizer.
        predicted: prediction for other machines; None for this machine.
        continued: rows about the run that the folder holds.
        full: show every key, not only those that differ from their defaults.
        recipe_config: configuration whose keys are shown, without choices by memory; None: `config`.
    """
    hint = "" if accelerator else "; use --device h100:8 to size for GPUs"
    shown_device = f"{device} (this machine){hint}" if predicted is None else f"{predicted.cluster} (--device)"
    rows = [*continued, *_work(config, layout, shown_device, accelerator)]
    if predicted is not None:
        rows += predicted.rows
    rows += _pipeline(config, layout, accelerator)
    rows += _window(config)
    rows += _compute(config, layout, accelerator)
    rows += _dropout(config, layout, accelerator)
    rows += _needs(config, layout, accelerator)
    rows.append(("checkpoints", _when_saved(config, None if predicted is None else predicted.seconds)))
    if predicted is None and not accelerator:
        rows += _host_memory(config, layout)
    rows += inputs
    lines = [f"{recipe}: a dry run, nothing was started", "", *(f"{name:<14} {value}" for name, value in rows)]
    lines += ["", f"learning rate: {config.optimizer.schedule}", *_rate_curve(config)]
    comments = "\n".join(f"# {line}".rstrip() for line in lines)
    recorded = (recipe_config or config).recorded()
    if full:
        return f"{comments}\n\n# all keys\n{dump_yaml(recorded)}".rstrip()
    differing = config.run.without_defaults(recorded)
    if config.data.key != "data.dataset":
        # That of the recipe, in whose place other data are read.
        differing.get("data", {}).pop("dataset", None)
    return f"{comments}\n\n# keys that differ from their defaults (--full shows all)\n{dump_yaml(differing)}".rstrip()


def _rate_curve(config: Config) -> list[str]:
    """Draw the learning rate of each step of the whole schedule, from 0 up, in lines of blocks."""
    last = config.train.steps
    width = min(last, _CURVE_WIDTH)
    points = schedule_points(config)
    rates = [rate_at(points, 1 + column * (last - 1) // max(1, width - 1)) for column in range(width)]
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


def _work(config: Config, layout: Layout, device: str, accelerator: bool) -> _Rows:
    train = config.train
    step_tokens = train.global_batch * train.sequence_length
    parameters = parameter_counts.parameter_count(config.model)
    shown_parameters = f"{_UNKNOWN}: a dry run does not call its constructor"
    if parameters is not None:
        most = units.count(max(count or 0 for _, count in stages_of_ranks(config, layout)))
        share = "held by each rank" if layout.pipeline == 1 else "held by a rank at most"
        shown_parameters = f"{units.count(parameters)} ({parameters:,}), {most} {share}"
    # stop_after ends one run of a training that several jobs share.
    stop = f"; this run stops after {train.stop_after:,}" if train.stop_after is not None else ""
    precision = config.precision.resolved(accelerator)
    return [
        (
            "layout",
            f"{layout.product()}{_sharding(config, layout, accelerator)}",
        ),
        ("device", device),
        ("batch", _batch(config, layout)),
        ("steps", f"{train.steps:,}{stop}"),
        *_stages(config),
        ("tokens", f"{step_tokens:,} per step, {tokens_of_run(config):,} in all"),
        ("parameters", shown_parameters),
        (
            "precision",
            f"parameters {precision.parameter}, {_products(config)}gradients {precision.gradient}, reduction "
            f"{precision.reduce}, "
            f"optimizer {precision.optimizer}{_rounding(precision)}{_moments(precision)}",
        ),
        ("optimizer", _optimizer(config)),
    ]


def _stages(config: Config) -> _Rows:
    """The sequences of each stretch of steps, of a run whose stages change them; no rows for another one."""
    stages = stages_of(config)
    if len(stages) == 1:
        return []
    shown = [
        f"{stage.train.global_batch:,} × {stage.train.sequence_length:,} tokens up to step {stage.last_step:,}"
        for stage in stages
    ]
    return [("stages", f"{', '.join(shown)}; the other rows are of the neediest")]


def _advice(precision: Precision, accelerator: bool) -> str:
    """Advice where this processor would train faster in another precision; empty where it would not."""
    unit = None if accelerator else hardware.bfloat16_unit()
    if unit and precision.parameter == "float32":
        return f"; this processor has {unit}: precision.mode=mixed is faster"
    if unit == "" and precision.parameter == "bfloat16":
        return "; this processor does not multiply bfloat16: precision.mode=float32 is faster"
    return ""


def _products(config: Config) -> str:
    return "" if config.precision.matmul is None else f"products of blocks {config.precision.matmul}, "


def _rounding(precision: Precision) -> str:
    return ", rounded stochastically" if precision.rounding == "stochastic" else ""


def _moments(precision: Precision) -> str:
    return f", moments {precision.moments}" if precision.moments != precision.optimizer else ""


def _sharding(config: Config, layout: Layout, accelerator: bool) -> str:
    """The stage of ZeRO after a comma, with a remark if one above 1, which is chosen on purpose, has nothing to cut.

    One rank has nothing to cut either, and stage 1, the default, is left out.
    """
    optimizer = config.optimizer
    text = optimizer.sharding_text(config.parallel.replicate)
    idle = [f"optimizer.{key}" for key in optimizer.idle_keys]
    if config.parallel.replicate > 1 and not optimizer.zero:
        idle.append("parallel.replicate")
    if idle:
        text += f", {listing(idle)} without effect"
    if optimizer.offload and not accelerator:
        text += ", optimizer.offload without effect on a CPU"
    if optimizer.zero > 1 and layout.replicas == 1:
        text += ", no effect with DP 1"
    return "" if layout.world == 1 and text == "ZeRO-1" else f", {text}"


def _batch(config: Config, layout: Layout) -> str:
    train = config.train
    return (
        f"{train.micro_batch} micro batch × {layout.accumulation(train)} accumulation × {layout.data} DP "
        f"= {train.global_batch} global batch"
    )


def stages_of_ranks(config: Config, layout: Layout) -> list[tuple[list[Stage], int | None]]:
    """The stages of each pipeline rank, and the elements of their parameters with padding; None if not known."""
    plan = stage_plan(config, layout)
    multiple = config.parallel.vocab_multiple
    by_rank = []
    for rank in range(layout.pipeline):
        stages = [stage for stage in plan if stage.rank == rank]
        count = parameter_counts.local_parameter_count(
            config.model, layout.tensor, vocab_multiple=multiple, stages=stages
        )
        by_rank.append((stages, count))
    return by_rank


def _pipeline(config: Config, layout: Layout, accelerator: bool) -> _Rows:
    """The schedule with its bubble, and each pipeline rank's part of the model; no rows without a pipeline."""
    memory = memory_by_rank(config, layout, accelerator)
    if layout.pipeline == 1 or memory is None:
        return []
    shares = compute_shares(config, layout)
    rows = [("pipeline", _schedule(config, layout))]
    for rank, (needed, (stages, count)) in enumerate(zip(memory, stages_of_ranks(config, layout), strict=True)):
        text = (
            f"{layout.ranks_of(rank)}, {_named(stages)}: {units.count(count or 0)} parameters, "
            f"{sum(shares[stage.index] for stage in stages):.1%} of the compute, "
            f"{units.size(needed.activations)} of activations, {units.size(needed.total)} in all"
        )
        rows.append((f"  pp {rank}", text))
    return rows


def _schedule(config: Config, layout: Layout) -> str:
    """The schedule and its bubble, by a formula or, where there is none, by a simulation of the schedule."""
    parallel = config.parallel
    micro_batches = layout.accumulation(config.train)
    shown = f"{parallel.schedule}, {layout.stages} stages, {micro_batches} micro-batches: bubble"
    formula = bubble(parallel, micro_batches)
    if formula is None:
        simulated = simulate(parallel, micro_batches, config.recompute).bubble
        return (
            f"{shown} {simulated:.1%} by its order of work, where stages are equal and a forward pass takes as long as "
            "each half of a backward pass"
        )
    # p ranks, m micro-batches, v stages on each rank: p - 1 slots are idle while the pipeline fills and drains.
    chunks = "v·m" if layout.virtual > 1 else "m"
    return f"{shown} {formula:.1%} where stages are equal, (p-1) / ({chunks}+p-1)"


def _named(stages: list[Stage]) -> str:
    """`stages 0 and 4 (blocks 0-1 and 8-9, embedding)`."""
    embedding = ", embedding" if any(stage.is_first for stage in stages) else ""
    head = ", head" if any(stage.is_last for stage in stages) else ""
    plural = "s" if len(stages) > 1 else ""
    numbers = listing(stage.index for stage in stages)
    return f"stage{plural} {numbers} (blocks {listing(map(blocks_of, stages))}{embedding}{head})"


def blocks_of(stage: Stage) -> str:
    """The blocks of a stage: `4-7`, or `4`."""
    first = stage.layers[0]
    last = stage.layers[-1]
    return f"{first}" if first == last else f"{first}-{last}"


def _optimizer(config: Config) -> str:
    tensors = parameter_counts.canonical_tensor_count(config.model)
    counted_tensors = "each tensor" if tensors is None else f"each of {tensors:,} tensors"
    return config.optimizer.spec.summary.format(tensors=counted_tensors)


def _window(config: Config) -> _Rows:
    """The window of attention, with a remark if it is too long to hide anything; no rows where there is none."""
    if config.shapes is None:
        return []
    layers = config.shapes.num_hidden_layers
    windows = [window for layer in range(layers) if (window := config.shapes.window(layer)) is not None]
    if not windows:
        return []
    length = config.train.sequence_length
    remark = ""
    if windows[0] >= length:
        remark = f", which hides nothing: train.sequence_length is {length:,}"
    return [("attention", f"a window of {windows[0]:,} keys in {len(windows)} of {layers} blocks{remark}")]


def _compute(config: Config, layout: Layout, accelerator: bool) -> _Rows:
    train = config.train
    predictions = config.data.predictions(train.sequence_length)
    token_flops = parameter_counts.flops_per_token(config.model, train.sequence_length, predictions)
    workload = RankWorkload.of(config, layout, accelerator)
    if token_flops is None or workload is None:
        return [("compute", _UNKNOWN)]
    total = units.count(sum(map(_flops, stages_of(config))))
    rows = [("compute", f"{units.count(token_flops)} FLOPs per token, {total} FLOPs in all")]
    if config.recompute != "none":
        rows.append(("recompute", _recompute(workload, token_flops)))
    return rows


def _flops(stage: Config) -> float:
    """The FLOPs of all steps of a stage, of a model whose shapes are known."""
    train = stage.train
    length = train.sequence_length
    token_flops = parameter_counts.flops_per_token(stage.model, length, stage.data.predictions(length)) or 0.0
    return token_flops * (stage.last_step - stage.steps_before) * train.global_batch * length


def _recompute(workload: RankWorkload, token_flops: float) -> str:
    """What is computed again, and its FLOPs if it has matrix products."""
    config = workload.config
    fused = not workload.attends_step_by_step
    cheap = "norms, activations and rotary positions" if workload.model.rotary_dim else "norms and activations"
    if config.recompute == "selective" and fused:
        return f"{cheap}, no matrix product"
    part = "each block" if config.recompute == "full" else f"{cheap}, and the attention core"
    flops = parameter_counts.recomputed_flops_per_token(
        config.model, config.train.sequence_length, config.recompute, fused_attention=fused
    )
    assert flops is not None, "the shapes of the model are known"
    return f"{part}: {units.count(flops)} FLOPs per token more ({flops / token_flops:+.1%})"


def _dropout(config: Config, layout: Layout, accelerator: bool) -> _Rows:
    """The price of dropout masks that do not depend on the layout; no rows where there are none."""
    rank, rank_name = _neediest(config, layout, accelerator)
    masks = invariant_dropout(config, layout, accelerator, pipeline_rank=rank)
    if masks is None:
        return []
    fast = config.model_copy(update={"train": config.train.model_copy(update={"dropout_mode": "fast"})})
    memory = expected_memory(config, layout, accelerator)
    fast_memory = expected_memory(fast, layout, accelerator)
    peak = "at the same peak as fast dropout"
    # Masks may be live at another time than the peak of the step.
    if memory and fast_memory and memory.total != fast_memory.total:
        peak = f"{units.size(memory.total - fast_memory.total)} above the peak of fast dropout"
    masks_text = f"{units.size(masks.bytes_held)} of attention probabilities and masks on {rank_name}"
    unfused = "; attention step by step, by no fused kernel" if masks.attends_step_by_step else ""
    return [
        ("dropout", f"layout-invariant: {masks_text}, {peak}"),
        ("  time", f"{units.count(masks.elements_hashed)} elements of masks hashed by {rank_name} per step{unfused}"),
    ]


def _neediest(config: Config, layout: Layout, accelerator: bool) -> tuple[int, str]:
    """The pipeline rank that needs most memory, and its name in a row."""
    rank = neediest_rank(config, layout, accelerator)
    return rank, f"pipeline rank {rank}" if layout.pipeline > 1 else "each rank"


def _memory(total: int, layout: Layout, rank: str, accelerator: bool) -> str:
    where = f"on {rank}, which needs most" if layout.pipeline > 1 else "per rank"
    overhead = "the device's own context" if accelerator else _PYTHON_AND_TORCH
    return f"{units.size(total)} {where}, plus {overhead}"


def _needs(config: Config, layout: Layout, accelerator: bool) -> _Rows:
    """Memory, disk and communication; in a pipeline those of the pipeline rank that needs most memory."""
    rank, rank_name = _neediest(config, layout, accelerator)
    memory = expected_memory(config, layout, accelerator, pipeline_rank=rank)
    wire = wire_bytes(step_transfers(config, layout, accelerator, pipeline_rank=rank))
    checkpoint = checkpoint_bytes(config, accelerator)
    if memory is None or wire is None or checkpoint is None:
        return [(name, _UNKNOWN) for name in ("memory", "disk", "communication")]
    rows = [("memory", _memory(memory.total, layout, rank_name, accelerator))]
    rows += [(f"  {kind}", units.size(size)) for kind, size in memory.rows()]
    if offloaded := offloaded_bytes(config, layout, accelerator):
        rows.append(("host memory", f"{units.size(offloaded)} of masters, optimizer state and gradients for each rank"))
    rows.append(("disk", _disk(config, checkpoint)))
    rows.append(("communication", f"{units.size(sum(wire.values()))} sent by {rank_name} per step"))
    rows += [(f"  {axis}", f"{units.size(size)} {kind.replace('_', '-')}") for (axis, kind), size in wire.items()]
    return rows


def _host_memory(config: Config, layout: Layout) -> _Rows:
    """The memory of all ranks on this machine's CPU, and what the machine has available."""
    ranks = range(layout.world)
    needed = memory_of_machine(config, layout, ranks)
    available = hardware.available_memory()
    if needed is None or available is None:
        return []
    state, expected = needed
    expected += layout.world * _PROCESS_BYTES
    each = " on each" if layout.world > 1 else ""
    text = (
        f"{units.size(expected)} expected for {units.counted(layout.world, 'rank')} on one machine, with "
        f"{_PYTHON_AND_TORCH}{each}; this one has {units.size(available)} available"
    )
    if state > available:
        text += f", less than parameters, gradients and optimizer need ({units.size(state)}): training is refused here"
    elif expected > available:
        text += ", which is too little: the system may kill a rank here"
    if expected > available:
        text += f". What would help: {remedies_of_machine(config, layout, ranks)}"
    return [("host memory", text)]


def _when_saved(config: Config, step_seconds: float | None) -> str:
    """The times at which checkpoints are saved.

    Args:
        step_seconds: predicted time of a step; None if it is not known.
    """
    settings = config.checkpoint
    times = []
    if settings.every:
        taken = "" if step_seconds is None else f" (about {units.duration(settings.every * step_seconds)})"
        times.append(f"every {units.counted(settings.every, 'step')}{taken}")
    if settings.every_minutes is not None:
        times.append("every minute" if settings.every_minutes == 1 else f"every {settings.every_minutes:,g} minutes")
    times.append("after the last step")
    copies = f"; copies in memory every {units.counted(settings.memory_every, 'step')}" if settings.memory_every else ""
    return f"{listing(times)}{copies}"


def _disk(config: Config, checkpoint: int) -> str:
    """The size of one checkpoint, and of all that exist at once."""
    keep = config.checkpoint.keep
    size = f"{units.size(checkpoint)} for each checkpoint"
    at_once = _checkpoints_at_once(config)
    if at_once is None:
        return f"{size}, all of them kept (checkpoint.keep=null)"
    kept = f"checkpoint.keep={'null' if keep is None else keep}"
    return f"{size}, at most {at_once:,} at once ({kept}), {units.size(at_once * checkpoint)} in all"


def _checkpoints_at_once(config: Config) -> int | None:
    """The most checkpoints on disk, or None if not known. A new one is complete before an old one is removed."""
    steps = config.train.steps
    settings = config.checkpoint
    every = settings.every or steps
    keep_every = settings.keep_every
    # The last step is saved too, whatever its number. Saves by the clock are not known before.
    saved = steps // every + (steps % every > 0) if settings.every_minutes is None else None
    if settings.keep is None:
        return saved
    stay = 0
    if keep_every is not None:
        if saved is None:
            stay = steps // keep_every
        else:
            # Kept are saves whose step is a multiple of keep_every; the last step may be one without being due.
            is_last_extra = steps % keep_every == 0 and steps % every > 0
            stay = steps // math.lcm(every, keep_every) + is_last_extra
    most = settings.keep + stay + 1
    return most if saved is None else min(saved, most)


def start_rows(
    config: Config,
    layout: Layout,
    *,
    device_name: str,
    precision: Precision,
    parameters: int,
    memory: Mapping[str, int],
    steps: tuple[int, int],
    epochs: str,
    run_path: Path,
) -> _Rows:
    """The rows that a run prints at its start.

    Args:
        parameters: number of the whole model's parameters.
        memory: expected bytes by kind on the rank that needs most; for a user's own model without activations.
        steps: steps done by earlier runs, and the last step of this run.
        epochs: text on how often the training reads its data; empty if that is not known.
    """
    train = config.train
    steps_before, end = steps
    samples = (config.last_step - config.steps_before) * train.global_batch
    tokens = samples * train.sequence_length
    begin = f", {steps_before:,} of them done" if steps_before else ""
    roles = {"gradient": precision.gradient, "reduce": precision.reduce, "optimizer": precision.optimizer}
    other_dtypes = "".join(f", {role} {dtype}" for role, dtype in roles.items() if dtype != precision.parameter)
    accelerator = not device_name.startswith("cpu")
    rank, rank_name = _neediest(config, layout, accelerator)
    parts = ", ".join(f"{name} {units.size(size)}" for name, size in memory.items() if size)
    known = f"{_memory(sum(memory.values()), layout, rank_name, accelerator)}: {parts}"
    if config.shapes is None:
        known = f"{parts} on each rank; activations are not known for a model of your own"
    rows = [
        ("model", f"{config.model.family}, {units.count(parameters)} parameters ({parameters:,})"),
        ("steps", f"{train.steps:,}{begin}{_stop(config, end)}"),
        ("samples", f"{samples:,} × {train.sequence_length:,} tokens = {tokens:,} tokens{epochs and f', {epochs}'}"),
        ("batch", _batch(config, layout)),
        (
            "layout",
            f"{layout.product()}{_sharding(config, layout, accelerator)}",
        ),
        (
            "device",
            f"{device_name}, {precision.parameter}{other_dtypes}{_rounding(precision)}{_moments(precision)}"
            f"{_advice(precision, accelerator)}",
        ),
        *_window(config),
        ("memory", known),
    ]
    masks = invariant_dropout(config, layout, accelerator, pipeline_rank=rank)
    if masks is not None:
        price = (
            f"layout-invariant: {units.size(masks.bytes_held)} of probabilities and masks on {rank_name}, "
            f"{units.count(masks.elements_hashed)} elements hashed by {rank_name} per step"
        )
        rows.append(("dropout", price))
    return [*rows, ("MFU", _utilization(config, device_name, precision)), ("run", str(run_path))]


def _stop(config: Config, end: int) -> str:
    """The steps of the stage of a run that has several, and the last step of a run that does not do all steps."""
    stage = ""
    if config.run is not config:
        stage = f", {config.steps_before + 1:,} to {config.last_step:,} in this stage"
    return stage if end == config.train.steps else f"{stage}, this run stops at {end:,}"


def _utilization(config: Config, device_name: str, precision: Precision) -> str:
    """The definition of MFU: model FLOPs over the peak; published figures differ in their count of attention."""
    length = config.train.sequence_length
    flops = parameter_counts.flops_per_token(config.model, length, config.data.predictions(length))
    if flops is None:
        return "not known for a model of your own"
    peak = peak_flops(device_name, precision.parameter)
    if peak is None:
        kind = "CPU" if device_name.startswith("cpu") else "device"
        return f"not shown: the peak FLOP/s of this {kind} is unknown"
    counted = "causal attention counts half" if config.model.causal else "with all of attention"
    return f"of {peak / 1e12:,.1f} TFLOP/s; {units.count(flops)} FLOPs per token, forward and backward, {counted}"
