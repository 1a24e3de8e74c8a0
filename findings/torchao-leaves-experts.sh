#!/usr/bin/env bash
# Guess: quantize_ of torchao stores the weights of a sparse model of transformers in 8 bits, its experts too, or warns.
# Seen in torchao 0.18.0 with transformers 5.23.0 and torch 2.13.0: the experts of a block are one parameter of three
# dimensions in transformers 5, and quantize_ takes modules of the class Linear alone. So attention is quantized, and the
# experts, most of the model, stay as they were, also by from_pretrained with TorchAoConfig. Nothing is said. Of all
# elements in the blocks, those in 8 bits:
#   llama        100%
#   qwen3_moe    4%
#   mixtral      4%
#   olmoe        4%
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, and transformers==5.23.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install -q --no-deps --target "$work/added" torchao==0.18.0
cat > "$work/run.py" <<'PROGRAM'
import torch
import torchao
import transformers
from torchao.quantization import Int8WeightOnlyConfig, quantize_

assert torch.__version__.startswith("2.13.0"), torch.__version__
assert (torchao.__version__.partition("+")[0], transformers.__version__) == ("0.18.0", "5.23.0")
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "eos_token_id": 0}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_local_experts": 16}
found = []
families = {"llama": {}, "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 128, "head_dim": 16}}
families |= {"mixtral": EXPERTS, "olmoe": EXPERTS}
for family, more in families.items():
    config = transformers.AutoConfig.for_model(family, **SIZES, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    quantize_(model, Int8WeightOnlyConfig())
    sizes = {True: 0, False: 0}
    for parameter in model.model.layers.parameters():
        sizes[type(parameter.data) is not torch.Tensor] += parameter.numel()
    found.append(round(100 * sizes[True] / sum(sizes.values())))
    print(f"{family:12} {found[-1]}%")
assert found == [100, 4, 4, 4], "this has changed"
PROGRAM
PYTHONPATH="$work/added" HF_HUB_OFFLINE=1 "$python" -W ignore "$work/run.py" 2>"$work/log" || { tail -5 "$work/log"; exit 1; }
