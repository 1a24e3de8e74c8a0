#!/usr/bin/env bash
# torch 2.13.0, on an x86 CPU without AVX-512 (others are asked to work without it).
# Guess: a product of matrices in bfloat16 has the same bits whether a matrix lies in memory by rows or by columns, and so
# has torch.optim.Muon's update of a parameter, whose Newton-Schulz iteration is made of such products.
# Seen: without AVX-512 no oneDNN kernel takes bfloat16, and the product x @ x.T rounds otherwise for another order in
# memory. Of two parameters with equal values and gradients, one a transposed view, Muon makes other weights.
#   products that differ: 6 of 65536, weights after a step differ by up to 3.9e-05
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(256, 768).bfloat16()
by_columns = x.T.contiguous().T
assert torch.equal(x, by_columns)
differing = (x @ x.T != by_columns @ by_columns.T).sum().item()


def after_a_step(layout):
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(layout(torch.randn(256, 768)))
    parameter.grad = layout(torch.randn(256, 768))
    torch.optim.Muon([parameter], lr=0.02, weight_decay=0.0).step()
    return parameter.detach()


largest = (after_a_step(torch.Tensor.contiguous) - after_a_step(lambda x: x.T.contiguous().T)).abs().max().item()
print(f"products that differ: {differing} of {256 * 256}, weights after a step differ by up to {largest:.1e}")
assert differing > 0
assert largest > 1e-6
PROGRAM
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 "$python" "$work/run.py"
