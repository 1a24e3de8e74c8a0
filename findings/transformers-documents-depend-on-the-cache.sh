#!/usr/bin/env bash
# Guess: position_ids that begin again at 0 within a row are numbers for the rotary embedding, or mark the bounds of documents,
# and a model of transformers gives the same logits with use_cache on and off, as the cache saves time alone.
# Seen in transformers 5.23.0 with torch 2.13.0 (eager, sdpa): they mark documents, so that attention does not cross the
# bounds, only if use_cache is False and no attention_mask is given. By default, use_cache is True, and the second document
# reads the first; an attention_mask of ones does the same. Nothing is said. So packed rows have another loss in a loop that
# calls model(ids, position_ids=...) than in training with use_cache=False, and than the documents by themselves.
# Largest difference of the second document's last logits from those of the document alone:
#                                    llama   qwen3   olmo2
#   use_cache=False                  0.000   0.000   0.000
#   default (use_cache=True)       above 0.1 for each
#   use_cache=False, mask of ones  above 0.1 for each
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and transformers==5.23.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

assert torch.__version__.startswith("2.13.0"), torch.__version__
assert transformers.__version__ == "5.23.0", transformers.__version__
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 2}  # fmt: skip
ids = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
CASES = {
    "use_cache=False": {"use_cache": False},
    "default (use_cache=True)": {},
    "use_cache=False, mask of ones": {"use_cache": False, "attention_mask": torch.ones_like(ids)},
}
for family in ("llama", "qwen3", "olmo2"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).eval()
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(float(parameter.dim() == 1), 0.1)
            alone = model(ids[:, 10:], position_ids=positions[:, 10:]).logits[0, -1]
            for name, options in CASES.items():
                by = (model(ids, position_ids=positions, **options).logits[0, -1] - alone).abs().max().item()
                print(f"{family} {attention}, {name}: {by:.3f}")
                assert by < 1e-4 if name == "use_cache=False" else by > 0.1, "this has changed"
PROGRAM
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" -W ignore "$work/run.py" 2>"$work/log" || { tail -5 "$work/log"; exit 1; }
