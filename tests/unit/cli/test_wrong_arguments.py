"""A wrong command, option or key is answered by the one that was most likely meant, in one sentence and with code 2."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from shardwise.config.other_names import COMMANDS, OTHER_NAMES, OTHER_VALUES, SECTIONS, WITHOUT_KEY
from shardwise.config.pydantic_errors import known_paths
from shardwise.config.suggestions import suggestions
from tests.command_line import CommandLine

TABLES = yaml.safe_load(Path(__file__).with_name("wrong_arguments.yaml").read_text(encoding="utf-8"))


UNSURE = ("llama2-tiny train.steps=-1", "llama2-tiny --fp16", "llama2-tiny --zzz", "nope --nproc 2")
MEANT = TABLES["meant"]
SEVERAL = TABLES["several meanings"]
CORRECTED = TABLES["corrected"]
LEFT_OUT = TABLES["left out"]
UNCLEAR = TABLES["unclear"]
REFUSED = TABLES["refused"]


@pytest.mark.parametrize("line", MEANT | SEVERAL)
def test_a_mistake_is_answered_by_what_was_meant(line: str, cli: CommandLine) -> None:
    said = cli(*shlex.split(line), code=2)
    assert said.out == ""
    answer, _, corrected = said.err.partition("\n")
    meant = re.escape((MEANT | SEVERAL)[line])
    assert re.fullmatch(rf"shardwise: \S.+did you mean {meant}\?", answer), said.err
    # A wrong option or key is followed by the whole command, which has no wrong name.
    is_name = re.match(r"(train|evaluate|generate) .*( --|\.\w+=)", line) is not None
    assert bool(corrected) == (is_name and line in MEANT), said.err
    if corrected:
        whole = shlex.split(corrected.strip().removeprefix("corrected: shardwise "))
        assert set(shlex.split(line)) & set(whole) >= {*line.split()[:2]}
        said = cli.refused(*whole, "--no-such-option")
        assert re.fullmatch(r"shardwise: unknown option --no-such-option\b.*\n", said)


@pytest.mark.parametrize("line", CORRECTED | LEFT_OUT)
def test_a_refused_command_line_ends_with_the_corrected_one(line: str, cli: CommandLine) -> None:
    last = cli.refused(*shlex.split(line)).splitlines()[-1]
    assert last == LEFT_OUT.get(line, f"corrected: shardwise {CORRECTED.get(line)}")


@pytest.mark.parametrize("line", [f"train {words}" for words in UNSURE])
def test_without_a_sure_correction_there_is_no_command(line: str, cli: CommandLine) -> None:
    assert "corrected" not in cli.refused(*line.split())


@pytest.mark.parametrize("line", UNCLEAR)
def test_a_mistake_without_a_likely_meaning_names_what_there_is(line: str, cli: CommandLine) -> None:
    assert cli.refused(*line.split()).startswith(f"shardwise: {UNCLEAR[line]}")


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_value_is_refused(
    line: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    for module in ("base.hardware", "cli.compile"):
        monkeypatch.setattr(f"shardwise.{module}.accelerators", lambda: ("cpu", 0))
    (own_folder / "there.yaml").write_text("name: a device\n")
    assert REFUSED[line] in cli.refused(*shlex.split(line))
    assert [path.name for path in own_folder.iterdir()] == ["there.yaml"]


@pytest.mark.parametrize("arguments", [[], ["data"], ["checkpoint"]])
def test_a_command_line_that_names_nothing_prints_help(arguments: list[str], cli: CommandLine) -> None:
    said = cli(*arguments)
    assert said.err == ""
    assert said.out.startswith("usage: shardwise")


def test_names_of_other_libraries_lead_to_keys_and_options() -> None:
    keys = {*known_paths()}
    targets = {target for targets in OTHER_NAMES.values() for target in targets}
    assert {target.partition("=")[0] for target in targets if not target.startswith("--")} <= {*keys, "model.config"}
    assert {target for target in targets if target.startswith("--")} == {"--run-dir", "--nproc", "--max-tokens"}
    assert set(SECTIONS.values()) <= keys
    assert set(OTHER_NAMES) >= OTHER_VALUES
    assert not set(OTHER_NAMES) & set(WITHOUT_KEY)
    assert not {*OTHER_NAMES, *SECTIONS} & {key for key in keys if "." in key}, "a key is no name of another library"
    assert set(COMMANDS.values()) > {"train", "checkpoint import", "--help"}
    assert suggestions("batch_size", ["train.micro_batch"]) == ["train.micro_batch"]
    assert suggestions("batch_size", ["data.path"]) == []
    assert suggestions("--batch-size", [], ["--json"]) == []
    assert suggestions("--JSON", [], ["--json"]) == ["--json"]
    assert suggestions("output_dir", [], ["--run-dir"]) == ["--run-dir"]
    assert suggestions("output_dir", [], ["--json"]) == []
    assert len(ROWS) == 202
    assert len({program for program, _, _ in ROWS}) == 11


RECORD = Path(__file__).parent / "other_flags.txt"
ROWS = [
    tuple(cell.strip() for cell in line.split("|"))
    for line in RECORD.read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def said_to(flag: str, cli: CommandLine) -> list[str]:
    return cli.refused("train", "llama2-tiny", *shlex.split(flag)).strip().splitlines()


@pytest.mark.parametrize("program", sorted({program for program, _, _ in ROWS}))
def test_each_flag_is_answered_rightly(program: str, cli: CommandLine) -> None:
    for _, flag, answer in (row for row in ROWS if row[0] == program):
        first, *rest = said_to(flag, cli)
        if answer.startswith("…"):
            assert answer.removeprefix("… ") in first, (flag, first)
            # What can be left out is left out of the corrected command.
            left_out = ["corrected: shardwise train llama2-tiny"] if answer.startswith("… leave it out") else []
            assert rest == left_out, (flag, rest)
        else:
            assert rest == [f"corrected: shardwise train llama2-tiny {answer}"], (flag, first)
