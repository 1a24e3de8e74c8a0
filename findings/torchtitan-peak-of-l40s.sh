#!/usr/bin/env bash
# torchtitan 0.3.0: the MFU of an L40S is divided by the peak of an A100.
#
# Guess before the run: `get_peak_flops("NVIDIA L40S")`, with the name that torch.cuda.get_device_name reports, gives the
# 362 TFLOP/s that the function has for this GPU.
# Seen: 312 TFLOP/s, with the warning "Peak flops undefined for: NVIDIA L40S, fallback to A100". The function looks for
# "l40s" in lower case, and torch's name is in capitals, so MFU is 1.16 times too high. An "NVIDIA H200 NVL" gets the 989
# of an H200 SXM, though the H100 NVL has a row of its own (835).
#
# PYTHON names an interpreter whose torch is used (any build for CPUs from 2.11 on); torchtitan is installed beside it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-deps --target "$folder" torchtitan==0.3.0
PYTHONPATH="$folder" "$python" - <<'CHECK'
from torchtitan.tools.utils import get_peak_flops

names = ("l40s", "NVIDIA L40S", "NVIDIA H100 NVL", "NVIDIA H200 NVL")
found = {name: get_peak_flops(name) / 1e12 for name in names}
print(found)
raise SystemExit(found != dict(zip(names, (362, 312, 835, 989))))
CHECK
echo "as described: the peak of an L40S is that of an A100"
