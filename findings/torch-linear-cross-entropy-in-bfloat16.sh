#!/usr/bin/env bash
# torch 2.13.0 (torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions), on a CPU.
# Guess: with options, which compute the head and its loss in chunks of tokens, the loss is that without options up to
# rounding: 8 bits of a bfloat16 number, 0.4%.
# Seen: in bfloat16 the sum over chunks is a bfloat16 number too. With the default options and a vocabulary of 32,000,
# 2,048 tokens are hundreds of chunks, whose small terms are rounded away: the loss, also the mean, is 15% too low. The
# gradients are right, so that a training goes on and logs such losses. Nothing warns. With float32 inputs the loss is
# right.
#   exact 10.3869, without options 10.3750, with LinearCrossEntropyOptions() 8.8750
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import torch
import torch.nn.functional as F

assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
x = torch.randn(2048, 64).bfloat16()
weight = torch.randn(32000, 64).mul(0.02).bfloat16()
targets = torch.randint(32000, (2048,))
exact = F.cross_entropy(F.linear(x.float(), weight.float()), targets)
whole = F.linear_cross_entropy(x, weight, targets)
x.requires_grad_()
chunked = F.linear_cross_entropy(x, weight, targets, options=torch.nn.LinearCrossEntropyOptions())
chunked.backward()
y = x.detach().float().requires_grad_()
F.cross_entropy(F.linear(y, weight.float()), targets).backward()
error = ((x.grad.float() - y.grad).norm() / y.grad.norm()).item()
print(f"exact {exact:.4f}, without options {whole:.4f}, with LinearCrossEntropyOptions() {chunked:.4f}")
assert abs(whole / exact - 1) < 0.005
assert chunked / exact < 0.9
assert error < 0.01, "the gradient is right"
PROGRAM
"$python" "$work/run.py"
