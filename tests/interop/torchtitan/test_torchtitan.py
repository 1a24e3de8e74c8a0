"""torchtitan 0.3.0 trains on two CPU ranks and saves at step 6; its next ten losses are those of a run here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchtitan.components.optimizer import LRSchedulersContainer

from shardwise.config import config_from_sections
from shardwise.optim.learning_rate import learning_rate
from shardwise_use.importing.torchtitan import open_torchtitan
from shardwise_use.porting.recipes import recipe_of
from tests.interop.continued import BATCH, BEFORE, go_on, made, torchrun

RECIPE_STEPS, LR = 60, 3e-3
OURS = Path(__file__).parents[2] / "unit" / "use" / "others" / "titan.json"
STEPS = 20
MAKER = Path(__file__).with_name("maker.py")
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
"""What torchtitan 0.3.0 saved of its debug model."""


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with torchtitan's checkpoints and the model's config.json, and the losses of all steps."""
    spec, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    schedule = {"warmup_steps": 4, "decay_ratio": 0.5, "decay_type": "cosine", "min_lr_factor": 0.1}
    losses = made(2, MAKER, folder, **spec, steps=STEPS, max_norm=0.5, schedule=schedule)
    (folder / "config.json").write_text(json.dumps(SIZES | fields | {"tie_word_embeddings": spec["tied"]}))
    return folder, losses


def test_the_next_ten_losses_are_torchtitans(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, losses = trained
    # Their count is that of one of two ranks.
    words = ("--from", "torchtitan", "--config", folder / "config.json", "--samples", BEFORE * BATCH)
    keys = [
        "optimizer.schedule=wsd", "optimizer.warmup_steps=4", "optimizer.decay_steps=9",
        "optimizer.decay_shape=cosine", "optimizer.min_lr=3e-4", f"train.steps={STEPS}", "optimizer.max_norm=0.5",
    ]  # fmt: skip
    go_on(folder / f"checkpoint/step-{BEFORE}", tmp_path / "run", *words, keys=keys, losses=losses)


def test_experts_and_their_moments_are_those_of_its_adapter(tmp_path: Path) -> None:
    """Its experts need a GPU: its own saver writes them, and its adapter to Hugging Face tells which is which."""
    torchrun(1, MAKER, tmp_path)
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


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("decay_ratio", [None, 0.25])
def test_every_step_has_the_rate_of_the_maker(decay_type: Any, decay_ratio: float | None, tmp_path: Path) -> None:
    scheduler = LRSchedulersContainer.Config(
        warmup_steps=7, decay_ratio=decay_ratio, decay_type=decay_type, min_lr_factor=0.1
    )
    saved = json.loads(OURS.read_text(encoding="utf-8"))
    saved["training"]["steps"] = RECIPE_STEPS
    saved["optimizer"]["param_groups"][0]["optimizer_kwargs"]["lr"] = LR
    saved["lr_scheduler"] = scheduler.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    made = recipe_of(str(tmp_path / "config.json"))
    assert made.problems == []
    config = config_from_sections(made.sections)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedulers = scheduler.build(optimizers=[optimizer], training_steps=RECIPE_STEPS)
    theirs = []
    for _ in range(RECIPE_STEPS):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedulers.step()
    ours = [learning_rate(config.optimizer, RECIPE_STEPS, step) for step in range(1, RECIPE_STEPS + 1)]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)
