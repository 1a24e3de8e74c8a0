"""Fit the planner's constants on the rows that `benchmarks/published.py` names, and write them.

A coordinate search: each constant in turn is multiplied and divided by a step, which shrinks when nothing helps. The
same rows always give the same constants. Four are not fitted but read from published measurements of collectives or
assumed:

- `start` and `node`: NCCL's all-reduce over 2, 4 and 8 A100 of a node (VIA-Research/vTrain, `trace/a100`): 1 MiB takes
  45, 53 and 92 microseconds, of which 4 are a step of a ring, and 1 GiB over 8 moves at 229 of 300 GB/s.
- `network`: an all-reduce over nodes of 8 A100 with InfiniBand reached 1.5 of 1.6 Tb/s (bigscience-workshop/bigscience,
  `experiments/bandwidth/README.md`).
- `fused_attention` and `overlap`: assumptions, as these rows have neither. `fused_attention` gives half of the peak for
  the unmasked scores of 4,096 tokens, to which tiles on the diagonal add a 32nd part.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import published

from shardwise_plan.device_seconds import CONSTANTS, DeviceConstants
from shardwise_plan.step_time import stage_works

FITTED = ("matmul", "depth", "memory", "host", "step", "wait", "update")
START = DeviceConstants(
    matmul=0.9, depth=200, memory=0.75, fused_attention=0.516, host=2e-5, step=5e-3, start=2.8e-5, wait=1e-3, node=0.76,
    network=0.94, update=0.7, overlap=0.8,
)  # fmt: skip
_SHARES = ("matmul", "memory", "update")
STEPS = (0.3, 0.1, 0.03, 0.01)
TOLERANCE = 1e-5
"""How much smaller an error must be."""
_WEIGHT = 5  # of a time of a layer, in rows


def error(constants: DeviceConstants, rows: Sequence[published.Row]) -> float:
    """The mean of |log(predicted / measured)|."""
    errors = [(1.0, math.log(row.predicted(constants).total / row.measured)) for row in rows]
    for sequence, recompute, forward, backward in published.LAYER_TIMES:
        config, layout, cluster = published.layer(sequence, recompute)
        block = stage_works(config, layout, cluster, published.MEGATRON, constants)[0].block
        for seconds, measured in ((block.forward.total, forward), (block.backward.total, backward)):
            errors.append((_WEIGHT, math.log(seconds * 1000 / measured)))
    return sum(weight * abs(one) for weight, one in errors) / sum(weight for weight, _ in errors)


def improved(
    best: DeviceConstants, least: float, rows: Sequence[published.Row], step: float
) -> tuple[DeviceConstants, float]:
    """One round: each constant in turn, up and down."""
    for name in FITTED:
        for factor in (1 + step, 1 / (1 + step)):
            value = getattr(best, name) * factor
            if name in _SHARES and value > 1:
                continue
            tried = replace(best, **{name: float(f"{value:.4g}")})
            found = error(tried, rows)
            if found < least:
                best, least = tried, found
    return best, least


def fit(rows: Sequence[published.Row]) -> tuple[DeviceConstants, float]:
    """The constants, and their error."""
    best, least = START, error(START, rows)
    for step in STEPS:
        while True:
            after, found = improved(best, least, rows, step)
            if found > least - TOLERANCE:
                break
            best, least = after, found
    return best, least


def main() -> None:
    """Fit and write."""
    rows = published.fitting_rows()
    best, least = fit(rows)
    CONSTANTS.write_text(json.dumps(asdict(best), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(rows)} rows, mean error {least:.4f}: {CONSTANTS}\n")


if __name__ == "__main__":
    main()
