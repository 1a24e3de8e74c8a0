"""What a run would be and cost, as text: the closed forms of `cost` for one configuration and layout."""

from __future__ import annotations

from shardwise import cost, units
from shardwise.config import Config, Layout, dump_yaml


def dry_run(recipe: str, config: Config, layout: Layout, device: str, accelerator: bool) -> str:
    """The resolved configuration as YAML, what follows from it as comments: the whole can be saved as a recipe."""
    rows = [
        *_work(config, layout, device, accelerator),
        *_needs(config, layout, accelerator),
    ]
    comments = "\n".join(f"# {name:<14} {value}" for name, value in rows)
    return f"# {recipe}, as resolved; nothing was started\n{dump_yaml(config.model_dump())}\n{comments}"


def _work(config: Config, layout: Layout, device: str, accelerator: bool) -> list[tuple[str, str]]:
    train = config.train
    step_tokens = train.global_batch * train.sequence_length
    parameters = cost.parameter_count(config.model)
    local = cost.local_parameter_count(config.model, layout.tensor)
    token_flops = cost.flops_per_token(config.model, train.sequence_length)
    stop = f"; this run stops after {train.stop_after:,}" if train.stop_after is not None else ""
    precision = config.precision.resolved(accelerator)
    return [
        (
            "layout",
            f"TP {layout.tensor} × PP {layout.pipeline} × DP {layout.data} = {layout.world} "
            f"rank{'s' if layout.world > 1 else ''} ({device}), "
            f"sequence parallelism (SP) {'on' if layout.sequence else 'off'}, ZeRO-{config.optimizer.zero}",
        ),
        (
            "batch",
            f"{train.micro_batch} micro batch × {layout.accumulation(train)} accumulation × {layout.data} DP "
            f"= {train.global_batch} global batch",
        ),
        ("steps", f"{train.steps:,}{stop}"),
        ("tokens", f"{step_tokens:,} per step, {step_tokens * train.steps:,} in all"),
        ("parameters", f"{units.count(parameters)} ({parameters:,}), {units.count(local)} held by each rank"),
        (
            "precision",
            f"parameters {precision.parameter}, gradients {precision.gradient}, reduction {precision.reduce}, "
            f"optimizer {precision.optimizer}",
        ),
        (
            "compute",
            f"{units.count(token_flops)} FLOPs per token, "
            f"{units.count(token_flops * step_tokens * train.steps)} FLOPs in all",
        ),
    ]


def _needs(config: Config, layout: Layout, accelerator: bool) -> list[tuple[str, str]]:
    memory = cost.expected_memory(config, layout, accelerator)
    wire = cost.bytes_per_step(config, layout, accelerator)
    weights = cost.final_weights_bytes(config, accelerator)
    rows = [("memory", f"{units.size(memory.total)} expected on each rank, beside Python and torch")]
    rows += [(f"  {kind}", units.size(size)) for kind, size in memory.rows()]
    rows.append(("disk", f"{units.size(weights)} for the final weights"))
    rows.append(("communication", f"{units.size(sum(wire.values()))} sent by each rank per step"))
    rows += [(f"  {axis}", f"{units.size(size)} {kind.replace('_', '-')}") for (axis, kind), size in wire.items()]
    return rows
