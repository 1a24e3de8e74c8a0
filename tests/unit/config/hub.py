"""`config.json` files of models on the Hugging Face hub, as they are there."""

import json
from pathlib import Path
from typing import Any

FILES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub.json").read_text("utf-8"))
GEMMA3_1B = FILES["gemma-3-1b"]
GPT2 = FILES["gpt2"]
PYTHIA_6_9B = FILES["pythia-6.9b"]
LLAMA2_7B = FILES["Llama-2-7b"]
MISTRAL_7B = FILES["Mistral-7B-v0.3"]
QWEN2_5_7B = FILES["Qwen2.5-7B"]
QWEN3_8B = FILES["Qwen3-8B"]
SMOLLM3_3B = FILES["SmolLM3-3B"]
