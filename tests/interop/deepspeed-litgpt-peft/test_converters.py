"""The commands that a refusal names, run with DeepSpeed, litgpt, peft and accelerate, give equal logits."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.interop.continued import shardwise, torchrun

RANKS = {"zero1": 2, "zero2": 2, "zero3": 2, "litgpt": 1, "peft": 1, "accelerate": 1}
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all of them start from."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("base") / "hf"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=RANKS)
def source(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "made"
    torchrun(RANKS[request.param], Path(__file__).with_name("maker.py"), request.param, base, folder)
    return folder


def refused(*words: object) -> str:
    (line,) = [line for line in shardwise(*words, expect=2).splitlines() if line.startswith("shardwise: ")]
    return line


def follow(told: str, out: Path) -> None:
    """Run the commands that a message names."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    commands = re.findall("`(.+?)`", told)
    assert commands
    for command in commands:
        done = subprocess.run(
            command.replace("OUT", str(out)), shell=True, capture_output=True, text=True,
            env={**os.environ, "PATH": path}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout + done.stderr)


def assert_same_logits(out: Path, base: Path, source: Path, tmp_path: Path) -> None:
    if not (out / "config.json").exists():
        shutil.copy(base / "config.json", out)
    shardwise("checkpoint", "import", out, tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "step-00000000", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(24).view(2, 12)).logits
    expected = torch.load(f"{source}-logits.pt")
    assert float((logits - expected).abs().max()) <= 1e-5


def test_the_named_commands_make_the_model(source: Path, base: Path, tmp_path: Path) -> None:
    told = refused("checkpoint", "import", source, tmp_path / "run")
    assert f"SOURCE ({source}) must be the folder of a model, and it is a" in told
    follow(told, tmp_path / "out")
    assert_same_logits(tmp_path / "out", base, source, tmp_path)
    others = (("generate", source, "--prompt", "x"), ("evaluate", source), ("chat", source))
    for words in (*others, ("train", "llama3-tiny", f"checkpoint.load={source}", "--dry-run")):
        assert re.findall("`(.+?)`", refused(*words)) == re.findall("`(.+?)`", told), words
