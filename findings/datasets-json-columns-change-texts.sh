#!/usr/bin/env bash
# Guess: a column whose values are of several types, such as contents that are a text or a list of parts, comes back from
# the library datasets as it was given.
# Seen in datasets 5.2.0: load_dataset("json") makes such a column of the type Json by default, which stores each value as
# JSON. A text that is itself JSON is stored as it is, and comes back as what it spells: a user's message "42" is a number,
# "true" a bool, and a text in quotes has lost them. No warning says so. With texts alone in the column nothing changes.
#   type Json, 'What is it?' -> 'What is it?', '42' -> 42, 'true' -> True, '"Yes."' -> 'Yes.', '[1, 2]' -> [1, 2]
# A reader of the files themselves sees the stored JSON: texts in quotes, beside such as have none.
#   stored: '"What is it?"', '42', 'true', '"Yes."', '[1, 2]'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
cat > "$folder/try.py" <<'PY'
import json
import sys

from datasets import Json, disable_progress_bars, load_dataset

disable_progress_bars()
texts = ["What is it?", "42", "true", '"Yes."', "[1, 2]"]
with open("rows.jsonl", "w") as file:
    for content in (*texts, [{"type": "text", "text": "Hi"}]):
        file.write(json.dumps({"content": content}) + "\n")
rows = load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
assert rows.features["content"] == Json(), rows.features
found = rows["content"][:-1]
print("type Json, " + ", ".join(f"{text!r} -> {value!r}" for text, value in zip(texts, found)))
stored = rows.data.column("content").to_pylist()[:-1]
print("stored: " + ", ".join(map(repr, stored)))
assert found == ["What is it?", 42, True, "Yes.", [1, 2]], "this has changed"
assert stored == ['"What is it?"', "42", "true", '"Yes."', "[1, 2]"], "this has changed"
PY
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" try.py
