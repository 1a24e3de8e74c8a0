#!/usr/bin/env bash
# Guess: HuggingFaceStorageWriter of torch.distributed.checkpoint, given the sharded tensors of FSDP2 or tensor parallelism
# on several ranks, writes whole tensors, or says that save_distributed=True is needed.
# Seen in torch 2.13.0 with safetensors 0.8.0: by default (save_distributed=False) each rank writes its own part to the one
# name model-00001-of-00001.safetensors, and the last one remains. save returns on every rank without a word, and
# model.safetensors.index.json counts the bytes of all. Which rank's part remains differs from run to run. A missing tensor
# is one that another rank was to write.
#   saved [8, 4] on 4 ranks: file [2, 4], total_size of the index 128
#   save_distributed=True, enable_consolidation=True: file [8, 4]
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, numpy and safetensors==0.8.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import json

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def save(rank):
    dist.init_process_group("gloo", store=dist.FileStore("store", 4), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    state = {"weight": distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])}
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter("default"))
    options = {"save_distributed": True, "enable_consolidation": True}
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter("whole", **options))
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.startswith("2.13.0"), torch.__version__
    assert safetensors.__version__ == "0.8.0", safetensors.__version__
    torch.multiprocessing.spawn(save, nprocs=4)
    part, whole = (load_file(f"{name}/model-00001-of-00001.safetensors")["weight"] for name in ("default", "whole"))
    size = json.load(open("default/model.safetensors.index.json"))["metadata"]["total_size"]
    print(f"saved [8, 4] on 4 ranks: file {[*part.shape]}, total_size of the index {size}")
    print(f"save_distributed=True, enable_consolidation=True: file {[*whole.shape]}")
    assert ([*part.shape], size, [*whole.shape]) == ([2, 4], 128, [8, 4])
    assert part.flatten().tolist() in [list(range(start, start + 8)) for start in range(0, 32, 8)]
PROGRAM
cd "$work"
OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log
