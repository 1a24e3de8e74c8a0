#!/usr/bin/env bash
# Guess: set_model_state_dict of torch.distributed.checkpoint with strict=True refuses a state that lacks a weight, as
# load_state_dict does, and with strict=False it names what was missing.
# Seen in torch 2.13.0: with StateDictOptions(full_state_dict=True) the lacking weights are filled in from the model itself
# before the check. So the model keeps its new values for them, "all keys matched", and no weight is named. It is so with
# FSDP2 and in a process by itself. Only broadcast_from_rank0=True with strict=True refuses; a weight of a wrong name is seen
# only by the one that is too many.
#   load_state_dict                       RuntimeError: Missing key(s)
#   set_model_state_dict                  RuntimeError: Missing key(s)
#   set_model_state_dict, full            <All keys matched successfully>, 1.weight is new
#   the same, strict=False                <All keys matched successfully>, 1.weight is new
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another (default: python3).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


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
}
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
    assert torch.equal(model[0].weight, state["0.weight"]), "the weights that are there are loaded"
    assert torch.equal(model[1].weight, made(0)[1].weight)
    assert keys.missing_keys == [], "what is missing is now named"
    print(f"{name:37} {keys}, 1.weight is new")
assert refused == ["load_state_dict", "set_model_state_dict"], "a full state that lacks a weight is now refused"
PY
"${PYTHON:-python3}" -W ignore "$folder/try.py"
