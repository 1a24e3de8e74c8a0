#!/usr/bin/env bash
# Guess: gradient checkpointing changes memory and time alone. The balance loss of a sparse model is a term of the loss,
# so its gradient reaches the routers with checkpointing too.
# Seen in transformers 5.23.0 with torch 2.13.0: not with use_reentrant=True. The router logits of the first forward pass,
# of which the term is computed, then have no graph. The loss contains the term and equals that without checkpointing, but
# routers get the gradient of the predicted tokens alone. No warning says so.
# Gradient norm of the first router, with router_aux_loss_coef 0 and 10:
#   without checkpointing     loss 4.1628 router 0.00046 | loss 24.2078 router 0.59214
#   use_reentrant=False       loss 4.1628 router 0.00046 | loss 24.2078 router 0.59214
#   use_reentrant=True        loss 4.1628 router 0.00046 | loss 24.2078 router 0.00046
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))


def trained(coefficient, reentrant):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    experts = {"num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    balance = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    model = OlmoeForCausalLM(OlmoeConfig(**sizes, **experts, **tokens, **balance, use_cache=False)).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), model.model.layers[0].mlp.gate.weight.grad.norm().item()


found = {}
for reentrant, name in ((None, "without checkpointing"), (False, "use_reentrant=False"), (True, "use_reentrant=True")):
    found[reentrant] = [trained(coefficient, reentrant) for coefficient in (0.0, 10.0)]
    print(name.ljust(25), " | ".join(f"loss {loss:.4f} router {norm:.5f}" for loss, norm in found[reentrant]))
(plain, balanced), (_, kept), (_, lost) = found[None], found[False], found[True]
assert balanced[1] > 100 * plain[1], "the term reaches the router"
assert abs(kept[1] / balanced[1] - 1) < 1e-4, "and with checkpointing that keeps the graph"
assert abs(lost[0] / balanced[0] - 1) < 1e-6, "the loss contains the term"
assert abs(lost[1] / plain[1] - 1) < 1e-4, "the term now reaches the router with use_reentrant=True"
PY
"$folder/venv/bin/python" -W ignore "$folder/try.py"
