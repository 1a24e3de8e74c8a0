#!/usr/bin/env bash
# Guess: torch.distributed.checkpoint, given plain tensors that differ by rank under one name, such as states of a generator or
# counters of a data loader, refuses them, or saves those of the lowest rank.
# Seen in torch 2.13.0: it takes them for copies, and has each written by the rank that has the fewest bytes so far. So a
# checkpoint holds some names of one rank and some of another, a pair that no rank had; which ones changes with the sizes of
# other tensors. Every rank loads that. Objects that are no tensors are always those of rank 0. Nothing is said.
# DefaultSavePlanner(dedup_save_to_lowest_rank=True) saves all of rank 0. Rank 0 saves 10 everywhere, rank 1 saves 11:
#   by default: {'count': 10, 'place': 11, 'epoch': 10}, on both ranks
#   to the lowest rank: {'count': 10, 'place': 10, 'epoch': 10}, on both ranks
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as processes


def state(value: int) -> dict:
    return {"count": torch.full((4,), value), "place": torch.full((4,), value), "epoch": value}


def loaded(folder: str, rank: int, lowest: bool) -> list:
    planner = checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    checkpoint.save(state(10 + rank), checkpoint_id=folder, planner=planner)
    found = state(-1)
    checkpoint.load(found, checkpoint_id=folder)
    every = [None, None]
    dist.all_gather_object(every, {name: int(torch.as_tensor(value).max()) for name, value in found.items()})
    return every


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name, lowest, wanted in (("by default", False, 11), ("to the lowest rank", True, 10)):
        first, second = loaded(f"{folder}/{lowest}", rank, lowest)
        if rank == 0:
            print(f"{name}: {first}, on {'both ranks' if first == second else 'one rank'}", flush=True)
        assert first == second == {"count": 10, "place": wanted, "epoch": 10}, "other ranks' values are now saved"
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.startswith("2.13."), torch.__version__
    processes.spawn(work, (sys.argv[1],), nprocs=2)
PY
export OMP_NUM_THREADS=1
"${PYTHON:-python3}" -W ignore "$folder/try.py" "$folder" 2> "$folder/said" || { cat "$folder/said" >&2 && exit 1; }
