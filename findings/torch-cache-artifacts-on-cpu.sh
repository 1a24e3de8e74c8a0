#!/usr/bin/env bash
# torch 2.13.0 (torch.compiler.save_cache_artifacts, load_cache_artifacts), on a CPU; needs g++.
# Guess: a process that loads the artifacts of another one, and counts each graph as a cache hit, compiles nothing.
# Seen: artifacts hold the kernels of a GPU, and of a CPU's kernels their C++ source alone. A process that loads them into
# an empty folder counts a hit and no miss, and runs the C++ compiler for each kernel all the same; without a compiler
# it ends with InvalidCxxCompiler. So the counters do not tell that a machine compiles, and a start is as slow as a cold one.
#   saved: hits 0, misses 1, libraries of kernels in the folder 2
#   loaded: hits 1, misses 0, libraries of kernels in the folder 2
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

assert torch.__version__.startswith("2.13.0"), torch.__version__
mode, artifacts, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if mode == "loaded":
    assert torch.compiler.load_cache_artifacts(artifacts.read_bytes()) is not None
x = torch.ones(64, 64, requires_grad=True)
torch.compile(lambda x: torch.softmax(torch.sin(x) * 2, -1).sum(), backend="inductor")(x).backward()
if mode == "saved":
    artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
counts = counters["aot_autograd"]
hits, misses = counts["autograd_cache_hit"], counts["autograd_cache_miss"]
libraries = len(list(folder.rglob("*.main.so")))
print(f"{mode}: hits {hits}, misses {misses}, libraries of kernels in the folder {libraries}")
sys.exit((hits, misses, libraries > 0) != ((0, 1, True) if mode == "saved" else (1, 0, True)))
PROGRAM
for mode in saved loaded; do
  TORCHINDUCTOR_CACHE_DIR="$work/$mode" "$python" "$work/run.py" "$mode" "$work/artifacts" "$work/$mode"
done
