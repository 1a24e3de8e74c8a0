"""What a run fetches from the hub: a published tokenizer, and a data set."""

import json
import math
from pathlib import Path

import pytest
import transformers

from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.e2e.command import metrics, shardwise
from tests.loopback_hub import TOKEN, serve, user_of
from tests.unit.data.formats.test_datasets_of_the_hub import FILES

TEXT = "In spring there lived a monk – naïve, 修道士.\n"
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """GPT-2's two files, of 300 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    train_tokenizer(["The quick brown fox jumps over the lazy dog.\n" * 3, TEXT * 20], 300, "text").save(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    return {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": merges.encode(), "model.safetensors": b""}


def test_a_model_of_the_hub_in_place_of_a_recipe(tmp_path: Path) -> None:
    """Its config.json alone is fetched; without a network, one sentence names the recipe of the same shape."""
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    with serve({"main": files}) as site:
        variables = user_of(site.address, str(tmp_path / "hf"))
        command = ("plan", "acme/tiny", "--device", "h100:1", "--tokens", "1B", "--json")
        said = shardwise(*command, at=tmp_path, **variables)
        assert said.code == 0, said.err
        assert site.fetched == ["config.json"]
    plan = json.loads(said.out)
    assert plan["plans"][0]["tokens"] == pytest.approx(1e9, rel=1e-4)
    assert said.err.startswith("the model has the shape of acme/tiny and the tokenizer is that of acme/tiny; its ")
    assert len(said.err.splitlines()) == 1
    variables["HF_HUB_OFFLINE"] = "1"
    assert "tokenizer: acme/tiny" in shardwise("recipes", "acme/tiny", at=tmp_path, **variables).out, "from the cache"
    refused = shardwise("plan", "Qwen/Qwen3-8B", "--device", "h100:8", at=tmp_path, **variables).failed(2)
    assert refused.startswith("shardwise: RECIPE (Qwen/Qwen3-8B) cannot be fetched: HF_HUB_OFFLINE is set, and the ")
    assert refused.endswith("; the recipe qwen3-8b has the shape of this model\n")
    assert len(refused.splitlines()) == 1


@pytest.mark.slow
def test_a_model_and_a_data_set_of_the_hub(files: dict[str, bytes], tmp_path: Path) -> None:
    """The launcher fetches model, tokenizer and data, the ranks find them in the cache; no file has the token."""
    data = ("data.dataset=acme/gated", "data.config=en", "data.split=train,validation")
    command = ("train", "acme/gated", *data, "train.steps=2", "train.global_batch=4", "parallel.tensor=2")
    published = {**files, "config.json": json.dumps(CONFIG).encode(), **FILES["main"]}
    with serve({"main": published}) as site:
        variables = user_of(site.address, str(tmp_path / "hf")) | {"SHARDWISE_CACHE": str(tmp_path / "cache")}
        said = shardwise(*command, at=tmp_path, **variables, HF_TOKEN="")
        assert f"is gated: accept its licence on {site.address}/acme/gated, then set HF_TOKEN" in said.failed(2)
        assert not (tmp_path / "runs").exists()
        said = shardwise(*command, at=tmp_path, **variables, HF_TOKEN=TOKEN)
    assert said.code == 0, said.err
    assert f"fetching acme/gated from {site.address}: once, then cached in " in said.err
    parquet = ["en/train-0.parquet", "en/train-1.parquet", "en/validation.parquet"]
    fetched = sorted(name for name in site.fetched if name != "README.md")
    assert fetched == ["config.json", *parquet, "merges.txt", "vocab.json"], "each file once, whatever the ranks"
    run = (tmp_path / "runs/latest").resolve()
    written = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()], "the token is a secret"
    assert TOKEN not in said.out + said.err
    # An untrained model of 300 tokens knows nothing.
    assert metrics(run, "step")[0]["loss"] == pytest.approx(math.log(300), abs=0.3)
    folder = run / "checkpoints/step-00000002"
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    variables["HF_HUB_OFFLINE"] = "1"
    again = shardwise("train", "--run-dir", str(run), "train.steps=3", at=tmp_path, **variables)
    assert again.code == 0, again.err
    assert len(metrics(run, "step")) == 3
