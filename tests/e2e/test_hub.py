"""What a run fetches from the hub: a published tokenizer, and a data set."""

import json
from pathlib import Path

import pytest
import transformers

from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.e2e.command import metrics, miniature, shardwise
from tests.loopback_hub import TOKEN, serve, user_of
from tests.unit.data.formats.test_datasets_of_the_hub import FILES

TEXT = "In spring there lived a monk – naïve, 修道士.\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """GPT-2's two files, of 300 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    train_tokenizer(["The quick brown fox jumps over the lazy dog.\n" * 3, TEXT * 20], 300, "text").save(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    return {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": merges.encode(), "model.safetensors": b""}


@pytest.mark.slow
def test_a_tokenizer_from_the_hub(files: dict[str, bytes], tmp_path: Path) -> None:
    """The launcher fetches it, the ranks find it in the cache; the token is nowhere in the run."""
    options = ["data.dataset=tiny", "data.tokenizer=acme/gated", "parallel.tensor=2", "train.stop_after=1"]
    with serve({"main": files}) as site:
        variables = user_of(site.address, str(tmp_path / "hf"))
        said = shardwise("train", "gpt-tiny", *options, at=tmp_path, **variables, HF_TOKEN="")
        assert f"is gated: accept its licence on {site.address}/acme/gated, then set HF_TOKEN" in said.failed(2)
        assert not (tmp_path / "runs").exists()
        said = shardwise("train", "gpt-tiny", *options, at=tmp_path, **variables, HF_TOKEN=TOKEN)
    assert said.code == 0, said.err
    assert f"fetching acme/gated from {site.address}: once, then cached in " in said.err
    assert sorted(site.fetched) == ["merges.txt", "vocab.json"], "each file once, whatever the number of ranks"
    assert TOKEN not in said.out + said.err
    run = (tmp_path / "runs/latest").resolve()
    written = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()], "the token is a secret"
    assert len(metrics(run, "step")) == 1
    folder = run / "checkpoints/step-00000001"
    assert (folder / "merges.txt").read_bytes() == files["merges.txt"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    text = shardwise("generate", "runs/latest", "--prompt", "fox", "--max-tokens", "2", at=tmp_path, HF_HUB_OFFLINE="1")
    assert text.code == 0, text.err
    assert text.out.startswith("fox")


@pytest.mark.slow
def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """The launcher fetches it, the ranks find it in the cache; the token is nowhere in the run."""
    miniature(tmp_path)
    options = ["miniature.yaml", "data.dataset=acme/gated", "data.config=en", "data.split=train,validation"]
    with serve(FILES) as site:
        variables = user_of(site.address, str(tmp_path / "hf")) | {"SHARDWISE_CACHE": str(tmp_path / "cache")}
        said = shardwise("train", *options, at=tmp_path, **variables, HF_TOKEN="")
        assert f"is gated: accept its licence on {site.address}/datasets/acme/gated, then set HF_TOKEN" in said.failed(
            2
        )
        done = shardwise("train", *options, "parallel.tensor=2", at=tmp_path, **variables, HF_TOKEN=TOKEN)
        assert done.code == 0, done.err
        fetched = [name for name in site.fetched if name.endswith(".parquet")]
    assert sorted(fetched) == ["en/train-0.parquet", "en/train-1.parquet", "en/validation.parquet"]
    run = (tmp_path / "runs/latest").resolve()
    assert len(metrics(run, "step")) == 4
    assert TOKEN not in done.out + done.err
    assert not [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
