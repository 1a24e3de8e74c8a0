#!/usr/bin/env bash
# Guess: DocumentTokenizer of datatrove with shuffle_chunk_size writes the tokens that it writes without it, in another
# order of chunks, and NAME.ds.index has the ends of the documents.
# Seen in datatrove 0.10.1: the tokens after the last whole chunk of each task are left out, and all of a task that has less
# than a chunk, so that many small tasks lose much. Nothing is said; NAME.ds.metadata has the smaller number. The index has
# the ends of chunks too, so that parts of a document count as documents. 100 documents of 26 tokens:
#   no chunks: 2600 tokens, 100 ends, 100 of them of documents
#   chunks of 64: 2560 tokens, 135 ends, 98 of them of documents
#   chunks of 4096: 0 tokens, 0 ends, 0 of them of documents
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datatrove==0.10.1 tokenizers==0.23.2 orjson==3.13.0
cat > "$folder/try.py" <<'PY'
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

END = 999
words = {str(number): number for number in range(END)} | {"<e>": END}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<e>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.save("tokenizer.json")
documents = [Document(text=" ".join(map(str, range(n, n + 25))), id=str(n)) for n in range(100)]
found = []
for name, chunk in (("no chunks", None), ("chunks of 64", 64), ("chunks of 4096", 4096)):
    step = DocumentTokenizer(
        name, "tokenizer.json", local_working_dir=f"{name} work", eos_token="<e>", seed=1, shuffle_chunk_size=chunk
    )
    for _ in step.run(documents, 0, 1) or ():
        pass
    (file,) = Path(name).glob("*.ds")
    tokens = np.fromfile(file, "<u2")
    ends = np.fromfile(f"{file}.index", "<u8").astype(np.int64)
    found.append((len(tokens), len(ends), int((tokens[ends - 1] == END).sum())))
    print(f"{name}: {found[-1][0]} tokens, {found[-1][1]} ends, {found[-1][2]} of them of documents")
assert found == [(2600, 100, 100), (2560, 135, 98), (0, 0, 0)], "this has changed"
PY
cd "$folder"
"$folder/venv/bin/python" try.py 2>/dev/null
