"""Files of tensors that may be damaged, wrong or missing, and the tensors that they hold."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from shardwise.base.errors import ConfigError, DamageError
from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.safetensors import read_header, safetensors_header
from shardwise.checkpoint.format.stored_tensors import find_sources, tensor_mismatches
from shardwise.checkpoint.format.weight_files import absent_parts, check_weights, no_weights_text, resolve_weights
from shardwise.checkpoint.storage.root import Root
from shardwise.cli import main
from shardwise.data.reading.dataset_tables import place_of_dataset
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer
from tests.rows import rows_of


def test_the_library_reads_our_files_and_we_read_its(tmp_path: Path) -> None:
    values = {
        "ä": np.arange(6, dtype=np.float32).reshape(2, 3),
        "one": np.float64(2.5).reshape(()),
        "none": np.zeros((0, 4)),
    }
    described = [(name, "F32" if v.dtype == np.float32 else "F64", v.shape) for name, v in values.items()]
    head, offsets, total = safetensors_header(described, {"format": "pt"})
    assert len(head) % 8 == 0
    data = head + b"".join(v.tobytes() for v in values.values())
    assert len(data) == total
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118  it is no mapping
    assert found == {name: v.tolist() for name, v in values.items()}
    assert [tensor.start for tensor in read_header(Root.of(path)).values()] == offsets
    values = {"a": np.arange(3, dtype=np.int64), "b": np.ones((2, 2), dtype=np.float16)}
    path = tmp_path / "x.safetensors"
    save_file(values, path)
    data = path.read_bytes()
    for name, stored in read_header(Root.of(path)).items():
        assert stored.shape == values[name].shape
        assert data[stored.start : stored.stop] == values[name].tobytes()


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD: list[tuple[Any, int | None, str]] = [
    ([], None, "x is damaged: its header cannot be used: it is no JSON object"),
    ({"a": {**F32, "shape": [3]}}, None, "a has 8 bytes, and its shape needs 12"),
    ({"a": F32, "b": F32}, None, r"b begins at byte \d+ and must begin at byte \d+"),
    ({"a": {**F32, "shape": [4], "data_offsets": [0, 16]}}, None, "its tensors end at byte"),
    ({"a": {**F32, "shape": [2**70, 2**70]}}, None, "the shape of a must be at most 64 whole numbers"),
    ({"\x1b[2J": F32}, None, "must be printable"),
    (b"{", None, "x is damaged: its header cannot be used: Expecting"),
    (b"[" * 100_000, None, "x is damaged: its header cannot be used: "),
    (b"{}", 2**63, "x is damaged: the length of its header .* must be at most"),
    (b'{"a":1,"a":2}', None, "x is damaged: its header cannot be used: a name is there twice"),
]


@pytest.mark.parametrize(("header", "length", "problem"), BAD, ids=[problem for *_, problem in BAD])
def test_a_header_that_does_not_fit_is_damage(header: Any, length: int | None, problem: str, tmp_path: Path) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(8))
    with pytest.raises(DamageError, match=problem):
        read_header(Root.of(tmp_path / "x"))
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(DamageError, match=r"\(3 bytes\) must have at least 8 bytes"):
        read_header(Root.of(tmp_path / "x"))


SHAPES = {
    "transformer.wte.weight": (8, 4),
    **{f"transformer.h.{layer}.ln_1.weight": (4,) for layer in range(4)},
    "transformer.empty": (0, 4),
}


def entry(*shape: int) -> TensorEntry:
    return TensorEntry(shape, "F32", ())


def test_what_a_place_lacks_and_the_spelling_that_is_read_first() -> None:
    stored = {"transformer.wte.weight": entry(8, 3)}
    found = tensor_mismatches("PLACE", SHAPES, stored, needed=["transformer.h.2.ln_1.weight"], state="exp_avg")
    assert found == [
        "PLACE lacks the exp_avg of transformer.h.2.ln_1.weight [4]",
        "PLACE: shape of the exp_avg of transformer.wte.weight [8, 3] must be [8, 4]",
    ]
    # Of a place that has all that a model needs, without the prefix and with the tied head.
    bare = {name.removeprefix("transformer."): entry(*shape) for name, shape in SHAPES.items() if 0 not in shape}
    bare["lm_head.weight"] = bare["wte.weight"]
    sources, problems = find_sources("PLACE", "gpt", SHAPES, bare)
    assert problems == []
    assert sources["transformer.wte.weight"] == ["wte.weight", "lm_head.weight"]
    assert sources["transformer.h.2.ln_1.weight"] == ["h.2.ln_1.weight"]


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


ROWS = rows_of(__file__)

FOLDERS = ROWS["folders"]


@pytest.mark.parametrize("case", FOLDERS)
def test_the_command_of_a_converter_is_named(case: str, tmp_path: Path) -> None:
    names, command = FOLDERS[case]
    folder = tmp_path / "global_step3"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(ConfigError) as caught:
        check_weights(folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"checkpoint.load ({folder}) must be the folder of a model, and it is a")
    assert command.format(folder, tmp_path) in problem
    others = ["context", "config.json", "checkpoint_metadata.json"]
    assert "must hold model.safetensors" in no_weights_text("x", others), "other folders have no converter"


def test_each_command_that_opens_a_model_names_the_converter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ["checkpoint import {0} {0}/out", "evaluate {0}", "train llama3-tiny checkpoint.load={0} --dry-run"]:
        (tmp_path / "adapter_config.json").touch()
        assert main(command.format(tmp_path).split()) == 2
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("shardwise: ")]
        assert "merge_and_unload" in line
