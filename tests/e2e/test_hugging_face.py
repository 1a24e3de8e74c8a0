"""The ends of a run: weights that `transformers` saved or reads, and what is fetched from the hub."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from shardwise.config import Config, load_config
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data.formats.prepared_data import PreparedData
from shardwise.data.open_data import prepare_data
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.causal import TokenBatches
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise_use.cli.model_argument import open_model_folder
from tests.e2e.command import Outcome, environment, metrics, miniature, shardwise, within
from tests.e2e.conftest import Trained
from tests.loopback_hub import TOKEN, serve, user_of
from tests.unit.data.formats.test_datasets_of_the_hub import FILES


def weights(trained: Trained) -> Path:
    return trained.run / "checkpoints/step-00000004"


def prepared(config: Config) -> PreparedData:
    return prepare_data(config, Path(environment()["SHARDWISE_CACHE"]))


def loss_of(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean over the counted targets, by nothing but transformers and the data."""
    total, counted = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            inputs, targets = batch.inputs["ids_SB"], batch.inputs["targets_SB"]
            logits = model(torch.from_numpy(inputs.T.copy())).logits
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), torch.from_numpy(targets.T.copy()).flatten(), ignore_index=IGNORE, reduction="sum"
            )
            total += float(losses)
            counted += int(batch.counts[0])
    return total / counted


def loss_on(part: str, folder: Path, config: Config) -> float:
    """Of a Hugging Face folder on the held-out batches ("eval"), or on the first global batch ("train")."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    train = config.train
    batches = TokenBatches(prepared(config).tokens[part], train.sequence_length, train.seed)
    place = (train.global_batch, 0, 1, train.micro_batch)
    is_first = part == "train"
    return loss_of(
        model, batches.local_batch(0, *place) if is_first else batches.eval_batches(train.eval_batches, *place)
    )


def test_transformers_gets_our_evaluation_loss_and_tokenizer(trained: Trained) -> None:
    ours = metrics(trained.run, "eval")[-1]["loss"]
    theirs = loss_on("eval", weights(trained), trained.config)
    assert abs(theirs - ours) <= 1e-5 * ours, (
        f"transformers computes {theirs!r} from the final weights, the run ended at {ours!r}"
    )
    assert ours < math.log(301), "the model did not learn, so equal losses show little"
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights(trained))
    text = "In spring there lived a monk – naïve, 修道士."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 301
    prompt = prepared(trained.config).tokens["eval"][:16].tolist()
    sample = json.loads((trained.run / "results.json").read_text())["sample"]
    assert sample.startswith(tokenizer.decode(prompt)), "the sample does not continue the held-out text"
    assert len(sample) > len(tokenizer.decode(prompt))


SPECIAL = {"bos_token_id": 0, "eos_token_id": [0, 5, 7], "pad_token_id": 6}
BESIDE = ("config.json", "generation_config.json")
GPT_TINY = ("parallel.tensor=2", "parallel.sequence=true", "train.stop_after=2", "log.sample_tokens=0")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saved of a GPT-2 of gpt-tiny's size, whose weights are none that we would draw."""
    folder = tmp_path_factory.mktemp("pretrained") / "gpt2"
    torch.manual_seed(3)
    fields = to_hugging_face(load_config("gpt-tiny").model)
    config = transformers.GPT2Config(**{**fields, "initializer_range": 0.2, **SPECIAL})
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config = transformers.GenerationConfig(**SPECIAL, do_sample=True, temperature=0.6)
    model.save_pretrained(folder)
    tokenizer = prepared(load_config("gpt-tiny")).tokenizer_path
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def started(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder with a run that started from these weights, and what it printed."""
    at = tmp_path_factory.mktemp("started")
    return at, shardwise("train", "gpt-tiny", f"checkpoint.load={pretrained}", *GPT_TINY, at=at).succeeded()


def test_fault_09_a_run_keeps_what_lies_beside_its_weights(pretrained: Path, started: tuple[Path, Outcome]) -> None:
    """In its checkpoint, in the export of that, and for what generates from either."""
    run = started[0] / "runs/latest"
    within("checkpoint", "export", run, started[0] / "exported", at=started[0]).succeeded()
    for folder in (run / "checkpoints/step-00000002", started[0] / "exported"):
        described, generation = (json.loads((folder / name).read_text()) for name in BESIDE)
        assert generation == json.loads((pretrained / "generation_config.json").read_text())
        assert {name: described[name] for name in SPECIAL} == SPECIAL
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.generation_config.eos_token_id == [0, 5, 7]
        with open_model_folder(str(folder), {}, cached=True) as opened:
            assert opened.stops(Tokenizer.load(folder)) == {0, 5, 7}


def test_a_run_starts_from_what_transformers_saved(pretrained: Path, started: tuple[Path, Outcome]) -> None:
    at, said = started
    assert f"weights: those of {pretrained}" in said.out
    run = at / "runs/latest"
    start, steps = metrics(run, "start")[0], metrics(run, "step")
    assert start["loaded"] == str(pretrained)
    assert steps[0]["step"] == 1
    wanted = loss_on("train", pretrained, load_config("gpt-tiny"))
    assert abs(steps[0]["loss"] - wanted) <= 1e-5 * wanted, (
        f"transformers computes {wanted!r} on the first batch, the run starts at {steps[0]['loss']!r}"
    )
    assert wanted > math.log(512) + 0.1, "a freshly drawn model would do as well"
    assert steps[1]["loss"] != steps[0]["loss"]


def test_a_run_starts_from_the_end_of_another(trained: Trained, tmp_path: Path) -> None:
    """At another layout, with its tokenizer, which nothing names: no warning."""
    folder = weights(trained)
    options = [f"checkpoint.load={folder}", "train.steps=1", "optimizer.lr=1e-30"]
    options.append("precision.mode=float32")
    said = shardwise("train", miniature(tmp_path), "train.eval_every=1", *options, at=tmp_path).succeeded()
    assert "warning" not in said.out
    ours = metrics(tmp_path / "runs/latest", "eval")[-1]["loss"]
    wanted = metrics(trained.run, "eval")[-1]["loss"]
    assert abs(ours - wanted) <= 1e-5 * wanted


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
