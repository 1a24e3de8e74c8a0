#!/usr/bin/env bash
# Guess: CTranslate2's converter refuses a model with a field of config.json that its format cannot hold, or reads it.
# Seen in CTranslate2 4.8.5 with files of transformers 5.23.0, in float32: the model is converted and loaded without a
# word, and computes with another value. Largest difference of a log-probability from transformers:
#   GPT-2 without the field                                0.000
#   GPT-2, layer_norm_epsilon 0.05 (1e-5 is computed)      above 0.1
#   Llama without the fields                               0.000
#   Llama, head_dim 64 (hidden_size / heads is computed)   above 0.1
#   Llama, rope_scaling llama3                             above 0.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 ctranslate2==4.8.5 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys
import ctranslate2, numpy, torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*alphabet, "<end>"])}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, unk_token="<end>", bos_token="<end>", eos_token="<end>"
)
SIZES = {"vocab_size": 257, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 128}
LLAMA = {**SIZES, "intermediate_size": 192, "max_position_embeddings": 64}
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
}
CASES = [
    ("gpt2", SIZES, False),
    ("gpt2", {**SIZES, "layer_norm_epsilon": 0.05}, True),
    ("llama", LLAMA, False),
    ("llama", {**LLAMA, "head_dim": 64}, True),
    ("llama", {**LLAMA, "rope_parameters": SCALING}, True),
]
for family, fields, differs in CASES:
    config = transformers.AutoConfig.for_model(family, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.08)
    model.save_pretrained(sys.argv[1] + "/model")
    tokenizer.save_pretrained(sys.argv[1] + "/model")
    ctranslate2.converters.TransformersConverter(sys.argv[1] + "/model").convert(sys.argv[1] + "/converted", force=True)
    ids = torch.randint(0, 256, (1, 48))
    with torch.no_grad():
        wanted = torch.log_softmax(model(ids).logits[0], -1)
    tokens = [tokenizer.convert_ids_to_tokens(ids[0].tolist())]
    found = ctranslate2.Generator(sys.argv[1] + "/converted", compute_type="float32").forward_batch(tokens)
    by = (torch.log_softmax(torch.tensor(numpy.array(found))[0], -1) - wanted).abs().max().item()
    print(f"{family} {sorted(set(fields) - set(LLAMA)) or 'plain'}: {by:.3f}")
    assert (by > 0.1) is differs and (by < 1e-3) is not differs, "this has changed"
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/try.py" "$folder"
