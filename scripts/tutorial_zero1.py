"""Measure what ZeRO-1 saves: bytes of weights, gradients and optimizer state on each rank, at DP 1 to 4, off and on.

The model is GPT-2 XL with fewer and narrower layers: its own 25 heads, 50,257 tokens, biases and tied head, in the
tutorial's mixed precision. Each layout trains two steps; then the memory under all live tensors is counted by
kind. `key=value` arguments change the model, such as model.num_hidden_layers=2.

    python -m scripts.tutorial_zero1
"""

from __future__ import annotations

from typing import Any

from benchmarks.report import Table, describe, environment
from scripts import tutorial_common as common
from scripts.tutorial_common import Target

NAME = "zero1-gpt2-xl"
KINDS = ("weights", "gradients", "optimizer state")
CUT_DOWN = (
    *("model.num_hidden_layers=4", "model.hidden_size=400", "model.intermediate_size=1600"),
    *("precision.mode=mixed", "train.sequence_length=32", "train.global_batch=12", "train.recompute=none"),
)


def live_bytes(overrides: list[str]) -> dict[str, dict[str, int]]:
    """On one rank: bytes after two steps, by kind, as they lie in memory and as `shardwise.estimates` expects them."""
    import torch

    from shardwise.config import check_layout
    from shardwise.distributed.mesh import Mesh
    from shardwise.estimates.memory import expected_memory

    config, mesh = common.overridden("gpt2-xl", CUT_DOWN, overrides), Mesh(device="cpu")
    trainer = common.random_trainer(config, mesh)
    for _ in range(2):
        trainer.step()
    counted: set[int] = set()

    def memory(tensors: Any) -> int:
        """Of the storages under these tensors, each once."""
        total = 0
        for storage in (tensor.untyped_storage() for tensor in tensors):
            total += storage.nbytes() * (storage.data_ptr() not in counted)
            counted.add(storage.data_ptr())
        return total

    parameters, inner = list(trainer.model.parameters()), trainer.optimizer._inner
    assert inner is not None
    masters = [p for group in inner.param_groups for p in group["params"]]
    moments = [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    measured = {
        "weights": memory(parameters),
        "gradients": memory(p.grad for p in parameters if p.grad is not None),
        "optimizer state": memory([*masters, *moments]),
    }
    expected = expected_memory(config, check_layout(config, mesh.world.size))
    wanted = dict(zip(KINDS, (expected.parameters, expected.gradients, expected.optimizer), strict=True))
    return {"measured": measured, "expected": wanted}


def measure(degrees: list[int], overrides: list[str]) -> dict[str, Any]:
    from shardwise.models.parameter_counts import parameter_count
    from tests.rank_pool import RankPool

    config = common.overridden("gpt2-xl", CUT_DOWN, overrides)
    surroundings, rows = environment(), []
    for degree in degrees:
        pool = RankPool(degree)
        for zero in (0, 1):
            print(f"  DP {degree}, ZeRO-{zero}", flush=True)
            ranks = pool.run(live_bytes, [*overrides, f"optimizer.zero={zero}"], timeout=600)
            most = max(ranks, key=lambda rank: sum(rank["measured"].values()))
            rows.append({"data": degree, "zero": zero, **most})
        pool.close()
    parameters = parameter_count(config.model)
    return {"parameters": parameters, "model": config.model.model_dump(), "rows": rows, "environment": surroundings}


def text(results: dict[str, Any]) -> str:
    """The page's table with its notes."""
    rows = []
    totals = {(row["data"], row["zero"]): sum(row["measured"].values()) for row in results["rows"]}
    for row in results["rows"]:
        if row["data"] > 1 and not row["zero"]:
            continue  # as much as at DP 1
        total, expected = totals[row["data"], row["zero"]], sum(row["expected"].values())
        rows.append(
            [
                f"DP {row['data']}, ZeRO-1 {'on' if row['zero'] else 'off'}",
                *(common.mib(row["measured"][kind]) for kind in KINDS),
                common.mib(total),
                common.mib(expected),
                f"{total / totals[row['data'], 0]:.0%}",
            ]
        )
    worst = max(abs(row["measured"][kind] / row["expected"][kind] - 1) for row in results["rows"] for kind in KINDS)
    agreement = "to the byte" if worst == 0 else f"within {worst:.2%}"
    model = results["model"]
    columns = ("on each rank", *KINDS, "together", "expected", "of ZeRO-1 off")
    return (
        f"{Table(columns, rows).markdown()}\n\n"
        f"A GPT-2 XL with {model['num_hidden_layers']} blocks and a width of {model['hidden_size']}, but with all "
        f"{model['num_attention_heads']} heads and {model['vocab_size']:,} tokens: {results['parameters']:,} "
        "parameters in mixed precision. ZeRO-1 off is alike at every DP. Live tensors after two steps, on the rank "
        f"with most; as `shardwise.estimates` expects {agreement}.\n"
        f"{describe(results['environment'])}"
    )


def draw(results: dict[str, Any], target: Target) -> None:
    import matplotlib.pyplot as plt

    colors = dict(zip(KINDS, (common.BLUE, common.ORANGE, common.GREEN), strict=True))
    with plt.rc_context(common.STYLE):
        figure, axes = plt.subplots(figsize=(8.2, 4.0), layout="constrained")
        axes.grid(visible=False, axis="x")
        places, names = [], []
        for row in results["rows"]:
            x, base, expected = row["data"] * 2.2 + row["zero"] * 0.84, 0.0, 0.0
            for kind in KINDS:
                height = row["measured"][kind] / common.MIB
                label = kind if not places else None
                axes.bar(x, height, 0.74, base, color=colors[kind], label=label)
                if height > 0.035 * ceiling(results):
                    ink = "white" if kind == "weights" else "black"
                    axes.text(x, base + height / 2, f"{height:,.0f}", color=ink, ha="center", va="center", size=9.5)
                base, expected = base + height, expected + row["expected"][kind] / common.MIB
                label = "expected by shardwise.estimates" if not places and kind == KINDS[-1] else None
                axes.plot([x - 0.4, x + 0.4], [expected] * 2, color=common.INK, linewidth=1.6, label=label)
            axes.text(x, base + 0.015 * ceiling(results), f"{base:,.0f}", ha="center", va="bottom", weight="bold")
            places.append(x)
            names.append("on" if row["zero"] else "off")
        axes.set_xticks(places, names)
        axes.tick_params(length=0)
        for degree in sorted({row["data"] for row in results["rows"]}):
            axes.text(degree * 2.2 + 0.42, -0.115, f"DP {degree}", ha="center", va="top", weight="bold",
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.text(-0.012, -0.026, "ZeRO-1", ha="right", va="top", transform=axes.transAxes)
        axes.set_ylim(0, 1.08 * ceiling(results))
        axes.set_ylabel("MiB on each rank")
        handles, labels = axes.get_legend_handles_labels()
        order = [labels.index(name) for name in (*reversed(KINDS), "expected by shardwise.estimates")]
        figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside upper center", ncols=4)
        target.draw(figure)


def ceiling(results: dict[str, Any]) -> float:
    """The highest bar."""
    return max(sum(row["measured"].values()) for row in results["rows"]) / common.MIB


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--degrees", metavar="DP", nargs="+", type=int, default=[1, 2, 3, 4], help="data-parallel ones")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="change the model")
    options = parser.parse_intermixed_args()
    target = Target(NAME, options.out)
    if not options.redraw:
        target.save(measure(options.degrees, options.overrides))
    results = target.load()
    draw(results, target)
    target.publish(text(results))


if __name__ == "__main__":
    main()
