#!/usr/bin/env bash
# Guess: an optimizer whose groups are not those of a checkpoint, as after a change of what decays or of what is frozen, is
# refused by torch.distributed.checkpoint, or keeps its own learning rates and weight decay.
# Seen in torch 2.13.0 (get_optimizer_state_dict, load, set_optimizer_state_dict): by default a group takes the values of the
# saved group of the same number, and has no learning rate at all if that held none of its parameters. With
# flatten_optimizer_state_dict=True it takes those of the group that held its first parameter. Nothing warns.
# Saved: matrices with lr 0.1, weight_decay 0.3; biases with lr 0.2, weight_decay 0. Loaded into one group with lr 9:
#   all parameters: by default lr 0.1, weight_decay 0.3; flattened lr 0.1, weight_decay 0.3
#   without the first matrix: by default lr 0.1, weight_decay 0.3; flattened lr 0.2, weight_decay 0.0
#   biases alone: by default lr None, weight_decay None; flattened lr 0.2, weight_decay 0.0
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and numpy (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
)

assert torch.__version__.startswith("2.13.0"), torch.__version__


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


seen = {}
for flat in (False, True):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = model()
    matrices, biases = ([p for p in saved.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": matrices, "lr": 0.1, "weight_decay": 0.3}, {"params": biases, "lr": 0.2, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    saved(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(get_optimizer_state_dict(saved, optimizer, options=options), checkpoint_id=f"saved-{flat}", no_dist=True)
    for name, frozen in (("all parameters", ()), ("without the first matrix", (0,)), ("biases alone", (0, 1))):
        loaded = model()
        for number in frozen:
            loaded[number].weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in loaded.parameters() if p.requires_grad], lr=9.0)
        state = get_optimizer_state_dict(loaded, optimizer, options=options)
        checkpoint.load(state, checkpoint_id=f"saved-{flat}", no_dist=True)
        set_optimizer_state_dict(loaded, optimizer, state, options=options)
        (group,) = optimizer.param_groups
        seen.setdefault(name, []).append((group.get("lr"), group.get("weight_decay")))
for name, values in seen.items():
    shown = [f"lr {lr}, weight_decay {decay}" for lr, decay in values]
    print(f"{name}: by default {shown[0]}; flattened {shown[1]}")
assert seen["all parameters"] == [(0.1, 0.3), (0.1, 0.3)], "this has changed"
assert seen["without the first matrix"] == [(0.1, 0.3), (0.2, 0.0)], "this has changed"
assert seen["biases alone"] == [(None, None), (0.2, 0.0)], "this has changed"
PROGRAM
cd "$work"
OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log || { tail -5 log; exit 1; }
