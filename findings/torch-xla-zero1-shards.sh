#!/usr/bin/env bash
# Guess: ZeRO-1 of torch_xla cuts one flat buffer of all parameters, as Megatron-LM and DeepSpeed do, and a saved state has
# the numbers that it had.
# Seen in torch_xla 2.9.0 with torch 2.9.0: each parameter is cut by itself, by its rows, with zeros at the end up to equal
# shards; xser.save makes lists of tuples, also of torch.Size; and before its first step the optimizer's groups lack all
# options that were not given, such as eps.
#   the last of 4 ranks: [[2, 4], [1]] of [7, 4] and [2], with 4 and 1 zeros; shape_info after xser.save a list; eps absent
# PYTHON names an interpreter that has torch==2.9.0 and torch_xla==2.9.0 (default: one is made).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/env"
    PYTHON=$folder/env/bin/python
    "$PYTHON" -m pip install --quiet torch==2.9.0 torch_xla==2.9.0 numpy
fi
cat > "$folder/try.py" <<'PY'
import os
import sys

os.environ["PJRT_DEVICE"] = "CPU"
import torch
import torch_xla
import torch_xla.utils.serialization as xser
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

device = torch_xla.device()
matrix, vector = (torch.nn.Parameter(torch.ones(size, device=device)) for size in ((7, 4), (2,)))
optimizer = ZeroRedundancyOptimizer(
    [matrix, vector], torch.optim.AdamW, lr=1e-3, sharding_groups=[[0, 1, 2, 3]], lazy_init=True, pin_layout=False
)
optimizer.global_rank = 3
optimizer.init_zero()
shards = [shard.detach().cpu() for shard in optimizer.base_optimizer.param_groups[0]["params"]]
padding = [int((shard.flatten() == 0).sum()) for shard in shards]
path = f"{sys.argv[1]}/state.pt"
xser.save(optimizer.state_dict(), path, master_only=False)
shape = xser.load(path)["shape_info"][0]
absent = "eps" not in optimizer.state_dict()["param_groups"][0]
print([list(shard.shape) for shard in shards], padding, shape, type(shape).__name__, "eps absent" if absent else "eps")
assert [list(shard.shape) for shard in shards] == [[2, 4], [1]], "parameters are cut in another way now"
assert padding == [4, 1], "the last shard has no row of zeros now"
assert shape == [7, 4] and type(shape) is list, "xser.save keeps tuples now"
assert absent, "the groups have all options from the start now"
PY
"$PYTHON" -W ignore "$folder/try.py" "$folder"
