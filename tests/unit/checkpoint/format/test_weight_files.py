"""What is no folder of weights is told: its files, its index, and parts that it lacks."""

import json
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.weight_files import absent_parts, check_weights, resolve_weights
from shardwise.data.reading.dataset_tables import place_of_dataset
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for path in (
        "checkpoints/step-00000100/model.safetensors",
        "run/checkpoints/step-00000100/model.safetensors",
        "run/checkpoints/step-00000200/model.safetensors",
        "run/config.yaml",
        "pickled/pytorch_model.bin",
        "weights.pt",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


PATHS = {
    "checkpoints/step-0000010": r"there is none of that name in .*did you mean checkpoints/step-00000100\?",
    "two words": "there is none of that name in .*, and a hub id reads owner/name",
    "pickled": r"pickled \(pytorch_model.bin\): opening a pickle can run any code .*save_pretrained",
    "empty": "must hold model.safetensors: it is empty",
    "checkpoints/step-00000100/model.safetensors": "it is a file: set checkpoint.load=checkpoints/step-00000100$",
}


@pytest.mark.parametrize("load", PATHS)
def test_what_is_no_folder_of_weights(load: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=rf"checkpoint.load \({load}.*{PATHS[load]}"):
        resolve_weights(load)


def test_a_path_is_taken_as_it_is(here: Path) -> None:
    assert resolve_weights("checkpoints/step-00000100") == Path("checkpoints/step-00000100")
    assert resolve_tokenizer("empty") == Path("empty")
    assert resolve_tokenizer("weights.pt") == Path("weights.pt")
    with pytest.raises(ConfigError, match=r"checkpoint.revision \(v1\) must be left out"):
        resolve_weights("checkpoints/step-00000100", "v1")
    with pytest.raises(ConfigError, match=r"data.tokenizer \(tokenizer.json\) must be a tokenizer's file or folder: "):
        resolve_tokenizer("tokenizer.json")
    path = "run/checkpoints"
    told = rf"data\.dataset \({path}\) must be python or tiny or a hub id, it is a path: set data\.path={path}"
    with pytest.raises(ConfigError, match=told):
        place_of_dataset(path, ("python", "tiny"))


def test_an_index_is_checked(tmp_path: Path) -> None:
    for weights, text in [
        (
            {"a": "model-1.safetensors", "b": "model-2.safetensors"},
            "lacks model-2.safetensors: its index says that they hold weights: copy them",
        ),
        ({"a": "../model-1.safetensors"}, "must name files of its own folder, and '../model-1.saf"),
    ]:
        (tmp_path / "model-1.safetensors").write_bytes(b"")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(ConfigError, match=text):
            check_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("model-00001-of-00003", ["model-00002-of-00003", "model-00003-of-00003"]),
        ("shard-00002-model-00002-of-00002", ["shard-00001-model-00001-of-00002", "shard-00002-model-00001-of-00002"]),
    ],
)
def test_missing_files_are_named_by_the_numbers_of_others(name: str, absent: list[str], tmp_path: Path) -> None:
    file = f"{name}.safetensors"
    assert absent_parts([file]) == [f"{other}.safetensors" for other in absent]
    if absent and name.startswith("model"):
        (tmp_path / file).touch()
        told = rf"{file}; fetch or copy model\.safetensors\.index\.json.* too"
        with pytest.raises(ConfigError, match=told):
            check_weights(tmp_path)
