#!/usr/bin/env bash
# transformers 5.23.0 and 5.24.0 (AutoTokenizer) with sentencepiece 0.2.3.
# Guess: a folder with nothing but a SentencePiece tokenizer.model gives the pieces that sentencepiece gives.
# Seen: 5.23.0 leaves out the space that the model puts before a text, so that the first word of each text has other
# tokens, and keeps spaces at the end that the model drops. 5.24.0 gives the same pieces, but for a model that marks
# the ends of words (treat_whitespace_as_suffix): there it puts a space before the text, which the model does not have.
# Neither says so. "sea" is the first word of a text:
#                  sentencepiece  5.23.0   5.24.0
#   BPE, bytes     _sea           s ea     _sea
#   suffixes       sea_           sea_     _ sea_
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/read.py" <<'PROGRAM'
import sys
import warnings
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

warnings.filterwarnings("ignore")
version, folder = sys.argv[1], Path(sys.argv[2])
lines = ["sea and sea by the sea", "the sea is a sea", "and the sea"] * 50
kinds = {
    "bytes": dict(vocab_size=280, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False),
    "suffix": dict(vocab_size=30, treat_whitespace_as_suffix=True),
}
seen = {}
for kind, options in kinds.items():
    own = folder / kind
    own.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(own / "tokenizer"), model_type="bpe", hard_vocab_limit=False,
        minloglevel=2, **options,
    )
    (own / "tokenizer.vocab").unlink()
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(own / "tokenizer.model")).encode("sea sea", out_type=str)
    found = AutoTokenizer.from_pretrained(own).tokenize("sea sea")
    seen[kind] = theirs, found
    print(version, kind, "sentencepiece", theirs, "AutoTokenizer", found)
space = "\u2581"
wanted = {
    "5.23.0": {"bytes": ([f"{space}sea"] * 2, ["s", "ea", f"{space}sea"]), "suffix": ([f"sea{space}"] * 2, [f"sea{space}", "se", "a"])},
    "5.24.0": {"bytes": ([f"{space}sea"] * 2, [f"{space}sea"] * 2), "suffix": ([f"sea{space}"] * 2, [space, f"sea{space}", "se", "a"])},
}
sys.exit(seen != wanted[version])
PROGRAM
for version in 5.23.0 5.24.0; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install -q "transformers==$version" sentencepiece==0.2.3 protobuf==7.36.2
    mkdir "$work/folder-$version"
    "$work/$version/bin/python" "$work/read.py" "$version" "$work/folder-$version"
done
