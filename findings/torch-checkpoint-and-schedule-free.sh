#!/usr/bin/env bash
# Guess: torch.distributed.checkpoint restores the state of a schedule-free optimizer as it restores AdamW's, in the
# mode of training, in which steps are allowed, and in the other one; or it says what it did not restore.
# Seen in torch 2.13.0 with schedulefree 1.4.1: `train()` looks at the state of each parameter, which makes an empty one.
# The checkpoint takes that for a state that is there, and makes none. So what is loaded lacks `z` and `exp_avg_sq`: with
# dcp.load always, and without files where the state is flattened. Nothing is said, and the training goes on from other
# numbers. The counts in the parameter groups are right. Before train() the checkpoint calls a step to make the state,
# which the optimizer refuses: so dcp.load restores it in no mode.
#                                       state         difference after 3 more steps
#   AdamW, dcp.load                     restored      0
#   without train(), dcp.load           Exception: Optimizer was not in train mode when step is called.
#   train() before, dcp.load            lost          0.0188
#   train() before, flattened           lost          0.0188
#   train() before, not flattened       restored      0
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install -q --no-deps --target "$folder/site" schedulefree==1.4.1
cat > "$folder/try.py" <<'PY'
import copy
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from schedulefree import AdamWScheduleFree
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

assert torch.__version__.startswith("2.13."), torch.__version__
assert version("schedulefree") == "1.4.1"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def made(optimizer_class: type, ready: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    if ready and optimizer_class is AdamWScheduleFree:
        optimizer.train()
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def resumed(optimizer_class: type, *, before: bool = True, files: bool = False, flat: bool = False) -> tuple[str, float]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = made(optimizer_class)
    train(model, optimizer, 1)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    train(model, optimizer, 2)
    other, new = made(optimizer_class, before)
    other.load_state_dict(weights)
    if files:
        path = f"{sys.argv[1]}/{optimizer_class.__name__}-{before}"
        dcp.save(state, checkpoint_id=path)
        state = get_optimizer_state_dict(other, new, options=options)
        dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(other, new, state, options=options)
    has_state = all("exp_avg_sq" in new.state[p] for p in other.parameters())
    train(other, new, 2)
    difference = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return "restored" if has_state else "lost", difference


cases = {
    "AdamW, dcp.load": (resumed(torch.optim.AdamW, files=True), "restored"),
    "train() before, dcp.load": (resumed(AdamWScheduleFree, files=True), "lost"),
    "train() before, flattened": (resumed(AdamWScheduleFree, flat=True), "lost"),
    "train() before, not flattened": (resumed(AdamWScheduleFree), "restored"),
}
for name, ((found, difference), wanted) in cases.items():
    print(f"{name:35} {found:13} {difference:.3g}")
    assert found == wanted, f"{name}: the state is now {found}"
    assert (difference > 0.001) == (wanted == "lost"), f"{name}: {difference}"
try:
    resumed(AdamWScheduleFree, before=False, files=True)
    raise SystemExit("a checkpoint is now loaded before train()")
except Exception as error:
    assert "not in train mode when step is called" in str(error), error
    print(f"{'without train(), dcp.load':35} Exception: {str(error).split('.')[0]}")
dist.destroy_process_group()
PY
PYTHONPATH="$folder/site" "$python" -W ignore "$folder/try.py" "$folder"
