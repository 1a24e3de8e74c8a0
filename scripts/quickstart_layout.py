"""Print the overrides with which the quickstart runs best on this machine.

The recipe's own layout shows tensor and sequence parallelism on two CPU ranks, in mixed precision where the processor
multiplies bfloat16: its perplexity ends within 1 % of float32's (benchmarks/results/precision.md). On N accelerators
data parallelism cuts the global batch of 8 sequences, rounded up to a multiple of N.
"""

from shardwise.base.hardware import accelerators, bfloat16_unit
from shardwise.config import load_config


def overrides(count: int) -> list[str]:
    if count == 0:
        return ["precision.mode=mixed"] if bfloat16_unit() else []
    each = -(-load_config("quickstart").train.global_batch // count)
    return [
        "parallel.tensor=1",
        "parallel.sequence=false",
        f"train.micro_batch={each}",
        f"train.global_batch={each * count}",
    ]


if __name__ == "__main__":
    print(*overrides(accelerators()[1]))
