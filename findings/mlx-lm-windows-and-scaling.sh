#!/usr/bin/env bash
# Guess: mlx-lm refuses a model whose attention window or rotary scaling its classes lack, or computes it.
# Seen in mlx-lm 0.32.2 with config.json fields in the places that it reads, in float32: the fields are dropped without a
# word. Largest difference of a log-probability from transformers 5.23.0 on 48 tokens:
#   mistral without a window                 0.000
#   mistral, sliding_window 8                above 0.1
#   qwen2, use_sliding_window, window 8      above 0.1
#   llama, rope_scaling linear               0.000
#   mixtral, rope_scaling linear             above 0.1
#   qwen3_moe, rope_scaling linear           above 0.1
#   gpt_neox, rope_scaling linear            above 0.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 torch==2.13.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
cat > "$folder/try.py" <<'PY'
import json, sys
from pathlib import Path
import mlx.core as mx
import numpy, torch, transformers
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
SIZES = {
    "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 128,
    "intermediate_size": 512, "max_position_embeddings": 64, "head_dim": 32, "sliding_window": None,
}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
CASES = [
    ("mistral", SIZES, None, False),
    ("mistral", SIZES | {"sliding_window": 8}, None, True),
    ("qwen2", SIZES | WINDOW, None, True),
    ("llama", SIZES, LINEAR, False),
    ("mixtral", SIZES | EXPERTS, LINEAR, True),
    ("qwen3_moe", SIZES | EXPERTS, LINEAR, True),
    ("gpt_neox", SIZES, LINEAR, True),
]
for family, fields, scaling, differs in CASES:
    rotary = {"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})}
    if family == "gpt_neox":
        rotary["partial_rotary_factor"] = 0.25
    config = transformers.AutoConfig.for_model(family, **fields, rope_parameters=rotary)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float(parameter.dim() == 1 and not name.endswith("bias")), 0.08)
    model.save_pretrained(sys.argv[1] + "/model")
    # mlx-lm reads the fields of transformers 4.
    file = Path(sys.argv[1], "model/config.json")
    old = {"rope_theta": 10000.0, "rotary_emb_base": 10000, "rotary_pct": 0.25, "rope_scaling": scaling}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields | old))
    ids = torch.randint(0, 256, (1, 48))
    with torch.no_grad():
        wanted = torch.log_softmax(model(ids).logits[0], -1)
    opened, _ = load_model(Path(sys.argv[1], "model"))
    found = torch.tensor(numpy.array(opened(mx.array(ids.tolist()))[0].astype(mx.float32)))
    by = (torch.log_softmax(found, -1) - wanted).abs().max().item()
    print(f"{family}: {by:.3f}")
    assert (by > 0.1) is differs and (by < 1e-3) is not differs, "this has changed"
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/try.py" "$folder"
