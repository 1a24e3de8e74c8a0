"""`config.json` files of models on the Hugging Face hub, as they are there."""

import json
from pathlib import Path
from typing import Any

FILES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub.json").read_text("utf-8"))
OLMO3_7B = FILES["Olmo-3-7B"]
GEMMA3_1B = FILES["gemma-3-1b"]
GPT2 = FILES["gpt2"]
GPT2_XL = FILES["gpt2-xl"]
PYTHIA_6_9B = FILES["pythia-6.9b"]
GPT_NEOX_20B = FILES["gpt-neox-20b"]
LLAMA2_7B = FILES["Llama-2-7b"]
LLAMA3_1_8B = FILES["Llama-3.1-8B"]
MISTRAL_7B = FILES["Mistral-7B-v0.3"]
QWEN2_5_7B = FILES["Qwen2.5-7B"]
QWEN3_8B = FILES["Qwen3-8B"]
OLMO2_7B = FILES["OLMo-2-1124-7B"]
SMOLLM3_3B = FILES["SmolLM3-3B"]
BERT_LARGE = FILES["bert-large-uncased"]
