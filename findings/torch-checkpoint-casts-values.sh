#!/usr/bin/env bash
# Guess: torch.distributed.checkpoint, which refuses a tensor of another size, also refuses one of another dtype, or warns.
# Seen in torch 2.13.0: load copies into the tensor that is given, and what its dtype cannot hold is another value then. Nothing
# is said. A count of tokens that was saved as int64 is negative in a program that has int32 for it, and one in float32 goes
# on from a rounded count. The metadata beside the file names the dtype that was saved.
#   saved 3000000001 as torch.int64
#   loaded into torch.int64: 3000000001
#   loaded into torch.int32: -1294967295
#   loaded into torch.float32: 3000000000
#   loaded into torch.bfloat16: 3003121664
#   two numbers: refused
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import sys

import torch
import torch.distributed.checkpoint as checkpoint

assert torch.__version__.startswith("2.13."), torch.__version__
TOKENS = 3_000_000_001
checkpoint.save({"tokens": torch.tensor([TOKENS])}, checkpoint_id=sys.argv[1])
saved = checkpoint.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata["tokens"].properties.dtype
print(f"saved {TOKENS} as {saved}")
loaded = {}
for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16):
    state = {"tokens": torch.zeros(1, dtype=dtype)}
    checkpoint.load(state, checkpoint_id=sys.argv[1])
    loaded[dtype] = int(state["tokens"])
    print(f"loaded into {dtype}: {loaded[dtype]}")
wanted = [TOKENS, TOKENS - 2**32, 3_000_000_000, 3_003_121_664]
assert list(loaded.values()) == wanted, "another dtype is now told apart"
try:
    checkpoint.load({"tokens": torch.zeros(2, dtype=torch.int64)}, checkpoint_id=sys.argv[1])
    print("two numbers: loaded")
except checkpoint.api.CheckpointException:
    print("two numbers: refused")
PY
export OMP_NUM_THREADS=1
"${PYTHON:-python3}" -W ignore "$folder/try.py" "$folder/saved" 2> "$folder/said" || { cat "$folder/said" >&2 && exit 1; }
