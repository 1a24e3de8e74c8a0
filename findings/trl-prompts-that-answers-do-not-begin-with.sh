#!/usr/bin/env bash
# Guess: with a model's chat template, a question with the generation prompt is the beginning of the question with its
# answer, for an answer without reasoning. So the text that a model is trained on follows the prompt that it gets later.
# Seen in trl 1.16.0, whose package has 41 templates of models, with transformers 5.23.0: it is not so for six of them. What
# the prompt ends with, beyond what it shares with the whole text, is in no text that the model is trained on; the four of
# Nemotron 3 teach it to close a thought that the prompt leaves open after a new line.
#                              the prompt goes on with         the text goes on with
#   deepseek_r1_distill        '<think>\n'                     'So.<｜end▁of▁sentence｜>'
#   deepseekv3                 '<think>\n'                     'So.<｜end▁of▁sentence｜>'
#   nemotron_3_5_lightning     '\n'                            '</think>So.<|im_end|>\n'
#   nemotron_3_nano, nemotron_3_super and nemotron_3_ultra     the same
# PYTHON names an interpreter that has torch, transformers==5.23.0, tokenizers and jinja2 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip install -q --no-deps --target "$folder/site" trl==1.16.0
cat > "$folder/try.py" <<'PY'
import os
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

assert (version("trl"), version("transformers")) == ("1.16.0", "5.23.0")
TEXTS = {"user": "Why?", "assistant": "So."}
PLAIN = [{"role": role, "content": text} for role, text in TEXTS.items()]
PARTS = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TEXTS.items()]
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")


def rendered(template: str, chat: list[dict]) -> list[str]:
    """The question with the generation prompt, and the question with the answer."""
    options = {"chat_template": template, "tokenize": False}
    return [
        tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **options),
        tokenizer.apply_chat_template(chat, **options),
    ]


found = {}
count = 0
for path in sorted(Path(sys.argv[1], "trl/chat_templates").glob("*.jinja")):
    if path.stem.endswith("_training"):
        continue
    count += 1
    try:
        texts = rendered(path.read_text(), PLAIN)
    except Exception:  # a template of a model with images wants parts
        texts = rendered(path.read_text(), PARTS)
    if not texts[1].startswith(texts[0]):
        shared = len(os.path.commonprefix(texts))
        found[path.stem] = texts[0][shared:], texts[1][shared:]
print(f"{count} templates")
for name, (prompt, learned) in found.items():
    print(f"{name:26} {prompt!r:31} {learned!r}")
nemotron = dict.fromkeys((f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")), "</think>So.")
wanted = {**dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), "So."), **nemotron}
assert count == 41
assert found.keys() == wanted.keys(), sorted(found)
for name, beginning in wanted.items():
    prompt, learned = found[name]
    assert learned.startswith(beginning) and prompt == ("\n" if name in nemotron else "<think>\n"), found[name]
PY
PYTHONPATH="$folder/site" "$python" -W ignore "$folder/try.py" "$folder/site"
