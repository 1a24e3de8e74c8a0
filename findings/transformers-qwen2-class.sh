#!/usr/bin/env bash
# Guess: a folder whose tokenizer_config.json names PreTrainedTokenizerFast, the class that reads a tokenizer.json and
# nothing else, gives the ids of this tokenizer.json in AutoTokenizer, whatever model its config.json describes.
# Seen in transformers 5.23.0: not for model_type qwen2. AutoTokenizer takes Qwen2Tokenizer there, which keeps the
# vocabulary and the merges, and puts its own splitting of text in place of the file's. No warning says so.
#   llama TokenizersBackend [64, 256] a12
#   qwen2 Qwen2Tokenizer [32, 16, 17] A12
# The file's lower case is lost, and "12" is two tokens, as Qwen 2 splits digits one by one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.2
cat > "$folder/try.py" <<'PY'
import json, sys
from pathlib import Path
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: number for number, letter in enumerate(letters)}
vocabulary["12"] = len(vocabulary)
backend = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
backend.normalizer = normalizers.Lowercase()
backend.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
backend.decoder = decoders.ByteLevel()
found = {}
for model_type in ("llama", "qwen2"):
    folder = Path(sys.argv[1]) / model_type
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    opened = AutoTokenizer.from_pretrained(folder)
    found[model_type] = opened("A12")["input_ids"]
    print(model_type, type(opened).__name__, found[model_type], opened.decode(found[model_type]))
written = backend.encode("A12").ids
assert found["llama"] == written, "the file's ids"
assert found["qwen2"] != written, "qwen2 now has the file's ids"
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder"
