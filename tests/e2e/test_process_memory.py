"""The memory of a process that trains, as the operating system counts it, against that of the dry run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.config import check_layout, load_config
from shardwise.estimates.memory import expected_memory
from shardwise.train.summary import _PROCESS_BYTES

RECIPES = ["glm4-moe-tiny", "llama2-tiny", "mixtral-tiny", "olmoe-tiny", "qwen3-moe-tiny"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_process_has_the_memory_that_the_dry_run_says(recipe: str, tmp_path: Path) -> None:
    """Experts multiply another number of rows in each step, for which a library could keep a kernel each time."""
    command = [sys.executable, "-m", "shardwise", "train", recipe, "--nproc", "1", "--run-dir", str(tmp_path / "run")]
    subprocess.run([*command, "train.steps=20"], check=True, capture_output=True, cwd=tmp_path)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    peak = max(line["peak_memory_bytes"] for line in lines if line["event"] == "step")
    config = load_config(recipe)
    memory = expected_memory(config, check_layout(config, 1))
    assert peak == pytest.approx(memory.total + _PROCESS_BYTES, rel=0.15)
