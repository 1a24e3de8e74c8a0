"""What `evaluate` and `generate` take from the folder that they are given, and what they refuse."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.storage.root import Root
from shardwise.cli import main
from shardwise.config import UserModelConfig, load_config
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use.cli import model_argument
from shardwise_use.cli.model_argument import ModelFolder
from tests.command_line import CommandLine
from tests.hugging_face import save

TEXT = "The ring of keys was lost in spring, and a song went with it.\n" * 4
COMMANDS = {
    "evaluate": ("evaluate", "folder", "data.dataset=tiny"),
    "generate": ("generate", "folder", "--prompt", "a"),
}


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model is a class beside it, in the current directory: importing it leaves a mark."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"family": "strange_code:M", "vocab_size": 300}))
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    (tmp_path / "strange_code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "given"), [("evaluate", ()), ("generate", ("model.family=other:M",))])
def test_a_folder_runs_no_code_by_itself(command: str, given: tuple[str, ...], strange: Path, cli: CommandLine) -> None:
    assert "if you trust it, give model.family=strange_code:M too" in cli.sentence(*COMMANDS[command], *given)
    assert not (strange / "ran").exists()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints with that of step 0."""
    at = tmp_path_factory.mktemp("imported")
    save("gpt", at / "plain", vocab_size=270)
    train_tokenizer([TEXT], 270, "test").save(at / "plain")
    assert main(["checkpoint", "import", str(at / "plain"), str(at / "steps")]) == 0
    return at / "steps"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.txt").write_text(TEXT)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loss_of(location: object, cli: CommandLine) -> tuple[str, float]:
    """Which checkpoint was taken, and its loss."""
    facts = cli.facts("evaluate", location, "data.path=own.txt")
    return facts["model"], facts["loss"]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_damage_gives_no_number(file: str, imported: Path, here: Path, cli: CommandLine) -> None:
    folder = here / "steps/step-00000000"
    shutil.copytree(imported / folder.name, folder)
    data = bytearray((folder / file).read_bytes())
    data[len(data) * 3 // 4] ^= 1
    (folder / file).write_bytes(data)
    for command in (["evaluate", "data.path=own.txt"], ["generate", "--prompt", "a", "--json"]):
        said = cli(command[0], folder, *command[1:], code=1)
        assert said.out == ""
        assert f"{folder / file} is damaged: " in said.err
        assert len([line for line in said.err.splitlines() if not line.startswith("preparing the data ")]) == 1


def test_runs_and_urls_are_read_where_they_are(
    imported: Path, here: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, name = here / "run", "step-00000000"
    (run / "checkpoints" / name).mkdir(parents=True)
    (run / "config.yaml").write_text(f"checkpoint: {{path: {imported}}}\n")
    expected = loss_of(imported / name, cli)
    assert loss_of("run", cli) == expected
    assert loss_of(imported.parent / "plain", cli)[1] == expected[1]
    assert cli("checkpoint", "inspect", "run").out.startswith(f"{imported}: 1 checkpoint\n")
    there = Root.of("memory://bucket/steps")
    for name, _ in Root.of(imported).files().items():
        (there / name).write((imported / name).read_bytes())
    (here / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "temporary"))
    expected = loss_of(imported, cli)[1]
    assert loss_of("memory://bucket/steps", cli) == ("memory://bucket/steps/step-00000000", expected)
    cli("generate", "memory://bucket/steps/step-00000000", "--prompt", "a", "--max-tokens", "2")
    assert list((here / "temporary").iterdir()) == [], "what was fetched is removed"
    tokenizer = there / "step-00000000/tokenizer.json"
    tokenizer.write(tokenizer.read().replace(b"a", b"b", 1))
    assert f"{tokenizer} is damaged: " in cli("generate", "memory://bucket/steps", "--prompt", "a", code=1).err
    assert "there is nothing of that name" in cli.refused("evaluate", "memory://bucket/gone")


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_fault_23_a_checkpoint_that_is_pruned_meanwhile_is_named(
    command: str, imported: Path, here: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is missing first: the tokenizer, or the weights."""
    shutil.copytree(imported, "steps")
    plain = model_argument.open_model_folder

    def opened(*arguments: Any, **options: Any) -> Any:
        folder = plain(*arguments, **options)
        shutil.rmtree("steps/step-00000000")
        return folder

    monkeypatch.setattr(model_argument, "open_model_folder", opened)
    more = ["data.path=own.txt"] if command == "evaluate" else ["--prompt", "a"]
    said = cli.refused(command, "steps", *more)
    assert "the checkpoint steps/step-00000000 was removed while it was read, as checkpoint.keep and" in said
    assert "data.tokenizer" not in said
    said = cli.refused(command, "steps/step-00000000", *more)
    assert "there is no checkpoint steps/step-00000000: it was not saved, or was removed" in said


@pytest.mark.parametrize(("keys", "longest"), [({}, 64), ({"max_position_embeddings": 128}, 128)])
def test_a_class_that_names_no_longest_text_stops_where_its_training_did(
    keys: dict[str, int], longest: int, tmp_path: Path
) -> None:
    """A table of positions ends there; a family knows its own end."""
    run = {"train": {"sequence_length": 64}}
    folder = ModelFolder("runs/own", "runs/own", Root.of(tmp_path), tmp_path, frozenset(), {}, run)
    assert folder.longest(UserModelConfig.model_validate({"family": "mine:Model", "vocab_size": 8, **keys})) == longest
    family = load_config("llama2-tiny").model
    assert folder.longest(family) == family.max_position_embeddings
