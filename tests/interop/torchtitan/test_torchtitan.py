"""torchtitan 0.3.0 trains on two CPU ranks and saves at step 6; its next ten losses are those of a run here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from shardwise_use.importing.torchtitan import open_torchtitan
from tests.interop.continued import AFTER, BATCH, BEFORE, LENGTH, batches, losses_here, shardwise, torchrun

STEPS = 20
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
QWEN = {
    "model_type": "qwen3", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 24,
}  # fmt: skip
CASES = {
    "llama3": ({"family": "llama3", "fused": True, "tied": False}, LLAMA),
    "llama3-apart-tied": ({"family": "llama3", "fused": False, "tied": True}, LLAMA),
    "qwen3": ({"family": "qwen3", "fused": False, "tied": True}, QWEN),
}


@dataclass(frozen=True)
class Made:
    """What torchtitan wrote: the folder of checkpoints, the model's config.json, and the losses of all steps."""

    checkpoints: Path
    config: Path
    losses: list[float]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    spec, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    np.save(folder / "batches.npy", batches())
    schedule = {"warmup_steps": 4, "decay_ratio": 0.5, "decay_type": "cosine", "min_lr_factor": 0.1}
    spec = {
        **spec, "folder": str(folder), "batches": str(folder / "batches.npy"), "steps": STEPS, "max_norm": 0.5,
        "save_at": BEFORE, "schedule": schedule,
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    torchrun(2, Path(__file__).with_name("maker.py"), folder / "spec.json")
    config = folder / "config.json"
    config.write_text(json.dumps(SIZES | fields | {"tie_word_embeddings": spec["tied"]}))
    return Made(folder / "checkpoint", config, json.loads((folder / "losses.json").read_text()))


def test_the_next_ten_losses_are_torchtitans(made: Made, tmp_path: Path) -> None:
    step, words = made.checkpoints / f"step-{BEFORE}", ("--config", made.config, "--samples", BEFORE * BATCH)
    told = shardwise("checkpoint", "import", step, tmp_path / "run", "--from", "torchtitan", *words)
    # Their count is that of one of two ranks.
    assert f"after step {BEFORE}, {BEFORE * BATCH} samples and {BEFORE * BATCH * LENGTH} tokens" in told
    keys = [
        "optimizer.schedule=wsd", "optimizer.warmup_steps=4", "optimizer.decay_steps=9",
        "optimizer.decay_shape=cosine", "optimizer.min_lr=3e-4", f"train.steps={STEPS}", "optimizer.max_norm=0.5",
    ]  # fmt: skip
    losses = losses_here(tmp_path / "run", keys)
    assert len(losses) == AFTER
    assert losses == pytest.approx(made.losses[BEFORE:], rel=0, abs=1e-5)


def test_experts_and_their_moments_are_those_of_its_adapter(tmp_path: Path) -> None:
    """Its experts need a GPU: its own saver writes them, and its adapter to Hugging Face tells which is which."""
    torchrun(1, Path(__file__).with_name("maker.py"), tmp_path)
    fields = QWEN | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SIZES | fields | {"norm_topk_prob": True, "tie_word_embeddings": False}))
    opened = open_torchtitan(tmp_path / "checkpoint", config)
    assert opened.progress.updates == 2
    theirs = load_file(tmp_path / "theirs.safetensors")
    assert {f"{each.state} {each.name}" for each in opened.tensors} == theirs.keys()
    for each in opened.tensors:
        data = b"".join(map(bytes, each.read()))
        found = torch.frombuffer(bytearray(data), dtype=torch.float32).view(each.shape)
        assert torch.equal(found, theirs[f"{each.state} {each.name}"]), (each.state, each.name)
