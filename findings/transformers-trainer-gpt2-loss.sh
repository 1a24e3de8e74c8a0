#!/usr/bin/env bash
# Guess: the Trainer divides a causal model's loss by the targets that it predicts, so that rows of S + 1 ids, S of which
# are predicted, give their mean cross-entropy.
# Seen in transformers 5.23.0 with accelerate 1.15.0: for LlamaForCausalLM, and not for GPT2LMHeadModel. The Trainer counts
# `labels[:, 1:]` if `model.loss_type` is ForCausalLM. That is the end of the class's name; for GPT-2 it is None. The loss
# is computed alike, shifted, and is divided by S + 1: loss and gradient are smaller by the factor S / (S + 1).
#   LlamaForCausalLM loss_type ForCausalLM: Trainer 2.782, mean 2.782, ratio 1.0000
#   GPT2LMHeadModel loss_type None: Trainer 2.087, mean 2.782, ratio 0.7500
# With -100 as the first label of each row both are the mean.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PY'
import sys
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

rows = torch.randint(16, (4, 4), generator=torch.Generator().manual_seed(1))
llama = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
gpt2 = GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=4, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0)
ratios = []
for make, config in ((LlamaForCausalLM, llama), (GPT2LMHeadModel, gpt2)):
    transformers.set_seed(0)
    model = make(config)
    with torch.no_grad():
        mean = model(rows, labels=rows).loss.item()
    arguments = TrainingArguments(
        sys.argv[1], max_steps=1, logging_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    ratios.append(loss / mean)
    print(make.__name__, f"loss_type {model.loss_type}: Trainer {loss:.3f}, mean {mean:.3f}, ratio {ratios[-1]:.4f}")
assert abs(ratios[0] - 1) < 1e-3, "Llama's loss is the mean"
assert abs(ratios[1] - 3 / 4) < 1e-3, "GPT-2's loss is now the mean"
PY
"$folder/venv/bin/python" -W ignore "$folder/try.py" "$folder" 2>/dev/null
