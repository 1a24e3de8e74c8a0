#!/usr/bin/env bash
# transformers 5.23.0 (AutoTokenizer) with tiktoken 0.14.0.
# Guess: a folder whose tokenizer.model is a vocabulary of tiktoken gives the ids of the encoding that it belongs to.
# Seen: such a file says nothing of the pattern that splits text, and AutoTokenizer takes that of Llama 3 for each. With
# the ranks of an encoding that splits as r50k_base does, numbers of four digits get other ids. No warning says that the
# pattern is a guess. An encoding of 258 ranks shows it:
#   tiktoken       2024 -> [257]
#   AutoTokenizer  2024 -> [256, 52]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q transformers==5.23.0 tiktoken==0.14.0 blobfile==3.3.0 sentencepiece==0.2.2 protobuf==6.33.0
cat > "$work/read.py" <<'PROGRAM'
import base64
import sys

import tiktoken
from transformers import AutoTokenizer

ranks = {bytes([byte]): byte for byte in range(256)}
for token in (b"202", b"2024"):
    ranks[token] = len(ranks)
with open(f"{sys.argv[1]}/tokenizer.model", "wb") as file:
    for token, rank in ranks.items():
        file.write(base64.b64encode(token) + b" %d\n" % rank)
pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
theirs = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode("2024")
found = AutoTokenizer.from_pretrained(sys.argv[1])("2024", add_special_tokens=False)["input_ids"]
print("tiktoken     ", theirs)
print("AutoTokenizer", found)
sys.exit((theirs, found) != ([257], [256, 52]))
PROGRAM
mkdir "$work/folder"
"$work/env/bin/python" "$work/read.py" "$work/folder"
