#!/usr/bin/env bash
# Guess: to save a checkpoint before the first step changes nothing of the training.
# Seen in torch 2.13.0: get_optimizer_state_dict of torch.distributed.checkpoint makes the state of an optimizer that has
# none by an update without gradients at a rate of 0. AdamW counts it: its first real update is corrected as the second.
#   first update without a save 1.000 of the rate, after a save 0.744, count 2
# PYTHON names an interpreter that has torch==2.13.0 (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

RATE = 1e-3


def first_update(saved: bool) -> tuple[float, int]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    if saved:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return float((before - model.weight).abs().max()) / RATE, int(optimizer.state[model.weight]["step"])


without, _ = first_update(False)
after, count = first_update(True)
print(f"first update without a save {without:.3f} of the rate, after a save {after:.3f}, count {count}")
assert abs(without - 1.0) < 1e-3, "the first update is no longer the rate"
assert abs(after - 0.744) < 1e-3, "a save before the first step now leaves it as it is"
assert count == 2
PY
"${PYTHON:-python3}" -W ignore "$folder/try.py"
