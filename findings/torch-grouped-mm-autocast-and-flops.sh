#!/usr/bin/env bash
# Guess: torch.nn.functional.grouped_mm is treated as F.linear is: autocast computes it in bfloat16, and FlopCounterMode counts
# 2·rows·in·out.
# Seen in torch 2.13.0 on a CPU: autocast knows it not, so that experts stay in float32 where all other matmuls of the model
# are in bfloat16, and the counter has no formula for it and counts 0, forward and backward. Nothing is said. MFU of a
# sparse model that is measured by the counter lacks the experts; custom_mapping can give the formula.
#   autocast: F.linear torch.bfloat16, grouped_mm torch.float32
#   FLOPs of 512 rows, 64 to 64, forward and backward: F.linear 12582912, grouped_mm 0
# PYTHON names an interpreter that has torch==2.13.0 (default: python3).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PY'
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

assert torch.__version__.startswith("2.13.0"), torch.__version__
x = torch.randn(512, 64, requires_grad=True)
weights = torch.randn(2, 64, 64, requires_grad=True)
ends = torch.tensor([200, 512], dtype=torch.int32)


def dense():
    return F.linear(x, weights[0])


def grouped():
    return F.grouped_mm(x, weights, offs=ends)


with torch.autocast("cpu", torch.bfloat16):
    dtypes = [dense().dtype, grouped().dtype]
print(f"autocast: F.linear {dtypes[0]}, grouped_mm {dtypes[1]}")
flops = []
for product in (dense, grouped):
    with FlopCounterMode(display=False) as counter:
        y = product()
        y.backward(torch.ones_like(y))
    flops.append(counter.get_total_flops())
print(f"FLOPs of 512 rows, 64 to 64, forward and backward: F.linear {flops[0]}, grouped_mm {flops[1]}")
assert dtypes == [torch.bfloat16, torch.float32], "autocast has changed"
assert flops == [3 * 2 * 512 * 64 * 64, 0], "the counter has changed"
PY
cd "$work" && "${PYTHON:-python3}" run.py
