#!/usr/bin/env bash
# transformers 5.23.0 (convert_tiktoken_to_fast) with tiktoken 0.14.0.
# Guess: the converted tokenizer.json gives every token the id that it has in the tiktoken encoding.
# Seen: special tokens are numbered anew, without gaps, from the end of the vocabulary on. cl100k_base has ranks to
# 100255 and <|endoftext|> at 100257, so a converted one ends documents with 100256, and tokens that tiktoken made
# before are read as others. No warning is printed. An encoding of 260 ranks with the gaps of cl100k_base shows it:
#   tiktoken   the<|endoftext|>the<|endofprompt|> -> [257, 261, 257, 280]
#   converted  the<|endoftext|>the<|endofprompt|> -> [257, 260, 257, 262]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q transformers==5.23.0 tiktoken==0.14.0 blobfile==3.3.0
cat > "$work/convert.py" <<'PROGRAM'
import sys

import tiktoken
import tokenizers
from transformers.integrations.tiktoken import convert_tiktoken_to_fast

ranks = {bytes([byte]): byte for byte in range(256)}
for token in (b"th", b"the", b" t", b" the"):
    ranks[token] = len(ranks)
end = len(ranks) + 1
special = {"<|endoftext|>": end, "<|fim_prefix|>": end + 1, "<|endofprompt|>": end + 19}
encoding = tiktoken.Encoding("small", pat_str=r"\s?\p{L}+|\s", mergeable_ranks=ranks, special_tokens=special)
convert_tiktoken_to_fast(encoding, sys.argv[1])
text = "the<|endoftext|>the<|endofprompt|>"
theirs = encoding.encode(text, allowed_special="all")
converted = tokenizers.Tokenizer.from_file(f"{sys.argv[1]}/tokenizer.json").encode(text).ids
print("tiktoken ", theirs)
print("converted", converted)
sys.exit((theirs, converted) != ([257, 261, 257, 280], [257, 260, 257, 262]))
PROGRAM
"$work/env/bin/python" "$work/convert.py" "$work/out"
