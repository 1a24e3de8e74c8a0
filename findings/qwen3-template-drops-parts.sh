#!/usr/bin/env bash
# Guess: a chat template that cannot read a content that is a list of text parts fails on it (a list cannot be added to
# a text), or writes the list as Python shows it, so that the fault is seen.
# Seen with transformers 5.23.0, jinja2 3.1.6 and the templates of Qwen that trl 1.16.0 ships: Qwen2.5's raises a
# TypeError, and Qwen3's writes the message without any text, as it has "content is string, else ''". No warning says so,
# and training on such messages teaches to answer nothing.
#   qwen3   '<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n'
#   qwen2_5 TypeError can only concatenate str (not "list") to str
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 jinja2==3.1.6
"$folder/venv/bin/pip" install -q --no-deps trl==1.16.0
cat > "$folder/try.py" <<'PY'
from importlib import metadata
from pathlib import Path
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
templates = Path(str(metadata.distribution("trl").locate_file("trl/chat_templates")))
part = {"type": "text", "text": "Hello there."}
messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": [part]}]
found = {}
for name in ("qwen3", "qwen2_5"):
    tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
    try:
        found[name] = repr(tokenizer.apply_chat_template(messages, tokenize=False))
    except TypeError as error:
        found[name] = f"TypeError {error}"
    print(name, found[name])
assert found["qwen3"] == repr("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n")
assert found["qwen2_5"].startswith("TypeError")
PY
"$folder/venv/bin/python" "$folder/try.py"
