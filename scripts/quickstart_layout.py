"""Print the overrides with which the quickstart runs on the accelerators of this machine.

Without accelerators there are none: `make train` is `shardwise train quickstart`, whose layout shows tensor and
sequence parallelism on two CPU ranks. On N accelerators data parallelism cuts the global batch of 8 sequences, rounded
up to a multiple of N.
"""

from shardwise.base.hardware import accelerators
from shardwise.config import load_config


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
