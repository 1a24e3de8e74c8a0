"""Each command that may take long shows how far it is: on a terminal, and in a log. Standard output stays as it is."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from shardwise.base import units
from shardwise.cli import main
from shardwise.cli.run_preparation import fetch_inputs
from shardwise.config import Config, load_config
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.verify import verification
from shardwise.verify.layouts import Cell
from shardwise.verify.tolerance import LayoutDifferences
from tests.command_line import CommandLine
from tests.hugging_face import save
from tests.loopback_files import serve
from tests.screens import Log, Screen

TEXT = "The ring of keys was lost in spring, and a song went with it.\n" * 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face, with a tokenizer."""
    at = tmp_path_factory.mktemp("model")
    save("llama", at / "plain", vocab_size=270)
    train_tokenizer([TEXT], 270, "test").save(at / "plain")
    assert main(["checkpoint", "import", str(at / "plain"), str(at / "steps")]) == 0
    return at


@pytest.fixture
def at(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    # A file that has just changed is read each time.
    monkeypatch.setattr("shardwise.data.reading.text_sources._SETTLED_SECONDS", -10.0)
    return model


def lines(shown: Log) -> list[str]:
    """The works that were shown at their end, in this order: on a terminal with a bar, else one line of each."""
    text = shown.text()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    found = re.split(r"[\r\n]+", plain)
    if isinstance(shown, Screen):
        assert all("━" in line for line in found if ": " in line), found
        found = [line.lstrip("━╸╺ ") for line in found]
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l"), "the cursor is hidden"
    # Times and speeds are those of the machine.
    ended = [re.sub(r"(, [\d.]+ [KMGT]?i?B/s)?(, |: )[\w. ]+ (elapsed|left)$", "", line.rstrip()) for line in found]
    return list(dict.fromkeys(line for line in ended if line))


def require(shown: Log, *expected: str) -> None:
    assert lines(shown) == list(expected)


def all_of(nbytes: float) -> str:
    return f"{units.size(nbytes)} of {units.size(nbytes)}, 100%"


def test_checkpoints(at: Path, shown: Log, cli: CommandLine) -> None:
    """Written by an import and an export; read by `verify` and `diff`, whose JSON stays clean."""
    step = str(at / "steps/step-00000000")
    cli("checkpoint", "import", at / "plain", "steps")
    cli("checkpoint", "export", step, "out")
    verified = cli.facts("checkpoint", "verify", step)
    captured = cli("checkpoint", "diff", step, "out", "--json")
    assert json.loads(captured.out)["equal"]
    assert captured.err == ""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in load_file("out/model.safetensors").values())
    files = sum(file.stat().st_size for file in Path(step).iterdir())
    read = verified["bytes"]  # all but the manifest
    require(
        shown,
        f"writing step-00000000: {all_of(weights)}",
        f"writing out: {all_of(weights)}",
        f"verifying step-00000000: {units.size(read)} of {units.size(files)}, {read / files:.0%}",
        f"comparing: {units.size(weights)} of {units.size(files)}, {weights / files:.0%}",
    )


def test_what_was_written_is_told_as_json(at: Path, cli: CommandLine) -> None:
    imported = cli.facts("checkpoint", "import", at / "plain", "steps")
    assert imported["family"] == "llama"
    assert imported["command"] == f"shardwise train RECIPE checkpoint.load={imported['checkpoint']}"
    exported = cli.facts("checkpoint", "export", imported["checkpoint"], "out", "--dtype", "bfloat16")
    assert (exported["dtypes"], exported["weights_bytes"]) == (["bfloat16"], 2 * imported["parameters"])
    assert (Path(exported["path"]), exported["step"]) == (Path("out").absolute(), 0)
    assert exported["files"] == len([*Path("out").iterdir()])
    prepare = ("data", "prepare", "text.txt", "out/data", "--tokenizer", at / "plain")
    prepared, again = (cli.facts(*prepare) for _ in range(2))
    assert again == prepared | {"was_there": True}
    assert [Path(file).is_file() for file in prepared["files"]] == [True, True]
    assert (prepared["documents"], prepared["source_bytes"], prepared["token_dtype"]) == (1, len(TEXT), "uint16")


def test_preparations(at: Path, shown: Log, cli: CommandLine) -> None:
    """Within `train`, with a tokenizer that it trains, and by `data prepare`."""
    told: list[str] = []
    keys = ["data.path=text.txt", "model.vocab_size=270", "data.split=9,1"]
    fetch_inputs(load_config("llama2-tiny", keys), None, told.append)
    text = units.size(len(TEXT))
    first = [f"reading: {text}", "waiting for another process"]
    own = [f"training a tokenizer: {all_of(len(TEXT))}", f"tokenizing: {all_of(len(TEXT))}"]
    require(shown, *first, *own)
    assert told
    cli("data", "prepare", "text.txt", "out", "--tokenizer", at / "plain")
    require(shown, *first, *own)  # the last line is there already
    assert len(re.findall("tokenizing: .*100%", shown.text())) >= 2
    # From the cache nothing is done, and another rank shows nothing of what is done.
    before = shown.text()
    fetch_inputs(load_config("llama2-tiny", keys), None, told.append)
    fetch_inputs(load_config("llama2-tiny", [*keys, "data.split=8,2"]), None, None)
    assert shown.text() == before


def test_an_evaluation(at: Path, screen: Screen, cli: CommandLine) -> None:
    number = cli.facts("evaluate", at / "steps", "data.path=text.txt")["sequences"]
    assert lines(screen)[-1] == f"evaluating: {number:,} of {number:,} sequences, 100%"


def test_a_download(at: Path, screen: Screen, cli: CommandLine) -> None:
    content = bytes(3 << 20)
    with serve(content) as server:
        cli("data", "fetch", server.url, "here")
    require(screen, f"fetching: {all_of(len(content))}")


def test_a_verification(at: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """The command counts the layouts, which are trained by other processes, by the folders that these make."""

    def verify(_: Config, cells: Sequence[Cell], folder: Path) -> verification.Verification:
        for number in range(4):
            (folder / f"layout-{number}").mkdir()
        (folder / "layout-2").rmdir()  # of those that are done the last one alone is kept
        exact = LayoutDifferences(0.0, 0.0, 0.0, 0.0)
        return verification.Verification((1.0, 0.5), [verification.CellOutcome(cell, exact, ()) for cell in cells])

    monkeypatch.setattr(verification, "verify", verify)
    captured = cli("verify", "llama2-tiny", "--nproc", "2", "--devices", "cpu", "--json")
    number = len(json.loads(captured.out)["layouts"])
    (line,) = re.findall("verifying: [0-9 a-z,]+%", screen.text())[:1]
    assert line == f"verifying: 3 of {number} layouts, {3 / number:.0%}"
