#!/usr/bin/env bash
# Guess: what safetensors writes of a tensor, get_slice reads by parts, as it does of other dtypes.
# Seen in safetensors 0.8.0 with torch 2.13.0: a tensor of float4_e2m1fn_x2, two numbers a byte, is saved with the dtype F4 and
# the shape in numbers, and comes back by get_tensor with the shape in bytes. get_slice takes the numbers for bytes, and raises
# for any part, also for all. So a program that reads its ranks' parts, as shards of large models are read, cannot read such
# a file; and shapes of the header must be halved in their last dimension to be those of the tensor.
#   F8_E4M3: header [2, 6], get_tensor (2, 6), get_slice (2, 6)
#   F4: header [2, 12], get_tensor (2, 6), get_slice RuntimeError
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and pip (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install -q --no-deps --target "$folder/site" safetensors==0.8.0
cat > "$folder/try.py" <<'PY'
import sys

import safetensors
import torch
from safetensors.torch import save_file

assert safetensors.__version__ == "0.8.0", safetensors.__version__
path = f"{sys.argv[1]}/a.safetensors"
sliced = {}
for dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
    tensor = torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(dtype)
    save_file({"a": tensor}, path)
    with safetensors.safe_open(path, "pt") as file:
        part = file.get_slice("a")
        whole = file.get_tensor("a")
        assert torch.equal(whole.view(torch.uint8), tensor.view(torch.uint8))
        try:
            sliced[part.get_dtype()] = str(tuple(part[:].shape))
        except RuntimeError:
            sliced[part.get_dtype()] = "RuntimeError"
        print(f"{part.get_dtype()}: header {part.get_shape()}, get_tensor {tuple(whole.shape)},", end=" ")
    print("get_slice", sliced[part.get_dtype()])
assert sliced == {"F8_E4M3": "(2, 6)", "F4": "RuntimeError"}, "get_slice now reads F4"
PY
PYTHONPATH="$folder/site" "$python" -W ignore "$folder/try.py" "$folder"
