#!/usr/bin/env bash
# Guess: set_model_state_dict of torch.distributed.checkpoint with strict=True refuses a state that lacks a weight, as
# load_state_dict does, and with strict=False it names what was missing.
# Seen in torch 2.13.0: with StateDictOptions(full_state_dict=True) the lacking weights are filled in from the model itself
# before the check. So the model keeps its new values for them, "all keys matched", and no weight is named. It is so with
# FSDP2 too. broadcast_from_rank0=True refuses with strict=True. Of a weight with a wrong name, the one that is too many alone
# is named, and the one that is missing is not.
#   load_state_dict                       RuntimeError: Missing key(s)
#   set_model_state_dict                  RuntimeError: Missing key(s)
#   set_model_state_dict, full            <All keys matched successfully>, 1.weight is new
#   the same, strict=False                <All keys matched successfully>, 1.weight is new
#   the same, FSDP2                       <All keys matched successfully>, 1.weight is new
#   the same, broadcast_from_rank0        RuntimeError: Missing key(s)
#   the same, a wrong name                RuntimeError: Unexpected key(s)
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def made(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))


state = {name: weight for name, weight in made(1).state_dict().items() if name != "1.weight"}
loads = {
    "load_state_dict": lambda model: model.load_state_dict(dict(state)),
    "set_model_state_dict": lambda model: set_model_state_dict(model, dict(state)),
    "set_model_state_dict, full": lambda model: set_model_state_dict(
        model, dict(state), options=StateDictOptions(full_state_dict=True)
    ),
    "the same, strict=False": lambda model: set_model_state_dict(
        model, dict(state), options=StateDictOptions(full_state_dict=True, strict=False)
    ),
    "the same, FSDP2": lambda model: set_model_state_dict(
        fully_shard(model), dict(state), options=StateDictOptions(full_state_dict=True)
    ),
    "the same, broadcast_from_rank0": lambda model: set_model_state_dict(
        model, dict(state), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ),
}


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


assert torch.__version__.startswith("2.13."), torch.__version__
refused = []
for name, load in loads.items():
    model = made(0)
    try:
        keys = load(model)
    except RuntimeError as error:
        assert "Missing key(s)" in str(error) and "1.weight" in str(error)
        refused.append(name)
        print(f"{name:37} RuntimeError: Missing key(s)")
        continue
    assert torch.equal(whole(model[0].weight), state["0.weight"]), "the weights that are there are loaded"
    assert torch.equal(whole(model[1].weight), made(0)[1].weight)
    assert keys.missing_keys == [], "what is missing is now named"
    print(f"{name:37} {keys}, 1.weight is new")
wanted = ["load_state_dict", "set_model_state_dict", "the same, broadcast_from_rank0"]
assert refused == wanted, f"what refuses a state that lacks a weight is now {refused}"
try:
    set_model_state_dict(
        made(0), {**state, "1.wieght": torch.zeros(2, 3)}, options=StateDictOptions(full_state_dict=True)
    )
    raise AssertionError("a wrong name is now taken")
except RuntimeError as error:
    assert "Unexpected key(s)" in str(error) and "Missing" not in str(error), error
    print(f"{'the same, a wrong name':37} RuntimeError: Unexpected key(s)")
dist.destroy_process_group()
PY
"${PYTHON:-python3}" -W ignore "$folder/try.py"
