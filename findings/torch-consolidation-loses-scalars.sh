#!/usr/bin/env bash
# Guess: a file that torch.distributed.checkpoint consolidates from its safetensors shards has the tensors that were saved.
# Seen in torch 2.13.0 with safetensors 0.8.0: a tensor without dimensions, such as a learned temperature, has its name and
# dtype in the consolidated file and the value 0, by HuggingFaceStorageWriter(enable_consolidation=True) and by
# consolidate_safetensors_files alike. Nothing warns. The shards in `sharded` beside it have the value, and a parameter of the
# shape [1] is copied.
#   scalar 5.0 -> shard 5.0, consolidated 0.0; [1] 7.0 -> shard 7.0, consolidated 7.0
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, numpy and safetensors==0.8.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

assert torch.__version__.startswith("2.13.0"), torch.__version__
assert safetensors.__version__ == "0.8.0", safetensors.__version__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state = {"scalar": torch.tensor(5.0), "one": torch.tensor([7.0]), "weight": torch.ones(2, 3)}
checkpoint.save(
    state, storage_writer=HuggingFaceStorageWriter("saved", save_distributed=True, enable_consolidation=True)
)
shard = load_file("saved/sharded/shard-00001-model-00001-of-00001.safetensors")
whole = load_file("saved/model-00001-of-00001.safetensors")
seen = [float(values[name].sum()) for name in ("scalar", "one") for values in (shard, whole)]
print("scalar 5.0 -> shard {}, consolidated {}; [1] 7.0 -> shard {}, consolidated {}".format(*seen))
assert whole.keys() == state.keys() and torch.equal(whole["weight"], state["weight"])
assert seen == [5.0, 0.0, 7.0, 7.0], seen
dist.destroy_process_group()
PROGRAM
cd "$work"
"$python" -W ignore run.py
