#!/usr/bin/env bash
# Guess: optimizers of one name and with the same lr, betas, eps and weight_decay update weights alike in every library.
# Seen in torch 2.13.0, pytorch_optimizer 4.1.0 and heavyball 3.2.1: Adam, NAdam and LaProp do, within 1e-6. RAdam and ADOPT
# do not. RAdam of pytorch_optimizer leaves weights as they are for five steps, until the variance can be rectified, where
# torch's takes steps by the mean of gradients; degenerated_to_sgd=True makes them equal. ADOPT of heavyball divides the
# mean of gradients by 1 - beta1^t, as Adam does, and that of pytorch_optimizer does not: with beta1 = 0.9 the first step
# that moves weights, its second, is ten times as long.
#                                                  greatest change of a weight after 2 steps      after 40, difference
#   Adam     torch, heavyball                      0.02      0.02                                 1e-07
#   RAdam    torch, pytorch_optimizer              0.235     0                                    0.5
#   RAdam    the same, degenerated_to_sgd=True     0.235     0.235                                6e-08
#   ADOPT    pytorch_optimizer, heavyball          0.001     0.01                                 0.2
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install -q --no-deps --target "$folder/site" pytorch_optimizer==4.1.0 heavyball==3.2.1
cat > "$folder/try.py" <<'PY'
from importlib.metadata import version

import heavyball
import pytorch_optimizer
import torch

assert torch.__version__.startswith("2.13."), torch.__version__
assert (version("pytorch_optimizer"), version("heavyball")) == ("4.1.0", "3.2.1")
heavyball.utils.compile_mode = None


def trained(optimizer_class: type, steps: int, **more: object) -> torch.Tensor:
    torch.manual_seed(0)
    matrix, vector = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (5,)))
    x = torch.randn(8, 6)
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, **more}
    optimizer = optimizer_class([matrix, vector], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        product = x @ matrix
        loss = product.tanh().square().sum() + (product - 1).square().mean() + vector.pow(4).sum() + vector.sin().sum()
        loss.backward()
        optimizer.step()
    return torch.cat([matrix.detach().flatten(), vector.detach()])


def compare(name: str, first: type, second: type, equal: bool, **more: object) -> tuple[float, float]:
    changes = [
        float((trained(each, 2, **options) - trained(each, 0, **options)).abs().max())
        for each, options in ((first, {}), (second, more))
    ]
    difference = float((trained(first, 40) - trained(second, 40, **more)).abs().max())
    print(f"{name:50} {changes[0]:<9.3g} {changes[1]:<9.3g} {difference:.0e}")
    assert (difference < 1e-5) == equal, f"{name}: the difference is now {difference}"
    return changes[0], changes[1]


compare("Adam     torch, heavyball", torch.optim.Adam, heavyball.AdamW, True)
compare("NAdam    torch, heavyball", torch.optim.NAdam, heavyball.NAdam, True)
compare("LaProp   pytorch_optimizer, heavyball", pytorch_optimizer.LaProp, heavyball.LaProp, True)
moved = compare("RAdam    torch, pytorch_optimizer", torch.optim.RAdam, pytorch_optimizer.RAdam, False)
assert moved[0] > 0.1 and moved[1] == 0, "RAdam of pytorch_optimizer now moves weights in its first steps"
compare(
    "RAdam    the same, degenerated_to_sgd=True", torch.optim.RAdam, pytorch_optimizer.RAdam, True,
    degenerated_to_sgd=True,
)  # fmt: skip
moved = compare("ADOPT    pytorch_optimizer, heavyball", pytorch_optimizer.ADOPT, heavyball.ADOPT, False)
assert abs(moved[1] / moved[0] - 10) < 0.01, "the first steps of ADOPT now have another ratio"
PY
PYTHONPATH="$folder/site" "$python" -W ignore "$folder/try.py"
