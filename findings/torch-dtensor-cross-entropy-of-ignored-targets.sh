#!/usr/bin/env bash
# Guess: cross_entropy of logits and targets that are DTensors, cut along the batch, is that of the whole batch: its mean
# counts the targets that are not ignore_index, wherever they are. Gradients agree with the loss.
# Seen in torch 2.13.0: the loss is the mean of the ranks' means, each with the same weight, and NaN where a rank has no
# counted target, as a sample of a prompt or of padding alone. Gradients are those of the mean over the whole batch, also
# where the loss is NaN. Nothing warns. So a training is right, and its log is not; a run that stops at NaN stops. With
# reduction="sum", or with the logits cut along the vocabulary, the loss is right too.
#   ignored targets of 8, on 2 ranks      loss     whole batch   gradients right
#   none                                  2.7835   2.7835        True
#   0, 1 and 2                            3.2411   3.1796        True
#   0 to 3, all of rank 0                 nan      2.5079        True
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and numpy (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def run(rank):
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    for ignored in (0, 3, 4):
        logits, targets = torch.randn(8, 11), torch.randint(0, 11, (8,))
        targets[:ignored] = -100
        whole = logits.clone().requires_grad_()
        wanted = F.cross_entropy(whole, targets)
        wanted.backward()
        cut = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
        loss = F.cross_entropy(cut, distribute_tensor(targets, mesh, [Shard(0)]))
        loss.backward()
        total = F.cross_entropy(cut, distribute_tensor(targets, mesh, [Shard(0)]), reduction="sum").full_tensor()
        value, gradient = loss.full_tensor().item(), cut.grad.full_tensor()
        if rank == 0:
            is_right = torch.allclose(gradient, whole.grad, atol=1e-6)
            print(f"{ignored} ignored: loss {value:.4f}, whole batch {wanted:.4f}, gradients right {is_right}")
        assert torch.allclose(gradient, whole.grad, atol=1e-6)
        assert torch.allclose(total / (8 - ignored), wanted)
        assert math.isnan(value) if ignored == 4 else (abs(value - wanted.item()) < 1e-5) is (ignored == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.startswith("2.13.0"), torch.__version__
    torch.multiprocessing.spawn(run, nprocs=2)
PROGRAM
cd "$work"
OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log || { tail -5 log; exit 1; }
