#!/usr/bin/env bash
# Guess: rows that belong to no group are 0 in the result of torch.nn.functional.grouped_mm, and get a gradient of 0, as its
# documentation says of elements beyond the last offset that they are ignored.
# Seen in torch 2.13.0 on a CPU, float32 and bfloat16: neither is written. The rows of the result, and of the input's gradient,
# are what the memory held before, also NaN. So a layer of experts with a buffer for the most tokens must not sum over it,
# and must mask the gradient too: a 0 that is multiplied with a NaN is NaN. A group without rows has a gradient of 0.
#   float32: rows of groups right, rest 0 False, gradient of the rest 0 False, idle group's gradient 0 True
#   bfloat16: rows of groups right, rest 0 False, gradient of the rest 0 False, idle group's gradient 0 True
# PYTHON names an interpreter that has torch==2.13.0 (default: python3).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PY'
import torch
import torch.nn.functional as F

assert torch.__version__.startswith("2.13.0"), torch.__version__
ROWS, WIDTH = 1024, 64


def soil():
    """Leave values other than 0 in the memory that torch's allocator gives out next."""
    blocks = [torch.full((ROWS, WIDTH), 7.0, dtype=dtype) for _ in range(200)]
    del blocks


for dtype in (torch.float32, torch.bfloat16):
    x = torch.ones(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    weights = torch.ones(3, WIDTH, WIDTH, dtype=dtype, requires_grad=True)
    ends = torch.tensor([400, 400, 800], dtype=torch.int32)
    soil()
    y = F.grouped_mm(x, weights, offs=ends)
    assert (y[:800] == WIDTH).all()
    gradient = torch.zeros_like(y)
    gradient[:800] = 1
    soil()
    y.backward(gradient)
    assert (x.grad[:800] == WIDTH).all()
    seen = [bool((part == 0).all()) for part in (y[800:], x.grad[800:], weights.grad[1])]
    name = str(dtype).removeprefix("torch.")
    print(
        f"{name}: rows of groups right, rest 0 {seen[0]}, gradient of the rest 0 {seen[1]}, "
        f"idle group's gradient 0 {seen[2]}"
    )
    assert seen == [False, False, True], "this has changed"
PY
cd "$work" && "${PYTHON:-python3}" run.py
