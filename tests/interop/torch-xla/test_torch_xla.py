"""torch_xla 2.9's ZeroRedundancyOptimizer trains and saves at step 6; its next ten losses are those of a run here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interop.continued import BATCH, BEFORE, LENGTH, batches, go_on

STEPS = 20
MODEL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 98, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PACKAGES = ("torch==2.9.0", "torch_xla==2.9.0", "transformers==5.23.0", "numpy")
"""An environment of its own: torch_xla is built for one release of torch."""


@pytest.fixture(scope="module", params=[False, True], ids=["weights", "masters"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At four ranks the matrices of the MLP are padded, as 98 is no multiple of 4."""
    folder = tmp_path_factory.mktemp("made")
    settings = {
        "model": MODEL, "ranks": BATCH, "lr": 5e-3, "steps": STEPS, "warmup_steps": 3, "before": BEFORE,
        "length": LENGTH, "masters": request.param,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **MODEL})
    )
    np.save(folder / "batches.npy", batches())
    packages = [word for package in PACKAGES for word in ("--with", package)]
    command = [sys.executable, "-m", "uv", "run", "--quiet", "--no-project", "--python", sys.executable, *packages]
    maker = Path(__file__).with_name("maker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "python", str(maker), str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("form", "keys"), [("plain", ["parallel.tensor=2"]), ("xser", ["parallel.pipeline=2"])])
def test_the_next_losses_are_the_same(made: Path, form: str, keys: list[str]) -> None:
    run = made / f"run-{form}"
    words = ("--from", "neuronx-distributed", "--config", made)
    go_on(made / form, run, *words, keys=keys, losses=json.loads((made / "losses.json").read_text()))
