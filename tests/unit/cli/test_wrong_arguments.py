"""A wrong command, option or key is answered by the one that was most likely meant, in one sentence and with code 2."""

import re
import shlex

import pytest

from shardwise.config.other_names import COMMANDS, OTHER_NAMES, OTHER_VALUES, SECTIONS, WITHOUT_KEY
from shardwise.config.pydantic_errors import known_paths
from shardwise.config.suggestions import suggestions
from tests.command_line import CommandLine

TRAIN = "train llama2-tiny "
MISTAKES = {
    # commands
    "trian llama2-tiny": "`shardwise train`",
    "llama2-tiny --nproc 2": "`shardwise train llama2-tiny --nproc 2`",
    "convert a b": "`shardwise checkpoint import`",
    "checkpoint compare a b": "`shardwise checkpoint diff`",
    "--verison": "`shardwise --version`",
    # options
    TRAIN + "--run_dir runs/a": "--run-dir",
    TRAIN + "--batch_size 8": "train.global_batch=8 or train.micro_batch=8",
    "evaluate runs/latest --batch-size 4": "train.micro_batch=4",
    # names of other programs, as options and as keys
    TRAIN + "--tensor-model-parallel-size 2": "parallel.tensor=2",
    TRAIN + "model.n_embd=64": "model.hidden_size",
    TRAIN + "optimizer.moe_z_loss=0.001": "optimizer.router_z_loss",
    TRAIN + "--resume_from_checkpoint=out/checkpoint-10": "--run-dir",
    # slips
    TRAIN + "train.global_bacth=8": "train.global_batch",
    TRAIN + "parallelism.tensor_parallel_degree=2": "parallel",
    TRAIN + "optimizer.muon.momentm=0.9": "optimizer.muon.momentum",
    "train gpt-tiny train.dropout=0.1": "model.resid_pdrop",
}
NOT_SURE = {TRAIN + "--batch_size 8", TRAIN + "--resume_from_checkpoint=out/checkpoint-10"}
"""Names that mean two things, or a checkpoint of another program."""
CORRECTED = {
    # units, words and pairs
    TRAIN + "--lr-warmup-fraction 0.1": TRAIN + "optimizer.warmup_steps=2",
    TRAIN + "--lr_scheduler.decay_ratio=0.5": TRAIN + "optimizer.schedule=wsd optimizer.decay_steps=9",
    TRAIN + "--gradient_accumulation_steps 4 parallel.tensor=2": TRAIN
    + "parallel.tensor=2 'train.global_batch=8 per 1 rank'",
    TRAIN + "--total-batch-size 1024": TRAIN + "train.global_batch=16",
    TRAIN + "--adam-beta1 0.8 --adam-beta2 0.95": TRAIN + "'optimizer.betas=[0.8,0.95]'",
    TRAIN + "--clip-grad 0.0": TRAIN + "optimizer.max_norm=null",
    TRAIN + "--dtype bfloat16 --optim adamw_torch": TRAIN + "precision.mode=mixed optimizer.name=adamw",
    # what is sure, with what is left out
    "train --bf16 llama2-tiny --fp8-format hybrid": TRAIN + "precision.mode=mixed precision.matmul=fp8",
    TRAIN + "--output_dir x --run-dir=y --do_train": TRAIN + "--run-dir x --run-dir=y",
    TRAIN + "--no-compile train.lr=3e-4 -- --bs": TRAIN + "compile.enabled=false optimizer.lr=3e-4 -- --bs",
    TRAIN + "launch.environment.A=1 --lr 1": TRAIN + "launch.environment.A=1 optimizer.lr=1",
}
WITHOUT = {
    TRAIN + "--lr 1 --fp16 --zzz 3": f"corrected (without --fp16 and --zzz): shardwise {TRAIN}optimizer.lr=1",
    TRAIN + "--hidden-dropout 0.1 --lr 1": f"corrected (without --hidden-dropout): shardwise {TRAIN}optimizer.lr=1",
    TRAIN + "--lr_scheduler_type exotic --lr 1": f"corrected (without --lr_scheduler_type): shardwise {TRAIN}"
    "optimizer.lr=1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_by_what_was_meant(line: str, cli: CommandLine) -> None:
    said = cli(*shlex.split(line), code=2)
    assert said.out == ""
    answer, _, corrected = said.err.partition("\n")
    assert re.fullmatch(rf"shardwise: \S.+did you mean {re.escape(MISTAKES[line])}\?", answer), said.err
    # A wrong option or key is followed by the whole command, which has no wrong name.
    is_name = re.match(r"(train|evaluate|generate) .*( --|\.\w+=)", line) is not None
    assert bool(corrected) == (is_name and line not in NOT_SURE), said.err
    if corrected:
        meant = corrected.strip().removeprefix("corrected: shardwise ")
        assert set(shlex.split(line)) & set(shlex.split(meant)) >= {*line.split()[:2]}
        said = cli.refused(*shlex.split(meant), "--no-such-option")
        assert re.fullmatch(r"shardwise: unknown option --no-such-option\b.*\n", said)


@pytest.mark.parametrize("line", CORRECTED)
def test_a_refused_command_line_ends_with_the_corrected_one(line: str, cli: CommandLine) -> None:
    last = cli.refused(*shlex.split(line)).splitlines()[-1]
    assert last == f"corrected: shardwise {CORRECTED[line]}".strip()


@pytest.mark.parametrize("line", WITHOUT)
def test_a_corrected_command_names_what_it_leaves_out(line: str, cli: CommandLine) -> None:
    assert cli.refused(*shlex.split(line)).splitlines()[-1] == WITHOUT[line]


@pytest.mark.parametrize("line", [TRAIN + "train.steps=-1", TRAIN + "--fp16", TRAIN + "--zzz", "train nope --nproc 2"])
def test_without_a_sure_correction_there_is_no_command(line: str, cli: CommandLine) -> None:
    assert "corrected" not in cli.refused(*shlex.split(line))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("train", "missing RECIPE, e.g. `shardwise train llama2-tiny` (list: `shardwise recipes`)"),
        ("evaluate runs/a --part tset", "argument --part: invalid choice: 'tset' (choose from "),
        (TRAIN + "--data-parallel-size 4", "unknown option --data-parallel-size: the data-parallel degree is "),
        (TRAIN + "train.fp16=true", "train.fp16: unknown key; float16 is not trained: precision.mode=mixed computes"),
        (TRAIN + "model.router_aux_loss_coef=0.01", "model.router_aux_loss_coef: unknown key; balance losses are "),
        (TRAIN + "--overwrite_output_dir", "unknown option --overwrite_output_dir: leave it out: each run has a new "),
        (TRAIN + "--no-such-option", "unknown option --no-such-option; `shardwise train --help` lists"),
        ("zzz", "unknown command 'zzz'; `shardwise --help` lists what there is"),
        (TRAIN + "zzz.a=1", "zzz.a: unknown key; the sections are model, parallel, train, "),
    ],
)
def test_a_mistake_without_a_likely_meaning_names_what_there_is(line: str, text: str, cli: CommandLine) -> None:
    assert cli.refused(*line.split()).startswith(f"shardwise: {text}")


