"""Measure what tensor parallelism costs and saves: a small BERT on four ranks, as DP 4 and as TP 2 × DP 2.

Losses: those of three finished runs, of which the page has the commands: DP 4, TP 2 × DP 2 and a wider model.
Speed: the layouts take a step each in turn, in the same processes; medians, and ratios of steps of the same turn.
Memory: peaks of training three steps in fresh processes, as the processes are and of live tensors alone.
`key=value` arguments change the model, such as model.num_hidden_layers=2.

    python -m scripts.tutorial_bert --runs runs/dp4 runs/tp2-dp2 runs/wider
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Table, describe, environment
from scripts import tutorial_common as common
from scripts.tutorial_common import Target

NAME = "bert-large"
RECIPE = common.PAGES / "bert-mini.yaml"
DP, TP = "DP 4", "TP 2 × DP 2"
LARGER = "512 wide, TP 2 × DP 2"
WIDER = ("model.hidden_size=512", "model.num_attention_heads=8", "model.intermediate_size=2048")
LAYOUTS: dict[str, tuple[str, ...]] = {
    DP: (),
    "DP 4, ZeRO-1": ("optimizer.zero=1",),
    TP: ("parallel.tensor=2",),
    "TP 2 × DP 2 + SP": ("parallel.tensor=2", "parallel.sequence=true"),
    LARGER: ("parallel.tensor=2", *WIDER),
}
CURVES = (DP, TP, LARGER)
SMALL = (
    *("model.hidden_size=64", "model.num_attention_heads=2", "model.intermediate_size=64", "model.vocab_size=512"),
    "model.num_hidden_layers=1",
)
FAST = ("train.dropout_mode=fast",)
OWN_PAGES = "MALLOC_MMAP_THRESHOLD_"
"""At 128 KiB glibc gives each tensor pages of its own and takes them back once it is freed: what is left is live."""


def turns(layouts: list[str], overrides: list[str], rounds: int) -> dict[str, list[float]]:
    """On one rank: seconds of each layout's steps, the layouts taking turns; the first two rounds are not counted."""
    import torch

    from shardwise.distributed import collectives
    from shardwise.distributed.mesh import Mesh

    torch.set_num_threads(1)
    trainers = {}
    for name in layouts:
        config = common.overridden(RECIPE, FAST, LAYOUTS[name], overrides)
        trainers[name] = common.random_trainer(config, Mesh(tensor=config.parallel.tensor, device="cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(rounds + 2):
        for name, trainer in trainers.items():
            collectives.barrier(trainer.mesh.world)
            start = time.perf_counter()
            trainer.step()
            collectives.barrier(trainer.mesh.world)
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peak(name: str, overrides: list[str]) -> int:
    """On one rank: a layout's peak bytes."""
    import torch

    torch.set_num_threads(1)
    config = common.overridden(RECIPE, FAST, LAYOUTS[name], overrides)
    small = common.overridden(RECIPE, FAST, LAYOUTS[name], overrides, SMALL)
    return common.peak_of_steps(config, small, 3)


def peaks(name: str, world: int, overrides: list[str]) -> dict[str, int]:
    """Of the rank with most: as the processes are, and of live tensors, each in fresh processes."""
    from tests.rank_pool import RankPool

    found = {}
    for kind, variables in (("resident_bytes", {}), ("live_bytes", {OWN_PAGES: str(128 * 1024)})):
        os.environ.update(variables)
        pool = RankPool(world)
        found[kind] = max(pool.run(peak, name, overrides, timeout=600))
        pool.close()
    del os.environ[OWN_PAGES]
    return found


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def measure(runs: list[Path], layouts: list[str], world: int, overrides: list[str], rounds: int) -> dict[str, Any]:
    from shardwise.config import check_layout
    from shardwise.estimates.memory import expected_memory
    from shardwise.models.parameter_counts import parameter_count
    from tests.rank_pool import RankPool

    losses = {name: losses_of(run) for name, run in zip(CURVES, runs, strict=True)}
    results: dict[str, Any] = {"environment": environment(), "rounds": rounds, "losses": losses, "layouts": {}}
    print("  speed", flush=True)
    pool = RankPool(world)
    ranks = pool.run(turns, layouts, overrides, rounds, timeout=3600)
    pool.close()
    steps = {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in layouts}
    for name in layouts:
        print(f"  memory of {name}", flush=True)
        config = common.overridden(RECIPE, FAST, LAYOUTS[name], overrides)
        seconds = median(steps[name])
        results["layouts"][name] = {
            "parameters": parameter_count(config.model),
            "step_seconds": seconds,
            "tokens_per_second": config.train.global_batch * config.train.sequence_length / seconds,
            "speed": median(theirs / ours for theirs, ours in zip(steps[DP], steps[name], strict=True)),
            **peaks(name, world, overrides),
            "expected_bytes": expected_memory(config, check_layout(config, world)).total,
        }
    return results


def text(results: dict[str, Any]) -> str:
    """The page's table with its notes."""
    base, losses = results["layouts"][DP], results["losses"]
    rows = []
    for name, one in results["layouts"].items():
        rows.append(
            [
                name,
                f"{one['parameters'] / 1e6:.1f} M",
                f"{one['tokens_per_second']:,.0f} ({one['speed']:.2f})",
                f"{common.mib(one['resident_bytes'])} ({one['resident_bytes'] / base['resident_bytes']:.2f})",
                f"{common.mib(one['live_bytes'])} ({one['live_bytes'] / base['live_bytes']:.2f})",
                common.mib(one["expected_bytes"]),
                f"{losses[name][-1]:.4f}" if name in losses else "",
            ]
        )
    columns = ("on four ranks", "parameters", "tokens/s", "peak memory", "of live tensors", "expected", "final loss")
    return (
        f"{Table(columns, rows).markdown()}\n\n{claims(results)}"
        f"Ratios to {DP} are in brackets, of speeds the median over {results['rounds']} turns. Memory is that of the "
        'rank with most, beyond Python, torch and a tiny model; "peak memory" includes what the allocator keeps. Speed '
        "and memory were measured with fast dropout.\n"
        f"{describe(results['environment'])}{_later(results)}"
    )


def _later(results: dict[str, Any]) -> str:
    """When the losses were measured, where that was later."""
    date = results.get("losses_measured")
    return f" Losses: {date}." if date is not None else ""


def claims(results: dict[str, Any]) -> str:
    """What the tutorial says of tensor parallelism, with the numbers found; nothing where not all was measured."""
    layouts = results["layouts"]
    if not {TP, LARGER} <= set(layouts):
        return ""
    base, cut, larger = layouts[DP], layouts[TP], layouts[LARGER]
    resident, live = (larger[kind] / base[kind] for kind in ("resident_bytes", "live_bytes"))
    lines = [
        f"Throughput is lower: {cut['speed']:.2f}, because every layer communicates.",
        f"Memory is lower: {cut['live_bytes'] / base['live_bytes']:.2f} in live tensors.",
        f"A larger model fits: one of {larger['parameters'] / base['parameters']:.1f} times the parameters takes "
        f"{live:.2f} of the memory in live tensors, {resident:.2f} with what the allocator keeps.",
        f"The loss curve is the same: over {len(results['losses'][DP])} steps with dropout the two differ by at most "
        f"{max(differences(results)):.1e} relative. So short a run learns how frequent tokens are, and little else.",
    ]
    return "".join(f"- {line}\n" for line in lines) + "\n"


def differences(results: dict[str, Any]) -> list[float]:
    """Of the two curves of one model, relative, step by step."""
    losses = results["losses"]
    return [abs(a / b - 1) for a, b in zip(losses[TP], losses[DP], strict=True)]


def draw(results: dict[str, Any], target: Target) -> None:
    import matplotlib.pyplot as plt

    losses = results["losses"]
    steps = range(1, len(losses[DP]) + 1)
    with plt.rc_context(common.STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8.2, 4.8), layout="constrained", sharex=True, height_ratios=(2.4, 1)
        )
        above.plot(steps, losses[DP], color=common.ORANGE, linewidth=5.5, label=DP, solid_capstyle="round")
        above.plot(steps, losses[TP], color=common.BLUE, linewidth=1.5, label=f"{TP}: the same curve")
        label = f"{TP}, 512 wide instead of 384"
        above.plot(steps, losses[LARGER], color=common.GREEN, linewidth=1.5, linestyle=(0, (5, 1.5)), label=label)
        above.set_ylabel("loss (MLM + NSP)")
        above.legend()
        equal = 1e-9
        below.semilogy(steps, [max(one, equal) for one in differences(results)], ".", color=common.BLUE, markersize=4.5)
        below.axhline(1e-5, color=common.VERMILION, linewidth=1.4)
        below.text(len(steps), 1.4e-5, "what the tests allow over 20 steps", ha="right", va="bottom", size=9.5)
        below.set_ylim(4e-10, 1e-3)
        below.set_yticks([equal, 1e-7, 1e-5], ["equal", "$10^{-7}$", "$10^{-5}$"])
        below.minorticks_off()
        below.set_ylabel("relative\ndifference")
        below.set_xlabel("step")
        below.set_xlim(0, len(steps) + 1)
        target.draw(figure)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--runs", metavar="DIR", nargs=len(CURVES), type=Path, help=f"of {', '.join(CURVES)}")
    parser.add_argument(
        "--only-losses", action="store_true", help="take the runs' losses; speed and memory stay as they were measured"
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns in which each layout takes a step")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="those that are measured")
    parser.add_argument("--ranks", type=int, default=4, help="of each layout; other than four only to try the script")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="change the model")
    options = parser.parse_intermixed_args()
    target = Target(NAME, options.out)
    if not options.redraw:
        if options.runs is None:
            parser.error("--runs names three finished runs")
        if options.only_losses:
            losses = {name: losses_of(run) for name, run in zip(CURVES, options.runs, strict=True)}
            results = {**target.load(), "losses": losses, "losses_measured": environment()["date"]}
        else:
            results = measure(options.runs, options.layouts, options.ranks, options.overrides, options.rounds)
        target.save(results)
    results = target.load()
    draw(results, target)
    target.publish(text(results))


if __name__ == "__main__":
    main()
