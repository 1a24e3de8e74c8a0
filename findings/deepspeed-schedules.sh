#!/usr/bin/env bash
# Guess: a schedule of DeepSpeed with a linear warmup of W steps rises from the first update on, reaches the rate of the
# optimizer, and then decays, as those of torch and transformers do.
# Seen in DeepSpeed 0.19.8, warmup 4 of 10 steps, a peak of 1 being the optimizer's own rate of 3e-4:
# - The first two updates have the rate 0, and change nothing: a schedule sets 0 when it is made, and counts from 0 after the
#   first update. Update s has the rate of s - 2.
# - WarmupCosineLR counts its decay from 1 on, so that no update has the peak, nor one of the ten the least rate, 0.0001.
# - WarmupDecayLR rises to 0.001 where it has no warmup_max_lr, whatever the optimizer's rate is. WarmupLR and WarmupCosineLR
#   rise to the optimizer's.
#   WarmupLR                     0.00 0.00 0.25 0.50 0.75 1.00 1.00 1.00 1.00 1.00
#   WarmupCosineLR               0.00 0.00 0.25 0.50 0.75 0.93 0.75 0.50 0.25 0.07
#   WarmupDecayLR, max_lr 3e-4   0.00 0.00 0.25 0.50 0.75 1.00 0.83 0.67 0.50 0.33
#   WarmupDecayLR                0.00 0.00 0.83 1.67 2.50 3.33 2.78 2.22 1.67 1.11
# PYTHON names an interpreter that has torch, a CPU build or another, numpy, pydantic, tqdm, setuptools and pip (default:
# python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install -q --no-deps --no-build-isolation --target "$folder/site" \
  deepspeed==0.19.8 hjson==3.1.0 ninja==1.13.2 py-cpuinfo==9.0.0 msgpack==1.2.4 einops==0.8.2 2>"$folder/log" || { cat "$folder/log" >&2; exit 1; }
cat > "$folder/try.py" <<'PY'
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

RATE, WARMUP = 3e-4, {"warmup_num_steps": 4, "warmup_type": "linear"}


def rates(schedule: type, **options: float) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=RATE)
    scheduler = schedule(optimizer, **WARMUP, **options)
    seen = []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        scheduler.step()
    return seen


cases = {
    "WarmupLR": rates(WarmupLR),
    "WarmupCosineLR": rates(WarmupCosineLR, total_num_steps=10),
    "WarmupDecayLR, max_lr 3e-4": rates(WarmupDecayLR, total_num_steps=10, warmup_max_lr=RATE),
    "WarmupDecayLR": rates(WarmupDecayLR, total_num_steps=10),
}
for name, seen in cases.items():
    print(f"{name:28}", *(f"{rate:.2f}" for rate in seen))
    assert seen[:2] == [0, 0] and seen[2] > 0, f"{name} no longer begins with two updates of rate 0"
assert max(cases["WarmupLR"]) == 1
assert max(cases["WarmupCosineLR"]) < 0.94, "WarmupCosineLR now reaches the peak"
assert min(cases["WarmupCosineLR"][2:]) > 0.05, "WarmupCosineLR now reaches the least rate"
assert abs(max(cases["WarmupDecayLR"]) * RATE - 1e-3) < 1e-12, "WarmupDecayLR now rises to the optimizer's rate"
PY
DS_ACCELERATOR=cpu PYTHONPATH="$folder/site" "$python" -W ignore "$folder/try.py" >"$folder/out" 2>"$folder/log" ||
  { cat "$folder/log" >&2; exit 1; }
grep '^Warmup' "$folder/out"
