#!/usr/bin/env bash
# Guess: total_flos, the FLOPs that the Trainer writes to trainer_state.json and to its final metrics, counts the experts of
# which a token meets a few as they compute, and the output head of a model with tied embeddings.
# Seen in transformers 5.23.0 with torch 2.13.0: it is 6 · tokens · parameters without embeddings. All experts count, also
# the idle ones, and a head that shares its weight with the embedding counts nothing; attention's scores are left out.
# So an MFU made of it is too high for a sparse model by about experts / experts of a token, and too low for a small tied one.
# total_flos over the FLOPs of the products with weights, forward and backward, as torch counts them on a CPU:
#   llama                1.00
#   llama, tied          0.67
#   qwen3_moe, 2 of 16   3.30
# PYTHON names an interpreter that has torch==2.13.0, a CPU build or another, transformers==5.23.0 and accelerate (default:
# python3).
set -euo pipefail
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/run.py" <<'PROGRAM'
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

assert torch.__version__.startswith("2.13.0"), torch.__version__
assert transformers.__version__ == "5.23.0", transformers.__version__
SIZES = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "eos_token_id": 2}  # fmt: skip
SPARSE = {"moe_intermediate_size": 64, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 2}
ids = torch.arange(64) + 3
CASES = (
    ("llama", "llama", {}),
    ("llama, tied", "llama", {"tie_word_embeddings": True}),
    ("qwen3_moe, 2 of 16", "qwen3_moe", SPARSE),
)
found = []
for name, family, more in CASES:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more))
    if more is SPARSE:  # torch's counter knows no grouped products, the default
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids[None], labels=ids[None]).loss.backward()
    options = {"per_device_train_batch_size": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments("out", max_steps=1, **options)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found.append(trainer.state.total_flos / counter.get_total_flops())
    print(f"{name:20} {found[-1]:.2f}")
assert [round(value, 2) for value in found] == [1.0, 0.67, 3.3], "this has changed"
PROGRAM
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" -W ignore run.py 2>log || { tail -5 log; exit 1; }
