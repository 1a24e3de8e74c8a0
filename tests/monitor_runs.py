"""Folders of runs as a training would leave them, with every field that is recorded; nothing is trained.

`write_run` is for tests: small, and each number follows from its arguments. `write_big` writes 1,024 ranks and 100,000
steps in a few seconds, for benchmarks.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.runs.folder import JsonLines, RunDirectory, json_text

FIRST = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""When the processes of a run start for the first time."""
BEFORE_TRAINING, BETWEEN_STARTS, LOADING = 10.0, 30.0, 2.0
"""Seconds from the start of the processes to the "start" event; from the end of a start to the processes of the next;
of loading a checkpoint, within the former."""
STEP_SECONDS, SAVING_SECONDS, COMPILING_SECONDS = 1.0, 0.5, 4.0
"""Seconds of a step, of which training waits for a checkpoint, and in which graphs are compiled."""
SPLIT = {"data": 0.02, "forward": 0.28, "backward": 0.5, "communication": 0.1, "optimizer": 0.06, "other": 0.04}
"""Shares of a step on rank 0."""
TOKENS, SAMPLES = 8192, 128
"""Of a step."""
FIRST_PID = 40_000
"""Of rank 0."""
DEVICE = "NVIDIA H100 80GB HBM3"
GIB = 2**30


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run: the degree along each axis, how many machines they are on, and sequence parallelism."""

    pp: int = 2
    dp: int = 2
    tp: int = 2
    nodes: int = 2
    sequence: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def place(self, rank: int) -> dict[str, int]:
        return {"pp": rank // (self.dp * self.tp), "dp": rank // self.tp % self.dp, "tp": rank % self.tp}

    def host(self, rank: int) -> str:
        return f"node-{rank * self.nodes // self.world:03d}"

    def local_rank(self, rank: int) -> int:
        return rank % (self.world // self.nodes)


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        after: steps that were done before, as the checkpoint says that it loads; 0 for a new training.
        until: the last step that it takes.
        reason: of its "stop" event; None where a kill left it no time to write one.
        mesh: its ranks, where they are not those of the whole run.
        changes: keys that differ from the start before, as its "resume" event names them.
    """

    after: int
    until: int
    reason: str | None = "finished"
    mesh: Mesh | None = None
    changes: tuple[str, ...] = ()


EXPERTS = {"expert_load_max": 2.5, "expert_idle": 0.125, "expert_entropy": 0.75, "balance_losses": {"switch": 0.0125}}
"""Numbers of the experts in each step."""


def loads_of(step: int, start: int) -> dict[str, list[int]]:
    """Loads of four experts in two blocks; the first block is balanced, and of the second one expert has no token."""
    return {"0": [25, 25, 25, 25], "1": [10 + step, 90 - step, 0, 20] if start else [0, 0, 120, 0]}


def loss_of(step: int) -> float:
    return 2.0 + 4.0 / math.sqrt(step)


