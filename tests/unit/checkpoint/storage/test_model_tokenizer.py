"""The data of a run that loads weights are read with the tokenizer of these weights."""

import json
import shutil
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError, DataError
from shardwise.checkpoint.storage.model_tokenizer import other_tokenizer_text, with_loaded_tokenizer
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, load_config
from shardwise.data.open_data import prepare_data
from shardwise.data.preview import preview_data
from shardwise.data.reading.data_manifest import write_manifest
from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer

NOTES = [f"note {number}: {number * number} coins" for number in range(400)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


def folder(path: Path, *, text: str = "A monk lived in a small house.") -> Path:
    """A model's folder, of which the tokenizer alone counts."""
    train_tokenizer([text * 20, text], 270, "text").save(path)
    return path


def run_of(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in NOTES))
    data = [] if any(text.startswith("data.") for text in overrides) else [f"data.path={tmp_path / 'notes.jsonl'}"]
    return load_config("llama2-tiny", [*data, "checkpoint.load=MODEL", *overrides])


@pytest.mark.parametrize("is_far", [False, True])
def test_text_has_the_ids_of_the_loaded_model(tmp_path: Path, *, is_far: bool) -> None:
    """Not those of a new tokenizer, which has 512 tokens here; also from behind a URL."""
    here = folder(tmp_path / "model")
    weights = Root.of(here)
    if is_far:
        weights = Root.of("memory://model-tokenizer")
        for file in here.iterdir():
            (weights / file.name).write(file.read_bytes())
    config = with_loaded_tokenizer(run_of(tmp_path), weights)
    data = prepare_data(config)
    tokenizer = Tokenizer.load(here)
    ids = tokenizer.encode("".join(f"{text}{tokenizer.end_of_document}" for text in NOTES)).tolist()
    assert data.count("train") + data.count("eval") == len(ids)
    assert data.beginning("train", 100) == ids[:100]
    assert Tokenizer.load(data.tokenizer_path).digest == tokenizer.digest
    rows = dict(preview_data(config).rows)
    assert rows["tokenizer"] == f"{config.data.tokenizer}: 270 tokens, of model.vocab_size (512)"


def test_a_run_that_continues_keeps_its_tokenizer_and_another_is_asked_for(tmp_path: Path) -> None:
    """Which has other bytes than that of the model, as `tokenizer_config.json` has another class."""
    here = folder(tmp_path / "model")
    (here / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "<|endoftext|>"}')
    config = run_of(tmp_path, "data.dataset=chat")
    begun = prepare_data(with_loaded_tokenizer(config, Root.of(here)))
    saved = Path(shutil.copytree(begun.tokenizer_path, tmp_path / "step-00000001"))
    assert (saved / "tokenizer_config.json").read_bytes() != (here / "tokenizer_config.json").read_bytes()
    shutil.rmtree(here)
    said: list[str] = []
    continued = prepare_data(with_loaded_tokenizer(config, Root.of(saved)), announce=said.append)
    assert (continued.fingerprint, continued.tokenizer_path, said) == (begun.fingerprint, begun.tokenizer_path, [])
    weights = Root.of(folder(tmp_path / "weights"))
    other = folder(tmp_path / "other", text="One two three four. ")
    config = run_of(tmp_path, f"data.tokenizer={other}")
    assert with_loaded_tokenizer(config, weights).data.tokenizer == str(other)
    assert (other_tokenizer_text(weights, other) or "").startswith("data.tokenizer gives other ids than the tokenizer")
    assert other_tokenizer_text(weights, folder(tmp_path / "same")) is None
    assert with_loaded_tokenizer(run_of(tmp_path), None).data.tokenizer is None
    assert with_loaded_tokenizer(run_of(tmp_path), "acme/model@v1").data.tokenizer == "acme/model@v1"


@pytest.mark.parametrize(
    "data",
    [
        ["data.dataset=chat"],
        ["data.dataset=null", "data.mixture={a: {dataset: tiny, weight: 1}, b: {path: no, format: megatron}}"],
    ],
)
def test_text_for_weights_without_a_tokenizer_is_refused(tmp_path: Path, data: list[str]) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"^checkpoint\.load \(.*model\) must hold the model's tokenizer \("):
        with_loaded_tokenizer(run_of(tmp_path, *data), Root.of(tmp_path / "model"))


def test_tokens_are_checked_against_it_and_need_none(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    with IndexedWriter(tmp_path / "tokens", 270) as writer:
        for _ in range(20):
            writer.add([*range(270)], [270])
    config = run_of(tmp_path, f"data.path={tmp_path / 'tokens'}", "data.format=megatron")

    def made_by(digest: str) -> None:
        counts = {"documents": 20, "sequences": 20, "tokens": 5400}
        made = {"format": "megatron", "source": {}, "options": {}, "tokenizer": {"name": "made-by", "sha256": digest}}
        write_manifest(tmp_path / "tokens.json", {**counts, **made})

    def read_with_it() -> Config:
        return with_loaded_tokenizer(config, Root.of(model))

    made_by(Tokenizer.load(model).digest)
    assert prepare_data(read_with_it()).tokenizer_path is not None, "the sample of the run needs it"
    made_by("0" * 64)
    named = r"data\.tokenizer \(.*model, .*must be the tokenizer that .*\.json names"
    with pytest.raises(DataError, match=named) as told:
        prepare_data(read_with_it())
    assert preview_data(read_with_it()).problems == told.value.problems, "the dry run says so too"
    (model / "tokenizer.json").write_text("{}")
    assert read_with_it().data.tokenizer is None
    (model / "tokenizer.json").unlink()
    assert prepare_data(read_with_it()).tokenizer_path is None
