#!/usr/bin/env bash
# Guess: transformers runs a sparse model of any width, as it runs a dense one: where torch's grouped product cannot take the
# experts, it takes the loop over experts that it also has.
# Seen in transformers 5.23.0 and 5.24.0 with torch 2.13.0 on a CPU: the default is grouped_mm, which wants rows of a multiple
# of 16 bytes: widths that 4 divides in float32, and 8 in bfloat16. Any other model of OLMoE, Qwen3-MoE or Mixtral opens, and
# its first forward ends with "strides should be multiple of 16 bytes", which names neither the width nor the way out. So a
# model may run in float32 and not in bfloat16. With experts_implementation="eager" or "batched_mm" all of them run.
#   width 32: float32 right, bfloat16 right
#   width 36: float32 right, bfloat16 refused
#   width 30: float32 refused, bfloat16 refused
# PYTHON names an interpreter that has torch==2.13.0 and what transformers needs (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

assert transformers.__version__ == sys.argv[1]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
ids = torch.arange(40)[None]


def run(family, width, dtype, **options):
    config = AutoConfig.for_model(
        family, **SIZES, **EXPERTS, **TOKENS, intermediate_size=width, moe_intermediate_size=width
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
    with torch.no_grad():
        return model(ids).logits.float()


for width, wanted in ((32, ["right", "right"]), (36, ["right", "refused"]), (30, ["refused", "refused"])):
    for family in ("olmoe", "qwen3_moe", "mixtral"):
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            loop = run(family, width, dtype, experts_implementation="eager")
            try:
                close = torch.allclose(run(family, width, dtype), loop, atol=0.05)
                found.append("right" if close else "wrong")
            except RuntimeError as error:
                assert "multiple of 16 bytes" in str(error), error
                found.append("refused")
        assert found == wanted, f"{family} of width {width} has changed: {found}"
    print(f"width {width}: float32 {wanted[0]}, bfloat16 {wanted[1]}")
PY
for version in 5.23.0 5.24.0; do
    "$python" -m pip install -q --no-deps --target "$folder/$version" "transformers==$version"
    PYTHONPATH="$folder/$version" HF_HUB_OFFLINE=1 "$python" -W ignore "$folder/try.py" "$version"
done
