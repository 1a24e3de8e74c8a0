"""A wrong command, option or key is answered by the one that was most likely meant, in one sentence and with code 2."""

import re
import shlex

import pytest

from shardwise.cli import main
from shardwise.config.error_texts import known_paths
from shardwise.config.other_names import COMMANDS, OTHER_NAMES, OTHER_VALUES, SECTIONS, WITHOUT_KEY
from shardwise.config.suggestions import suggestions

TRAIN = "train llama2-tiny "
MISTAKES = {
    # commands
    "trian llama2-tiny": "`shardwise train`",
    "llama2-tiny --nproc 2": "`shardwise train llama2-tiny --nproc 2`",
    "convert a b": "`shardwise checkpoint import`",
    "data prepar x": "`shardwise data prepare`",
    "checkpoint compare a b": "`shardwise checkpoint diff`",
    "--verison": "`shardwise --version`",
    # options
    TRAIN + "--run_dir runs/a": "--run-dir",
    TRAIN + "--step 20": "train.steps=VALUE",
    TRAIN + "--batch_size 8": "train.global_batch=VALUE or train.micro_batch=VALUE",
    TRAIN + "--no-compile": "compile.enabled=false",
    "evaluate runs/latest --batch-size 4": "train.micro_batch=VALUE",
    "generate runs/latest --prompt a --max_new_tokens 5": "--max-tokens",
    # names of other programs, as options and as keys
    TRAIN + "--tensor-model-parallel-size 2": "parallel.tensor=VALUE",
    TRAIN + "model.n_embd=64": "model.hidden_size",
    TRAIN + "optimizer.moe_z_loss=0.001": "optimizer.router_z_loss",
    TRAIN + "moe.z_loss_coeff=0.001": "optimizer.router_z_loss",
    TRAIN + "--expert-model-parallel-size 2": "parallel.expert=VALUE",
    TRAIN + "--zero_optimization.stage=2": "optimizer.zero=VALUE",
    TRAIN + "--resume_from_checkpoint=out/checkpoint-10": "--run-dir",
    # slips
    TRAIN + "train.global_bacth=8": "train.global_batch",
    TRAIN + "parallelism.tensor_parallel_degree=2": "parallel",
    TRAIN + "optimizer.muon.momentm=0.9": "optimizer.muon.momentum",
    "train gpt-tiny train.dropout=0.1": "model.resid_pdrop",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_by_what_was_meant(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(rf"shardwise: \S.+did you mean {re.escape(MISTAKES[line])}\?\n", said.err), said.err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("train", "missing RECIPE, e.g. `shardwise train llama2-tiny` (list: `shardwise recipes`)"),
        ("branch", "the following arguments are required: RUN@STEP; `shardwise branch --help` says more"),
        ("evaluate runs/a --part tset", "argument --part: invalid choice: 'tset' (choose from "),
        (TRAIN + "--data-parallel-size 4", "unknown option --data-parallel-size: the data-parallel degree is "),
        (TRAIN + "train.fp16=true", "train.fp16: unknown key; float16 is not trained: precision.mode=mixed computes"),
        (TRAIN + "moe.aux_loss_coeff=0.01", "moe.aux_loss_coeff: unknown key; balance losses are those of the global "),
        (TRAIN + "model.router_aux_loss_coef=0.01", "model.router_aux_loss_coef: unknown key; balance losses are "),
        (TRAIN + "--moe-aux-loss-coeff 0.01", "unknown option --moe-aux-loss-coeff: balance losses are those of the "),
        (TRAIN + "--overwrite_output_dir", "unknown option --overwrite_output_dir; `shardwise train --help` lists"),
        ("zzz", "unknown command 'zzz'; `shardwise --help` lists what there is"),
        ("data zzz", "unknown action 'zzz'; `shardwise data --help` lists what there is"),
        (TRAIN + "zzz.a=1", "zzz.a: unknown key; the sections are model, parallel, train, "),
    ],
)
def test_a_mistake_without_a_likely_meaning_names_what_there_is(
    line: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"shardwise: {text}")


def test_every_unknown_option_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{TRAIN} --lr 1 --nodes 2 --gpus 2 -- --bs".split()) == 2
    assert capsys.readouterr().err == (
        "shardwise: 2 errors\n"
        "- unknown option --lr: did you mean optimizer.lr=VALUE?\n"
        "- unknown option --gpus: did you mean --nproc?\n"
    )


@pytest.mark.parametrize("arguments", [[], ["data"], ["checkpoint"]])
def test_a_command_line_that_names_nothing_prints_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("usage: shardwise")


def test_each_name_of_another_library_leads_to_a_key_or_an_option() -> None:
    keys = {*known_paths()}
    targets = {target for targets in OTHER_NAMES.values() for target in targets}
    assert {target.partition("=")[0] for target in targets if not target.startswith("--")} <= keys
    assert {target for target in targets if target.startswith("--")} == {"--run-dir", "--nproc", "--max-tokens"}
    assert set(SECTIONS.values()) <= keys
    assert set(OTHER_NAMES) >= OTHER_VALUES
    assert not set(OTHER_NAMES) & set(WITHOUT_KEY)
    assert not {*OTHER_NAMES, *SECTIONS} & {key for key in keys if "." in key}, "a key is no name of another library"
    assert set(COMMANDS.values()) > {"train", "checkpoint import", "--help"}


def test_a_suggestion_is_a_key_that_the_command_reads() -> None:
    assert suggestions("batch_size", ["train.micro_batch"]) == ["train.micro_batch"]
    assert suggestions("batch_size", ["data.path"]) == []
    assert suggestions("--batch-size", [], ["--json"]) == []
    assert suggestions("--JSON", [], ["--json"]) == ["--json"]
