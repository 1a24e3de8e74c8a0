#!/usr/bin/env bash
# Guess: a folder that OLMo-core saves by torch.distributed.checkpoint is read by torch's FileSystemReader.
# Seen in OLMo-core 3.0.0 with torch 2.13.0: its .metadata is a pickle that names a class of OLMo-core where torch's writer
# has its own _StorageInfo. Without OLMo-core torch cannot open it (and then tells of another file, __0.metadata, that
# is missing), and with OLMo-core it misses a field of the class.
#   with olmo_core: AttributeError, without: AssertionError; OLMo-core's own reader: [4]
# PYTHON names an interpreter that has ai2-olmo-core==3.0.0 and torch==2.13.0 (default: python3).
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/try.py" <<'PY'
import sys

import torch
from torch.distributed.checkpoint import FileSystemReader, load

place, how = sys.argv[1:]
state = {"a": torch.zeros(4)}
if how == "save":
    from olmo_core.distributed.checkpoint import save_state_dict

    save_state_dict(place, {"a": torch.ones(4)})
elif how == "own":
    from olmo_core.distributed.checkpoint import load_state_dict

    load_state_dict(place, state)
    print([int(state["a"].sum())])
else:
    if how == "without":
        sys.modules["olmo_core"] = None  # as where it is not installed
    try:
        load(state, storage_reader=FileSystemReader(place), no_dist=True)
        print("read")
    except BaseException as error:  # CheckpointException, which holds those of the ranks
        reasons = [error, *(failure[0] for failure in getattr(error, "failures", {}).values())]
        print(type(reasons[-1]).__name__)
PY
"$python" -W ignore "$folder/try.py" "$folder/saved" save
with=$("$python" -W ignore "$folder/try.py" "$folder/saved" with 2> "$folder/log")
without=$("$python" -W ignore "$folder/try.py" "$folder/saved" without 2> "$folder/log")
own=$("$python" -W ignore "$folder/try.py" "$folder/saved" own)
echo "with olmo_core: $with, without: $without; OLMo-core's own reader: $own"
[ "$with" = AttributeError ] && [ "$without" = AssertionError ] && grep -q __0.metadata "$folder/log" && [ "$own" = "[4]" ]
