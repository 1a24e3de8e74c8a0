"""What a run is and costs by the formulas of `cost`, as rows of text: in a dry run and at a run's start.

Imports no torch, which a dry run does without.

What a pipeline does before it starts: its schedule as a picture, and each pipeline rank's part of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwise.base import units
from shardwise.base.errors import listing
from shardwise.base.hardware import available_memory, bfloat16_unit, peak_flops
from shardwise.config import Config, Layout, Precision, dump_yaml
from shardwise.config.stages import Stage
from shardwise.models.parameter_counts import canonical_tensor_count, local_parameter_count, parameter_count
from shardwise.pipeline import schedule_picture as picture
from shardwise.pipeline.partition import compute_shares, stage_plan
from shardwise.pipeline.schedule_picture import MOST_ROWS, ranks_left_out, shortened
from shardwise.pipeline.timeline import bubble, simulate
from shardwise.planner.communication import step_transfers, wire_bytes
from shardwise.planner.memory import (
    checkpoint_bytes,
    expected_memory,
    invariant_dropout,
    memory_by_rank,
    memory_of_machine,
    neediest_rank,
)
from shardwise.planner.rank_case import flops_per_token, recomputed_flops_per_token
from shardwise.train.memory_remedies import remedies_of_machine

if TYPE_CHECKING:
    from shardwise.planner.device_specs import Cluster  # costly to import, for a cluster alone

_UNKNOWN = "not known for a model of your own"

_Rows = list[tuple[str, str]]


def dry_run(
    recipe: str,
    config: Config,
    layout: Layout,
    device: str,
    accelerator: bool,
    inputs: Sequence[tuple[str, str]] = (),
    cluster: Cluster | None = None,
) -> str:
    """The resolved configuration as YAML, and what follows from it as comments: the text can be saved as a recipe.

    `inputs` are rows about data and tokenizer; `cluster` is one that is not here, of whose device this tells.
    """
    here = f"{device}, as this machine has: precision and memory are those of such ranks"
    rows = [
        *_work(config, layout, here if cluster is None else f"{cluster}, as --device names it", accelerator),
        *([] if cluster is None else predicted_rows(config, layout, cluster)),
        *_pipeline(config, layout, accelerator),
        *_compute(config),
        *_dropout(config, layout, accelerator),
        *_needs(config, layout, accelerator),
        *([] if accelerator or cluster is not None else _host_memory(config, layout)),
        *inputs,
    ]
    comments = "\n".join(f"# {name:<14} {value}" for name, value in rows)
    return f"# {recipe}, as resolved; nothing was started\n{dump_yaml(config.recorded())}\n{comments}"


def _work(config: Config, layout: Layout, device: str, accelerator: bool) -> _Rows:
    train = config.train
    step_tokens = train.global_batch * train.sequence_length
    parameters, known = parameter_count(config.model), _UNKNOWN
    if parameters is not None:
        most = units.count(max(count or 0 for _, count in stages_of_ranks(config, layout)))
        held = "held by each rank" if layout.pipeline == 1 else "held by a rank at most"
        known = f"{units.count(parameters)} ({parameters:,}), {most} {held}"
    stop = f"; this run stops after {train.stop_after:,}" if train.stop_after is not None else ""
    precision = config.precision.resolved(accelerator)
    return [
        (
            "layout",
            f"{layout.product()}, sequence parallelism (SP) {'on' if layout.sequence_parallel else 'off'}, ZeRO-{config.optimizer.zero}",
        ),
        ("device", device),
        ("batch", _batch(config, layout)),
        ("steps", f"{train.steps:,}{stop}"),
        ("tokens", f"{step_tokens:,} per step, {step_tokens * train.steps:,} in all"),
        ("parameters", known),
        (
            "precision",
            f"parameters {precision.parameter}, gradients {precision.gradient}, reduction {precision.reduce}, "
            f"optimizer {precision.optimizer}{_rounding(precision)}",
        ),
        ("optimizer", _optimizer(config)),
    ]


def predicted_rows(config: Config, layout: Layout, cluster: Cluster) -> _Rows:
    """The time of a step on a cluster, what it is spent on, and whether the memory is enough."""
    from shardwise.planner.search import RESERVED, predicted  # costly to import, for a cluster alone

    plan = predicted(config, layout, cluster)
    if plan is None:
        return [("time", _UNKNOWN)]
    time, need, most = plan.time, plan.memory.total, cluster.device.memory
    shares = sorted(time.rows(), key=lambda row: -row[1])
    parts = ", ".join(f"{part.replace('_', ' ')} {seconds / time.total:.0%}" for part, seconds in shares)
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    hours = f"{plan.seconds * cluster.world / 3600:,.0f} device-hours"
    fits = f"{units.size(plan.headroom)} free" if plan.headroom >= 0 else f"does not fit: {units.size(need)} are needed"
    return [
        ("step", f"{units.duration(time.total)} predicted, {plan.tokens_per_second:,.0f} tokens/s{mfu}"),
        ("  parts", parts),
        ("  all steps", f"{units.duration(plan.seconds)}, {hours}"),
        ("  fits", f"{fits} of {units.size(most)} on each device, of which {RESERVED:.0%} are its own"),
    ]


def _advice(precision: Precision, accelerator: bool) -> str:
    """Whether this processor would train faster in another precision."""
    unit = None if accelerator else bfloat16_unit()
    if unit and precision.parameter == "float32":
        return f"; this processor has {unit}: precision.mode=mixed is faster"
    if unit == "" and precision.parameter == "bfloat16":
        return "; this processor does not multiply bfloat16: precision.mode=float32 is faster"
    return ""


def _rounding(precision: Precision) -> str:
    return ", rounded stochastically" if precision.rounding == "stochastic" else ""


def _batch(config: Config, layout: Layout) -> str:
    train = config.train
    return (
        f"{train.micro_batch} micro batch × {layout.accumulation(train)} accumulation × {layout.data} DP "
        f"= {train.global_batch} global batch"
    )


def stages_of_ranks(config: Config, layout: Layout) -> list[tuple[list[Stage], int | None]]:
    """The stages of each pipeline rank, and the elements of their parameters with padding; None if not known."""
    plan, multiple = stage_plan(config, layout), config.parallel.vocab_multiple
    by_rank = ([stage for stage in plan if stage.rank == rank] for rank in range(layout.pipeline))
    return [
        (stages, local_parameter_count(config.model, layout.tensor, vocab_multiple=multiple, stages=stages))
        for stages in by_rank
    ]


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
    parallel, micro_batches = config.parallel, layout.accumulation(config.train)
    shown = f"{parallel.schedule}, {layout.stages} stages, {micro_batches} micro-batches: bubble"
    formula = bubble(parallel, micro_batches)
    if formula is None:
        simulated = simulate(parallel, micro_batches, config.train.recompute).bubble
        return (
            f"{shown} {simulated:.1%} by its order of work, where stages are equal and a forward pass takes as long as "
            "each half of a backward pass"
        )
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
    first, last = stage.layers[0], stage.layers[-1]
    return f"{first}" if first == last else f"{first}-{last}"


def _optimizer(config: Config) -> str:
    tensors = canonical_tensor_count(config.model)
    every_tensor = "each tensor" if tensors is None else f"each of {tensors:,} tensors"
    return config.optimizer.spec.summary.format(tensors=every_tensor)


def _compute(config: Config) -> _Rows:
    train = config.train
    predictions = config.data.predictions(train.sequence_length)
    token_flops = flops_per_token(config.model, train.sequence_length, predictions)
    again = recomputed_flops_per_token(config.model, train.sequence_length, train.recompute)
    if token_flops is None or again is None:
        return [("compute", _UNKNOWN)]
    tokens = train.global_batch * train.sequence_length * train.steps
    total = units.count(token_flops * tokens)
    rows = [("compute", f"{units.count(token_flops)} FLOPs per token, {total} FLOPs in all")]
    if train.recompute != "none":
        what = "the attention core" if train.recompute == "selective" else "each block"
        share = again / token_flops
        rows.append(("recompute", f"{what}: {units.count(again)} FLOPs per token more ({share:+.1%})"))
    return rows


def _dropout(config: Config, layout: Layout, accelerator: bool) -> _Rows:
    """The price of dropout masks that do not depend on the layout; no rows where there are none."""
    rank, same = _neediest(config, layout, accelerator)
    masks = invariant_dropout(config, layout, accelerator, pipeline_rank=rank)
    if masks is None:
        return []
    fast = config.model_copy(update={"train": config.train.model_copy(update={"dropout_mode": "fast"})})
    totals = [expected_memory(chosen, layout, accelerator) for chosen in (config, fast)]
    more = totals[0].total - totals[1].total if totals[0] and totals[1] else 0
    peak = f"{units.size(more)} above the peak of fast dropout" if more else "at the same peak as fast dropout"
    held = f"{units.size(masks.bytes_held)} of attention probabilities and masks on {same}"
    unfused = "; attention step by step, by no fused kernel" if masks.attends_step_by_step else ""
    return [
        ("dropout", f"layout-invariant: {held}, {peak}"),
        ("  time", f"{units.count(masks.elements_hashed)} elements of masks hashed by {same} per step{unfused}"),
    ]


def _neediest(config: Config, layout: Layout, accelerator: bool) -> tuple[int, str]:
    """The pipeline rank that needs most memory, and how a row names it."""
    rank = neediest_rank(config, layout, accelerator)
    return rank, f"pipeline rank {rank}" if layout.pipeline > 1 else "each rank"


def _memory(total: int, layout: Layout, rank: str) -> str:
    most = f"{rank}, which needs most" if layout.pipeline > 1 else rank
    return f"{units.size(total)} expected on {most}, beside Python and torch"


def _needs(config: Config, layout: Layout, accelerator: bool) -> _Rows:
    """Memory, disk and communication; in a pipeline those of the pipeline rank that needs most memory."""
    rank, same = _neediest(config, layout, accelerator)
    memory = expected_memory(config, layout, accelerator, pipeline_rank=rank)
    wire = wire_bytes(step_transfers(config, layout, accelerator, pipeline_rank=rank))
    checkpoint = checkpoint_bytes(config, accelerator)
    if memory is None or wire is None or checkpoint is None:
        return [(name, _UNKNOWN) for name in ("memory", "disk", "communication")]
    rows = [("memory", _memory(memory.total, layout, same))]
    rows += [(f"  {kind}", units.size(size)) for kind, size in memory.rows()]
    rows.append(("disk", _disk(config, checkpoint)))
    rows.append(("communication", f"{units.size(sum(wire.values()))} sent by {same} per step"))
    rows += [(f"  {axis}", f"{units.size(size)} {kind.replace('_', '-')}") for (axis, kind), size in wire.items()]
    return rows


def _host_memory(config: Config, layout: Layout) -> _Rows:
    """The memory of all ranks on this machine's CPU, and what the machine has available."""
    ranks = range(layout.world)
    needed, available = memory_of_machine(config, layout, ranks), available_memory()
    if needed is None or available is None:
        return []
    state, expected = needed
    text = (
        f"{units.size(expected)} expected for {units.counted(layout.world, 'rank')} on one machine; this one has "
        f"{units.size(available)} available"
    )
    if state > available:
        text += f", less than parameters, gradients and optimizer need ({units.size(state)}): training is refused here"
    elif expected > available:
        text += ", which is too little: the system may kill a rank here"
    if expected > available:
        text += f". What would help: {remedies_of_machine(config, layout, ranks)}"
    return [("host memory", text)]


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
    steps, settings = config.train.steps, config.checkpoint
    every, keep_every = settings.every or steps, settings.keep_every
    saved = steps // every + (steps % every > 0) if settings.every_minutes is None else None
    if settings.keep is None:
        return saved
    stay = 0
    if keep_every is not None:
        ending = steps % keep_every == 0 and steps % every > 0
        stay = steps // math.lcm(every, keep_every) + ending if saved is not None else steps // keep_every
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
    """What a run prints at its start.

    Args:
        parameters: their number in the whole model.
        memory: expected bytes by kind on the rank that needs most; of a model of the user's own without activations.
        steps: those done by earlier runs, and the last one of this run.
        epochs: how often the training reads its data; empty if that is not told.
    """
    train, (before, end) = config.train, steps
    samples = train.steps * train.global_batch
    tokens = samples * train.sequence_length
    begin = f", {before:,} of them done" if before else ""
    stop = "" if end == train.steps else f", this run stops at {end:,}"
    sequence = " + sequence" if layout.sequence_parallel else ""
    roles = {"gradient": precision.gradient, "reduce": precision.reduce, "optimizer": precision.optimizer}
    others = "".join(f", {role} {dtype}" for role, dtype in roles.items() if dtype != precision.parameter)
    accelerator = not device_name.startswith("cpu")
    rank, same = _neediest(config, layout, accelerator)
    parts = ", ".join(f"{name} {units.size(size)}" for name, size in memory.items() if size)
    known = f"{_memory(sum(memory.values()), layout, same)}: {parts}"
    if config.shapes is None:
        known = f"{parts} on each rank; activations are not known for a model of your own"
    rows = [
        ("model", f"{config.model.family}, {units.count(parameters)} parameters ({parameters:,})"),
        ("steps", f"{train.steps:,}{begin}{stop}"),
        ("samples", f"{samples:,} × {train.sequence_length:,} tokens = {tokens:,} tokens{epochs and f', {epochs}'}"),
        ("batch", _batch(config, layout)),
        (
            "layout",
            f"{layout.product(after_tensor=sequence)}, ZeRO-{config.optimizer.zero}",
        ),
        (
            "device",
            f"{device_name}, {precision.parameter}{others}{_rounding(precision)}{_advice(precision, accelerator)}",
        ),
        ("memory", known),
    ]
    masks = invariant_dropout(config, layout, accelerator, pipeline_rank=rank)
    if masks is not None:
        price = (
            f"layout-invariant: {units.size(masks.bytes_held)} of probabilities and masks on {same}, "
            f"{units.count(masks.elements_hashed)} elements hashed by {same} per step"
        )
        rows.append(("dropout", price))
    return [*rows, ("MFU", _utilization(config, device_name, precision)), ("run", str(run_path))]


