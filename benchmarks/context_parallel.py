"""Ranks that share samples: the memory of a long sequence, step time beside data parallelism, and even work.

The time is that of the same four samples on four ranks: a sample on each, or a quarter of each
of the four, which go through the model at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import ranks
from measure import median
from report import Report, Table, target

WORLD = 4
LONG, SHORT, TIMED = 32768, 512, 4096
_STEPS_TO_PEAK = 2
MODEL = (
    "model.num_hidden_layers=2",
    "model.hidden_size=256",
    "model.intermediate_size=688",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=2",
    "model.vocab_size=512",
)


FORMS = {"CP 1": (1, "gather"), f"CP {WORLD}": (WORLD, "gather"), f"CP {WORLD}, ring": (WORLD, "ring")}
"""The degree, and how ranks get the keys and values of each other."""


def _config(context: int, keys: str, length: int, batch: int, micro_batch: int = 1) -> Any:
    from shardwise.config import load_config

    lengths = [f"{key}={length}" for key in ("train.sequence_length", "model.max_position_embeddings")]
    layout = [
        f"parallel.context={context}",
        f"parallel.context_keys={keys}",
        "parallel.tensor=1",
        "parallel.sequence=false",
        "parallel.pipeline=1",
    ]
    portions = [
        f"train.global_batch={batch}",
        f"train.micro_batch={micro_batch}",
        "train.steps=100",
        "train.eval_every=0",
    ]
    return load_config("llama2-tiny", [*MODEL, *lengths, *layout, *portions, "optimizer.zero=1"])


def train(
    context: int, keys: str, length: int, batch: int, steps: int, micro_batch: int = 1
) -> Iterator[dict[str, float]]:
    """On one rank: the seconds of each step and of its attention; at last the peak of memory above what libraries take.

    With it comes the prediction.
    """
    import torch
    from measure import PeakMemory

    from shardwise.config import check_layout
    from shardwise.data.formats.prepared_data import random_tokens
    from shardwise.distributed.mesh import Mesh, join
    from shardwise.estimates.memory import expected_memory
    from shardwise.models import attention
    from shardwise.train.build import build_trainer

    torch.set_num_threads(1)
    join()
    config = _config(context, keys, length, batch, micro_batch)
    mesh = Mesh(context=context)
    spent = [0.0]
    attend = attention.AttentionCore.forward

    def timed(*arguments: Any) -> Any:
        start = time.process_time()
        y = attend(*arguments)
        spent[0] += time.process_time() - start
        return y

    attention.AttentionCore.forward = timed  # type: ignore[method-assign]
    text = random_tokens(config.model.vocab_size, steps * batch + 1, length, pairs=False)
    memory = PeakMemory()
    trainer = build_trainer(config, mesh, text)
    estimate = expected_memory(config, check_layout(config, mesh.world.size))
    assert estimate is not None
    yield {}
    for _ in range(steps):
        spent[0] = 0.0
        start = time.perf_counter()
        trainer.step()
        yield {"seconds": time.perf_counter() - start, "attention": spent[0]}
    yield {"peak": memory.above(), "predicted": estimate.total}


def run(rounds: int) -> Report:
    figures: dict[str, Any] = {}
    rows = []
    growth = {}
    for form, (context, keys) in FORMS.items():
        long, short = (_peak(context, keys, length) for length in (LONG, SHORT))
        figures[f"memory, {form}"] = {"long": long, "short": short}
        measured, predicted = (long[key] - short[key] for key in ("peak", "predicted"))
        growth[form] = measured
        error = predicted / measured - 1
        figures[f"memory, {form}"]["error"] = error
        rows.append([form, *(f"{size / 2**20:.0f}" for size in (measured, predicted)), f"{error:+.1%}"])
    error = max(abs(figures[f"memory, {form}"]["error"]) for form in growth)
    targets = [
        target(
            "activations of 32,768 tokens at CP 4, times CP 1's", growth["CP 4"] / growth["CP 1"], 0.27, at_least=False
        ),
        target("their memory, predicted within", error, 0.02, at_least=False),
    ]
    seconds, attention = _turns(3 * rounds + 1)
    ratio = median([cp / dp for cp, dp in zip(seconds["CP 4"], seconds["DP 4"], strict=True)])
    # The maximum of each step would be that of the machine's noise.
    by_rank = [median(list(steps)) for steps in zip(*attention["CP 4"], strict=True)]
    imbalance = max(by_rank) / (sum(by_rank) / WORLD) - 1
    figures |= {"seconds": seconds, "ratio": ratio, "attention by rank": by_rank, "imbalance": imbalance}
    targets += [
        target("step of 4 samples of 4,096 tokens at CP 4, times DP 4's", ratio, 1.1, at_least=False),
        target("attention's time on the slowest rank above the mean", imbalance, 0.03, at_least=False),
    ]
    times = [[kind, f"{median(steps):.3f}"] for kind, steps in seconds.items()]
    return Report(
        "context_parallel",
        "Ranks that share samples",
        [
            Table(("a sample of 32,768 tokens", "memory, MiB", "predicted", "error"), rows),
            Table(("4 samples of 4,096 tokens", "s a step"), times),
        ],
        figures,
        targets,
        [
            "Llama of 2 blocks of 256 with 8 query and 2 key and value heads, in float32, CPU ranks over gloo, ZeRO-1, "
            f"AdamW; {WORLD} ranks on 2 cores.",
            "Memory: the peak above that of a sample of 512 tokens, as libraries and connections take as much in both. "
            "Attention: median of the processor times of the forward pass on each rank.",
        ],
    )


def _peak(context: int, keys: str, length: int) -> dict[str, float]:
    arguments = {"context": context, "keys": keys, "length": length, "batch": 1, "steps": _STEPS_TO_PEAK}
    with ranks.Job("context_parallel", "train", context, variables=ranks.OWN_PAGES, **arguments) as job:
        job.receive()
        *_, last = (job.go_on() for _ in range(_STEPS_TO_PEAK + 1))
    return max(last, key=lambda rank: rank["peak"])


def _turns(steps: int) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """Seconds of the steps by the slowest rank, and attention's on each rank, without the first step."""
    forms = {"DP 4": (1, "gather"), **FORMS}
    del forms["CP 1"]
    seconds: dict[str, list[float]] = {kind: [] for kind in forms}
    attention: dict[str, list[list[float]]] = {kind: [] for kind in forms}
    with ExitStack() as stack:
        jobs = {
            kind: stack.enter_context(
                ranks.Job(
                    "context_parallel",
                    "train",
                    WORLD,
                    context=context,
                    keys=keys,
                    length=TIMED,
                    batch=WORLD,
                    micro_batch=context,
                    steps=steps,
                )
            )
            for kind, (context, keys) in forms.items()
        }
        for job in jobs.values():
            job.receive()
        for number in range(steps):
            for kind, job in jobs.items():
                by_rank = job.go_on()
                if number:
                    seconds[kind].append(max(rank["seconds"] for rank in by_rank))
                    attention[kind].append([rank["attention"] for rank in by_rank])
    return seconds, attention
