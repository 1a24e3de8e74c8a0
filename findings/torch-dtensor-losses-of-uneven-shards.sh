#!/usr/bin/env bash
# Guess: a loss of a DTensor is that of the whole tensor, whether or not the ranks divide its rows, as its mean is.
# Seen in torch 2.13.0: mse_loss, smooth_l1_loss, huber_loss and binary_cross_entropy_with_logits with their default
# reduction "mean" take the mean of the ranks' means, each with the same weight. Where ranks have unequal numbers of rows, the
# loss is another, and so are gradients; nothing warns. DTensor.mean of the same differences is right, and cross_entropy
# refuses such rows. With reduction="sum" all are right.
#   7 rows on 3 ranks, values 1 to 7: mean of squares 20.0000, mse_loss 26.4444
#   mse_loss right False, smooth_l1_loss right False, huber_loss right False, binary_cross_entropy_with_logits right False
#   sums right True True True True, losses of 6 rows right True True True True
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and numpy (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

NAMES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


def run(rank):
    dist.init_process_group("gloo", store=dist.FileStore("store", 3), rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))

    def right(name, rows, reduction):
        whole = torch.arange(1.0, rows + 1)
        cut = distribute_tensor(whole, mesh, [Shard(0)])
        loss = getattr(F, name)
        wanted = loss(whole, torch.zeros_like(whole), reduction=reduction)
        return torch.allclose(loss(cut, torch.zeros_like(cut), reduction=reduction).full_tensor(), wanted)

    cut = distribute_tensor(torch.arange(1.0, 8), mesh, [Shard(0)])
    mean, loss = cut.square().mean().full_tensor(), F.mse_loss(cut, torch.zeros_like(cut)).full_tensor()
    seen = [[right(name, *case) for name in NAMES] for case in ((7, "mean"), (7, "sum"), (6, "mean"))]
    if rank == 0:
        print(f"7 rows on 3 ranks, values 1 to 7: mean of squares {mean:.4f}, mse_loss {loss:.4f}")
        print(", ".join(f"{name} right {value}" for name, value in zip(NAMES, seen[0])))
        print("sums right", *seen[1], end=", losses of 6 rows right ")
        print(*seen[2])
    assert seen == [[False] * 4, [True] * 4, [True] * 4], seen
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.startswith("2.13.0"), torch.__version__
    torch.multiprocessing.spawn(run, nprocs=3)
PROGRAM
cd "$work"
OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log || { tail -5 log; exit 1; }
