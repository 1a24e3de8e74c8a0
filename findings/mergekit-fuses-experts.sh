#!/usr/bin/env bash
# Guess: a merge of two folders of a sparse model by mergekit has the tensors of these folders, with other values.
# Seen in mergekit 0.1.5 with transformers 5.23.0: it has those that transformers 5 holds in memory. All experts of a block
# are one tensor of three dimensions, without ".weight", and Mixtral's have other names too. transformers reads both forms;
# mlx-lm and programs that look for one tensor an expert do not. Nothing is said. A dense model keeps its names.
#   llama      12 tensors read, 12 written
#   qwen3_moe  18 tensors read, 14 written, model.layers.0.mlp.experts.gate_up_proj [2, 64, 64]
#   mixtral    16 tensors read, 12 written, model.layers.0.mlp.experts.gate_up_proj [2, 64, 64]
# PYTHON names an interpreter that has torch, a CPU build or another, and transformers==5.23.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install -q --no-deps --target "$work/added" mergekit==0.1.5 immutables==0.21 peft==0.21.2 accelerate==1.15.0
"$python" -m pip install -q --target "$work/more" click==8.5.1 psutil==7.2.2 pydantic==2.14.3 scipy==1.17.1
cat > "$work/run.py" <<'PROGRAM'
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

assert transformers.__version__ == "5.23.0", transformers.__version__
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16}
RECIPE = "{merge_method: linear, dtype: float32, models: [{model: ./a, parameters: {weight: 0.5}}, "
RECIPE += "{model: ./b, parameters: {weight: 0.5}}]}"


def tensors(folder):
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


Path("recipe.yaml").write_text(RECIPE)
for family, more in (("llama", {}), ("qwen3_moe", EXPERTS), ("mixtral", EXPERTS)):
    for name in "ab":
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more)).save_pretrained(name)
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", "recipe.yaml", "merged", "--no-write-model-card"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    read, written = tensors("a"), tensors("merged")
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    shown = f", {fused} {[*written[fused].shape]}" if fused in written else ""
    print(f"{family:10} {len(read)} tensors read, {len(written)} written{shown}")
    models = [AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("a", "b", "merged")]
    assert all(torch.equal(models[2][name], (models[0][name] + models[1][name]) / 2) for name in models[2])
    assert (read.keys() == written.keys()) is (family == "llama"), "this has changed"
    assert (fused in written) is (family != "llama") and fused not in read, "this has changed"
PROGRAM
cd "$work"
PYTHONPATH="$work/added:$work/more" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log || { tail -5 log; exit 1; }
