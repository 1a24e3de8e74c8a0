#!/usr/bin/env bash
# Guess: schedules of transformers that have a warmup begin at 0, reach the optimizer's rate, and go down from there.
# Seen in transformers 5.24.0, as parts of the optimizer's rate:
# - cosine_warmup_with_min_lr counts its updates from 1 on where all others count from 0. Its warmup of 4 is 0.25 at the first
#   update, and without a warmup no update has the rate. Beside cosine_with_min_lr each update has the rate of the next one.
# - warmup_stable_decay with less room than warmup and decay take keeps both lengths: the decay begins in its midst, and the
#   rate falls in one step. Warmup 8 and decay 4 of 10 updates, by decay_type linear:
#   cosine_with_min_lr         0.00 0.25 0.50 0.75 1.00 0.94 0.78 0.55 0.33 0.16
#   cosine_warmup_with_min_lr  0.25 0.50 0.75 1.00 0.94 0.78 0.55 0.33 0.16 0.10
#   the same without a warmup  0.98 0.91 0.81 0.69 0.55 0.41 0.29 0.19 0.12 0.10
#   warmup_stable_decay        0.00 0.12 0.25 0.38 0.50 0.62 0.75 0.88 0.50 0.25
# PYTHON names an interpreter that has torch, a CPU build or another, and what transformers needs (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install -q --no-deps --target "$folder/site" transformers==5.24.0
cat > "$folder/try.py" <<'PY'
import torch
import transformers
from transformers import get_scheduler

assert transformers.__version__ == "5.24.0", transformers.__version__
RATE, UPDATES = 3e-4, 10


def rates(name: str, warmup: int, **options: object) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, warmup, UPDATES, scheduler_specific_kwargs=options)
    seen = []
    for _ in range(UPDATES):
        seen.append(optimizer.param_groups[0]["lr"] / RATE)
        optimizer.step()
        scheduler.step()
    return seen


usual = rates("cosine_with_min_lr", 4, min_lr_rate=0.1)
early = rates("cosine_warmup_with_min_lr", 4, min_lr_rate=0.1)
without = rates("cosine_warmup_with_min_lr", 0, min_lr_rate=0.1)
stable = rates("warmup_stable_decay", 8, num_decay_steps=4, decay_type="linear")
names = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "the same without a warmup", "warmup_stable_decay")
for name, seen in zip(names, (usual, early, without, stable), strict=True):
    print(f"{name:26}", *(f"{rate:.2f}" for rate in seen))
assert usual[0] == 0
assert abs(early[0] - 0.25) < 1e-9 and max(without) < 0.98, "cosine_warmup_with_min_lr now counts from 0"
assert all(abs(one - two) < 1e-9 for one, two in zip(usual[1:], early, strict=False))
assert abs(stable[7] - 7 / 8) < 1e-9 and abs(stable[8] - 0.5) < 1e-9, "the decay now begins at the rate before it"
PY
PYTHONPATH="$folder/site" "$python" -W ignore "$folder/try.py"