@pytest.mark.parametrize("arguments", [[], ["data"], ["checkpoint"]])
def test_a_command_line_that_names_nothing_prints_help(arguments: list[str], cli: CommandLine) -> None:
    said = cli(*arguments)
    assert said.err == ""
    assert said.out.startswith("usage: shardwise")


def test_each_name_of_another_library_leads_to_a_key_or_an_option() -> None:
    keys = {*known_paths()}
    targets = {target for targets in OTHER_NAMES.values() for target in targets}
    assert {target.partition("=")[0] for target in targets if not target.startswith("--")} <= {*keys, "model.config"}
    assert {target for target in targets if target.startswith("--")} == {"--run-dir", "--nproc", "--max-tokens"}
    assert set(SECTIONS.values()) <= keys
    assert set(OTHER_NAMES) >= OTHER_VALUES
    assert not set(OTHER_NAMES) & set(WITHOUT_KEY)
    assert not {*OTHER_NAMES, *SECTIONS} & {key for key in keys if "." in key}, "a key is no name of another library"
    assert set(COMMANDS.values()) > {"train", "checkpoint import", "--help"}


def test_a_suggestion_is_a_key_or_an_option_that_the_command_has() -> None:
    assert suggestions("batch_size", ["train.micro_batch"]) == ["train.micro_batch"]
    assert suggestions("batch_size", ["data.path"]) == []
    assert suggestions("--batch-size", [], ["--json"]) == []
    assert suggestions("--JSON", [], ["--json"]) == ["--json"]
    assert suggestions("output_dir", [], ["--run-dir"]) == ["--run-dir"]
    assert suggestions("output_dir", [], ["--json"]) == []
