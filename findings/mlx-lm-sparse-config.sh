#!/usr/bin/env bash
# Guess: mlx-lm opens the config.json that transformers 5 saves for a model which mlx-lm knows, with its rotary base.
# Seen in mlx-lm 0.32.2 with files of transformers 5.23.0: transformers keeps the base in rope_parameters alone, and
# mlx-lm reads rope_theta alone. Where its class has a default for it, that base is taken, and nothing is said; elsewhere
# the file is refused. qwen3_moe is also saved as num_local_experts, and mlx-lm reads num_experts.
#   olmoe     saved 500000.0, read 10000
#   mixtral   saved 500000.0, read 1000000.0
#   qwen3_moe refused: no num_experts, no rope_theta
#   glm4_moe  refused: no rope_theta, no rope_scaling, no partial_rotary_factor
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
cat > "$folder/try.py" <<'PY'
import importlib, json, sys
from pathlib import Path
from transformers import AutoConfig

NEEDED = {"qwen3_moe": ("num_experts", "rope_theta"), "glm4_moe": ("rope_theta", "rope_scaling", "partial_rotary_factor")}
rotary = {"rope_theta": 500000.0, "rope_type": "default"}
for family in ("olmoe", "mixtral", "qwen3_moe", "glm4_moe"):
    AutoConfig.for_model(family, head_dim=64, rope_parameters=dict(rotary)).save_pretrained(sys.argv[1])
    fields = json.loads(Path(sys.argv[1], "config.json").read_text())
    saved = fields["rope_parameters"]["rope_theta"]
    arguments = importlib.import_module(f"mlx_lm.models.{family}").ModelArgs
    try:
        read = arguments.from_dict(fields).rope_theta
    except TypeError as error:
        read = None
        assert all(f"'{name}'" in str(error) for name in NEEDED[family]), error
        print(family, "refused: no", ", no ".join(NEEDED[family]))
    else:
        print(family, f"saved {saved}, read {read}")
    assert read != saved, f"mlx-lm now reads the base of {family}"
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder"