def _utilization(config: Config, device_name: str, precision: Precision) -> str:
    """What MFU will be: model FLOPs over the peak; published figures differ by how they count attention."""
    length = config.train.sequence_length
    flops = flops_per_token(config.model, length, config.data.predictions(length))
    if flops is None:
        return "not known for a model of your own"
    counted = "half of attention, as the mask is causal" if config.model.causal else "all of attention"
    peak = peak_flops(device_name, precision.parameter)
    over = "not known, as the peak of this device is not" if peak is None else f"over {peak / 1e12:,.1f} TFLOP/s"
    return f"{units.count(flops)} FLOPs a token, forward and backward, with {counted}; {over}"


_PLAIN_WIDTH = 120


def schedule_picture(config: Config, layout: Layout, width: int) -> list[Text]:
    """The picture of `pipeline/schedule_picture.py` of a run."""
    return picture.schedule_picture(config.parallel, layout.accumulation(config.train), config.train.recompute, width)


def rank_table(config: Config, layout: Layout, accelerator: bool) -> list[tuple[str, str, str, str, str]]:
    """For each pipeline rank: its name, its global ranks, its blocks by stage, its parameters, its activations."""
    memory, stages_of = memory_by_rank(config, layout, accelerator) or [], stages_of_ranks(config, layout)
    rows = [
        (
            f"pp {rank}",
            layout.ranks_of(rank),
            "blocks " + " and ".join(map(blocks_of, stages)),
            f"{units.count(parameters or 0)} parameters",
            f"{units.size(estimate.activations)} activations",
        )
        for rank, (estimate, (stages, parameters)) in enumerate(zip(memory, stages_of, strict=True))
    ]
    return shortened(rows, MOST_ROWS, lambda count: (ranks_left_out(count), "", "", "", ""))


def print_pipeline(console: Console, config: Config, layout: Layout, accelerator: bool) -> None:
    """Print the picture and the table: in a box on a terminal, elsewhere as plain lines."""
    rows = rank_table(config, layout, accelerator)
    if not console.is_terminal:
        for line in schedule_picture(config, layout, _PLAIN_WIDTH):
            console.print(Text(line.plain.rstrip()), soft_wrap=True)
        for row in rows:
            console.print(Text("  ".join(row).rstrip()), soft_wrap=True)
        return
    columns = Table.grid(padding=(0, 2))
    for row in rows:
        columns.add_row(*row)
    picture = Group(*schedule_picture(config, layout, console.width - 4), columns)
    console.print(Panel(picture, title="pipeline", title_align="left", border_style="dim", expand=False))
