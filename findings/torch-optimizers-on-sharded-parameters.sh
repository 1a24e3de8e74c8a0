#!/usr/bin/env bash
# Guess: each optimizer of torch.optim updates the sharded parameters of FSDP2 (fully_shard) as it updates whole ones, or its
# documentation says that it does not.
# Seen in torch 2.13.0: Adafactor, made to save memory, and Rprop end at their first step with "in-place operations that
# require placement changes are not supported", which names neither optimizer nor parameter. Muon does so only for a
# parameter with fewer rows than ranks. The others give the weights of one process, Muon up to rounding in bfloat16.
#   [7, 12] on 2 ranks: refused Adafactor, Rprop
#   [1, 8] on 2 ranks: refused Adafactor, Muon, Rprop
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and numpy (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import logging
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD".split()


def run(rank):
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for shape, wanted in (((7, 12), ["Adafactor", "Rprop"]), ((1, 8), ["Adafactor", "Muon", "Rprop"])):
        refused = []
        for name in NAMES:
            torch.manual_seed(0)
            layer = nn.Linear(shape[1], shape[0], bias=False)
            whole = nn.Parameter(layer.weight.detach().clone())
            before = whole.detach().clone()
            fully_shard(layer, mesh=mesh)
            optimizers = [getattr(optim, name)([weight], lr=0.1) for weight in (layer.weight, whole)]
            for _ in range(3):
                whole.grad = torch.randn(shape)
                layer.weight.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
                try:
                    for optimizer in optimizers:
                        optimizer.step()
                except RuntimeError as error:
                    assert "in-place operations that require placement changes" in str(error), error
                    refused.append(name)
                    break
            else:
                off = (layer.weight.full_tensor() - whole).abs().max() / (whole - before).abs().max()
                assert off < (0.05 if name == "Muon" else 1e-5), (name, off)
        if rank == 0:
            print(f"{[*shape]} on 2 ranks: refused {', '.join(refused)}", flush=True)
        assert refused == wanted, refused
    dist.barrier()
    os._exit(0)  # without waiting for collectives that a refusal left open


if __name__ == "__main__":
    assert torch.__version__.startswith("2.13.0"), torch.__version__
    torch.multiprocessing.spawn(run, nprocs=2)
PROGRAM
cd "$work"
OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log || { tail -5 log; exit 1; }
