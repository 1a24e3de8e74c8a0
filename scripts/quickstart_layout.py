"""Print the overrides with which the quickstart runs one rank on each accelerator; nothing where there is none.

The recipe's own layout shows tensor and sequence parallelism on two CPU ranks. On N accelerators data parallelism cuts
its global batch of 8 sequences, rounded up to a multiple of N.
"""

from shardwise.config import load_config
from shardwise.hardware import accelerators


def overrides(count: int) -> list[str]:
    if count == 0:
        return []
    each = -(-load_config("quickstart").train.global_batch // count)
    return [
        "parallel.tensor=1",
        "parallel.sequence=false",
        f"train.micro_batch={each}",
        f"train.global_batch={each * count}",
    ]


if __name__ == "__main__":
    print(*overrides(accelerators()[1]))
