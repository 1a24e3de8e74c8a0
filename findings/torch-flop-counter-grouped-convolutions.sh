#!/usr/bin/env bash
# torch 2.13.0 (torch.utils.flop_counter.FlopCounterMode), on a CPU.
# Guess: FlopCounterMode counts a convolution with groups, such as the depthwise one of a Mamba block, as its arithmetic is:
# backward twice forward, and all of it divided by `groups`.
# Seen: forward and the gradient of the input are divided, as the weight has the shape [out, in / groups, width]. The gradient
# of the weight is counted from the shapes of input and output, and not divided: of a depthwise convolution of 64 channels it
# is 64 times too large, and the whole 22 times. custom_mapping can give the right formula for aten.convolution_backward.
#   groups 1: forward 2097152, backward 4194304
#   groups 64: forward 32768, backward 2129920
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PY'
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

assert torch.__version__.startswith("2.13.0"), torch.__version__
seen = []
for groups in (1, 64):
    layer = nn.Conv1d(64, 64, 4, groups=groups, bias=False)
    x = torch.ones(1, 64, 67, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    seen.append((forward.get_total_flops(), backward.get_total_flops()))
    print(f"groups {groups}: forward {seen[-1][0]}, backward {seen[-1][1]}")
one = 2 * 64 * 4 * 64 * 64
assert seen[0] == (one, 2 * one), seen
assert seen[1] == (one // 64, one // 64 + one), seen
PY
cd "$work" && "${PYTHON:-python3}" run.py
