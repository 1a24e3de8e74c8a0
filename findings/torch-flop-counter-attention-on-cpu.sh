#!/usr/bin/env bash
# torch 2.13.0 (torch.utils.flop_counter.FlopCounterMode), on a CPU.
# Guess: FlopCounterMode counts the FLOPs of scaled_dot_product_attention on any device, as it knows the operators of
# fused attention: 4·B·heads·S²·head_dim forward.
# Seen: on a CPU the call becomes _scaled_dot_product_flash_attention_for_cpu, for which the counter has no formula: it
# counts 0 and says nothing, forward and backward. With the backend MATH the same call counts 1,048,576 and 2,097,152
# more. So FLOPs of a transformer that are counted on a CPU lack attention; custom_mapping can give the operators' formulas.
#   default: forward 0, with backward 0
#   MATH: forward 1048576, with backward 3145728
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

assert torch.__version__.startswith("2.13.0"), torch.__version__
q = torch.ones(1, 4, 64, 16, requires_grad=True)
seen = []
for name, backend in (("default", contextlib.nullcontext()), ("MATH", sdpa_kernel(SDPBackend.MATH))):
    with backend, FlopCounterMode(display=False) as forward:
        out = scaled_dot_product_attention(q, q, q, is_causal=True).sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    total = forward.get_total_flops() + backward.get_total_flops()
    print(f"{name}: forward {forward.get_total_flops()}, with backward {total}")
    seen.append((forward.get_total_flops(), total))
assert 4 * 4 * 64 * 64 * 16 == seen[1][0]
assert seen == [(0, 0), (1048576, 3145728)], seen
PROGRAM
"$python" "$work/run.py"