def stamp(seconds: float) -> str:
    """A time as events have it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def write_run(
    path: Path,
    starts: Sequence[Start] = (Start(0, 20),),
    *,
    mesh: Mesh = Mesh(),
    steps: int | None = None,
    straggler: int | None = None,
    spike: int | None = None,
    losses: Mapping[int, float] = {},
    compiles: bool = False,
    checkpoint_every: int = 10,
    eval_every: int = 10,
    first: float = FIRST,
    experts: bool = False,
) -> Path:
    """Write a run and return its folder.

    Args:
        starts: of the run, in their order; the last one is as it left the folder.
        steps: of the whole training (default: the last step of the last start).
        straggler: a rank whose own work takes twice as long as that of others.
        spike: a step whose loss lies six standard deviations above the mean.
        losses: of single steps, where they are not `loss_of`; NaN too.
        compiles: whether each start compiles graphs.
        first: when its processes start, in seconds since the epoch.
        experts: whether its model is sparse: of `loads_of` a step.
    """
    directory = RunDirectory(path).create()
    whole = steps or starts[-1].until
    directory.write_config(_config(mesh, whole, checkpoint_every, eval_every))
    directory.write_environment({"shardwise": "0.1.0", "torch": "2.13.0"}, [DEVICE] * mesh.world, 64, ["shardwise"])
    directory.id()
    now = first
    with JsonLines(directory.metrics) as metrics:
        ranks = [JsonLines(directory.rank_metrics(rank)) for rank in range(mesh.world)]
        for number, start in enumerate(starts):
            began = now + BETWEEN_STARTS * (number > 0)
            now = began + BEFORE_TRAINING
            metrics.write(start_event(start.mesh or mesh, now, whole, start.after))
            for rank, file in enumerate(ranks):
                file.write(rank_start(mesh, rank, now))
            if start.after:
                metrics.write(_resume(now, start.after, start.changes))
            waited = {"data": 0.0, "checkpoint": 0.0}
            for step in range(start.after + 1, start.until + 1):
                if compiles and step == start.after + 1:
                    now += COMPILING_SECONDS
                    counts = {"graphs": 4, "hits": 1, "misses": 3, "seconds": COMPILING_SECONDS}
                    metrics.write({"event": "compile", "time": stamp(now), **counts})
                waited["data"] += SPLIT["data"] * STEP_SECONDS
                now += STEP_SECONDS
                event = step_event(step, now, waited, straggler=straggler, is_spike=step == spike)
                event |= EXPERTS if experts else {}
                if experts:
                    with JsonLines(directory.path / "experts.jsonl") as loads:
                        loads.write({"step": step, "loads": loads_of(step, number)})
                metrics.write(event | {"loss": losses.get(step, event["loss"])})
                if step == spike:
                    metrics.write(_warning(now, step, f"the loss of step {step} ({event['loss']:.4f}) is a spike"))
                for rank, file in enumerate(ranks):
                    file.write(rank_step(mesh, rank, step, now, 2.0 if rank == straggler else 1.0))
                if step % eval_every == 0:
                    loss = loss_of(step) + 0.1
                    found = {"loss": loss, "perplexity": math.exp(loss)}
                    metrics.write({"event": "eval", "time": stamp(now), "step": step, **found})
                if step % checkpoint_every == 0:
                    now += SAVING_SECONDS
                    waited["checkpoint"] += SAVING_SECONDS
                    metrics.write(_checkpoint(now, step))
            if start.reason is not None:
                metrics.write({"event": "stop", "time": stamp(now), "step": start.until, "reason": start.reason})
        for file in ranks:
            file.close()
    if starts[-1].reason == "finished":
        directory.write_results(
            {"parameters": 124_439_808, "steps": whole, "final_loss": loss_of(whole), "time_to_train_seconds": 20.0}
        )
    return path


def write_big(
    path: Path, *, ranks: int = 1024, steps: int = 100_000, tail: int = 64, first: float = FIRST, restarts: int = 3
) -> Path:
    """Write a long run of many ranks quickly, and return its folder.

    Of a rank's file the first line, the last "start" and the last `tail` steps are there; between them is a hole, as
    long as the lines of all other steps, which takes no room on the disk.
    """
    mesh = Mesh(pp=8, dp=max(1, ranks // 64), tp=8, nodes=max(1, ranks // 8)) if ranks >= 64 else Mesh(1, ranks, 1, 1)
    directory = RunDirectory(path).create()
    directory.write_config(_config(mesh, 2 * steps, 1000, 1000))
    directory.write_environment({"shardwise": "0.1.0", "torch": "2.13.0"}, [DEVICE] * mesh.world, 64, ["shardwise"])
    directory.id()
    waited = {"data": 0.0, "checkpoint": 0.0}
    model = _template(step_event(1, first, waited))
    began, length = first, steps // (restarts + 1)
    with directory.metrics.open("w", encoding="utf-8") as metrics:
        for number in range(restarts + 1):
            done = max(0, number * length - 100)  # each start but the first takes 100 steps again
            now = began + BEFORE_TRAINING
            metrics.write(json_text(start_event(mesh, now, 2 * steps, done)) + "\n")
            if done:
                metrics.write(json_text(_resume(now, done)) + "\n")
            until = steps if number == restarts else (number + 1) * length
            for step in range(done + 1, until + 1):
                at, data = now + (step - done) * STEP_SECONDS, 0.02 * (step - done)
                metrics.write(model % (stamp(at), step, loss_of(step), 1.0 + step % 7 / 70, data, 0.0))
                if step % 1000 == 0:
                    loss = loss_of(step) + 0.1
                    found = {"step": step, "loss": loss, "perplexity": math.exp(loss)}
                    metrics.write(json_text({"event": "eval", "time": stamp(at), **found}) + "\n")
                    metrics.write(json_text(_checkpoint(at, step)) + "\n")
            began = now + (until - done) * STEP_SECONDS + BETWEEN_STARTS
        end = began - BETWEEN_STARTS
    for rank in range(mesh.world):
        last = [
            json_text(rank_step(mesh, rank, step, end - (steps - step), 1.0 + (rank * 37 + step) % 11 / 100))
            for step in range(steps - min(tail, steps) + 1, steps + 1)
        ]
        with directory.rank_metrics(rank).open("wb") as file:
            file.write(json_text(rank_start(mesh, rank, first + BEFORE_TRAINING)).encode() + b"\n")
            file.seek((steps - len(last)) * len(last[0]), 1)
            file.write("\n".join(["", json_text(rank_start(mesh, rank, now)), *last, ""]).encode())
    return path


def start_event(mesh: Mesh, now: float, steps: int, before: int) -> dict[str, Any]:
    return {
        "event": "start", "time": stamp(now), "parameters": 124_439_808, "device": DEVICE, "ranks": mesh.world,
        "layout": {"tensor": mesh.tp, "sequence": mesh.sequence, "pipeline": mesh.pp, "data": mesh.dp, "zero": 1},
        "precision": {"parameter": "bfloat16", "gradient": "float32", "reduce": "float32", "optimizer": "float32"},
        "memory_expected_bytes": {"parameters": 2 * GIB, "gradients": 4 * GIB, "optimizer": 6 * GIB, "other": GIB},
        "steps": steps, "steps_before": before, "loaded": None, "seconds_before_training": BEFORE_TRAINING,
        "mfu_terms": {
            "flops_per_token": 8.5e8, "attention": "causal", "peak_flops_per_device": 989.5e12, "devices": mesh.world,
        },
    }  # fmt: skip


def step_event(
    step: int, now: float, waited: Mapping[str, float], *, straggler: int | None = None, is_spike: bool = False
) -> dict[str, Any]:
    tokens_per_second = TOKENS / STEP_SECONDS
    return {
        "event": "step", "time": stamp(now), "step": step, "loss": loss_of(step) + 5.0 * is_spike, "lr": 3e-4,
        "grad_norm": 1.25, "param_norm": 120.5, "tokens": step * TOKENS, "samples": step * SAMPLES,
        "tokens_per_second": tokens_per_second, "samples_per_second": SAMPLES / STEP_SECONDS, "mfu": 0.41,
        "tokens_per_second_per_device": tokens_per_second / 8, "peak_tokens_per_second": 1.1 * tokens_per_second,
        "step_seconds": STEP_SECONDS, "peak_memory_bytes": 16 * GIB, "bubble": 0.12,
        "split_seconds": {**SPLIT, "checkpoint": 0.0}, "waited_seconds": dict(waited),
        "communication_bytes": {"tp": 3 * GIB, "dp": GIB, "pp": GIB // 8},
        "memory_bytes": {"parameters": 2 * GIB, "gradients": 4 * GIB, "optimizer": 6 * GIB, "other": 2 * GIB},
        "loss_spike": 6.0 if is_spike else 0.3,
        "straggler": None if straggler is None else {"rank": straggler, "relative": 2.0, "own": 2.0},
    }  # fmt: skip


def rank_start(mesh: Mesh, rank: int, now: float) -> dict[str, Any]:
    place = {"local_rank": mesh.local_rank(rank), "place": mesh.place(rank), "host": mesh.host(rank)}
    machine = {"device": DEVICE, "cores": 64, "memory_total_bytes": 512 * GIB, "pid": FIRST_PID + rank}
    return {"event": "start", "time": stamp(now), "rank": rank, **place, **machine}


def rank_step(mesh: Mesh, rank: int, step: int, now: float, work: float) -> dict[str, Any]:
    """`work`: how long its own work takes, as a multiple of that of a fast rank."""
    own = work * 0.4 * STEP_SECONDS
    node = {"host_cpu": 0.35, "host_memory_bytes": 96 * GIB} if mesh.local_rank(rank) == 0 else {}
    return {
        "step": step, "time": stamp(now), "step_seconds": STEP_SECONDS, "input_seconds": SPLIT["data"] * STEP_SECONDS,
        "allocator_bytes": {
            "active": 14 * GIB, "reserved": 15 * GIB, "peak_active": 16 * GIB, "peak_reserved": 17 * GIB,
        },
        "split_seconds": {**SPLIT, "checkpoint": 0.0}, "work_seconds": own, "peak_memory_bytes": 16 * GIB,
        "memory_in_use_bytes": (14 * GIB) + rank * (GIB // 64), "device_utilization": 0.93, "bubble": 0.12,
        "stage_seconds": [{"stage": mesh.place(rank)["pp"], "forward": own * 0.35, "backward": own * 0.65}], **node,
    }  # fmt: skip


def ending(how: str, began: float, seconds: float, step: int, text: str = "", **more: Any) -> dict[str, Any]:
    """A line of `restarts.jsonl`, as `launch/restarts.py` writes it: how a start of a submitted job ended."""
    times = {"until_joined": 3.0, "until_training": 10.0, "after_last_step": 2.0, "first_step": 0}
    what = {"how": how, "job": "4711", "requeues": 0, "nodes": 2, "began": began, "seconds": seconds, **times}
    return {**what, "step": step, "checkpoint": step, "rank": None, "text": text, "exit_code": 1, **more}


def _resume(now: float, step: int, changes: Sequence[str] = ()) -> dict[str, Any]:
    what = {"checkpoint": f"checkpoints/step-{step:08d}", "written_by": {}, "load_seconds": LOADING}
    what["changes"] = [*changes]
    return {"event": "resume", "time": stamp(now), "step": step, **what}


def _checkpoint(now: float, step: int) -> dict[str, Any]:
    sizes = {"bytes": 12 * GIB, "seconds": 3.5, "blocked_seconds": SAVING_SECONDS, "removed": []}
    return {"event": "checkpoint", "time": stamp(now), "step": step, "path": f"checkpoints/step-{step:08d}", **sizes}


def _warning(now: float, step: int, text: str) -> dict[str, Any]:
    return {"event": "warning", "time": stamp(now), "step": step, "text": text}


def _template(event: Mapping[str, Any]) -> str:
    """The line of a step, with places for its time, number, loss, seconds and waits."""
    marked = {**event, "time": "T", "step": "S", "loss": "L", "step_seconds": "B"}
    marked["waited_seconds"] = {"data": "D", "checkpoint": "C"}
    text = json.dumps(marked).replace("%", "%%")
    text = text.replace('"T"', '"%s"')
    for mark, form in {"S": "%d", "L": "%.6f", "B": "%.4f", "D": "%.4f", "C": "%.4f"}.items():
        text = text.replace(f'"{mark}"', form)
    return text + "\n"


def _config(mesh: Mesh, steps: int, checkpoint_every: int, eval_every: int) -> str:
    return f"""\
model: {{family: gpt, num_hidden_layers: 12, hidden_size: 768}}
parallel: {{tensor: {mesh.tp}, pipeline: {mesh.pp}, schedule: 1f1b}}
train: {{steps: {steps}, global_batch: {SAMPLES}, micro_batch: 4, sequence_length: {TOKENS // SAMPLES}, \
eval_every: {eval_every}}}
optimizer: {{lr: 0.0003, zero: 1}}
checkpoint: {{every: {checkpoint_every}}}
log: {{every: 1}}
"""
