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
    "tarin llama2-tiny": "`shardwise train`",
    "pretrain llama2-tiny": "`shardwise train`",
    "llama2-tiny --nproc 2": "`shardwise train llama2-tiny --nproc 2`",
    "my/recipe.yaml": "`shardwise train my/recipe.yaml`",
    "eval runs/latest": "`shardwise evaluate`",
    "reciepes": "`shardwise recipes`",
    "convert a b": "`shardwise checkpoint import`",
    "data prepar x": "`shardwise data prepare`",
    "--verison": "`shardwise --version`",
    # options
    TRAIN + "--nprocs 2": "--nproc 2",
    TRAIN + "--nproc_per_node=4": "--nproc 4",
    TRAIN + "--dryrun": "--dry-run",
    TRAIN + "--run_dir runs/a": "--run-dir runs/a",
    TRAIN + "--output_dir out": "--run-dir out",
    TRAIN + "--steps 20": "train.steps=20",
    TRAIN + "--step 20": "train.steps=20",
    TRAIN + "--optimizer lamb": "optimizer.name=lamb",
    TRAIN + "--train.steps=20": "train.steps=20",
    TRAIN + "--lr 1e-3": "optimizer.lr=1e-3",
    TRAIN + "--batch_size 8": "train.global_batch=8 or train.micro_batch=8",
    TRAIN + "train.batch_size=8": "train.global_batch or train.micro_batch",
    TRAIN + "--bf16": "precision.mode=mixed",
    "plan llama2-tiny --devices h100:8": "--device h100:8",
    "evaluate runs/latest --batch-size 4": "train.micro_batch=4",
    "generate runs/latest --prompt a --max_new_tokens 5": "--max-tokens 5",
    # Hugging Face
    TRAIN + "--learning_rate 5e-4": "optimizer.lr=5e-4",
    TRAIN + "--per_device_train_batch_size 8": "train.micro_batch=8",
    TRAIN + "--num_train_epochs 3": "train.steps",
    TRAIN + "--adam_beta2 0.95": "optimizer.betas",
    TRAIN + "--gradient_checkpointing": "train.recompute=full",
    TRAIN + "train.max_grad_norm=1": "optimizer.max_norm",
    TRAIN + "train.lr_scheduler_type=cosine": "optimizer.schedule",
    TRAIN + "save_steps=100": "checkpoint.every",
    TRAIN + "logging_steps=10": "log.every",
    TRAIN + "train.bf16=true": "precision.mode=mixed",
    # Megatron-LM
    TRAIN + "--tensor-model-parallel-size 2": "parallel.tensor=2",
    TRAIN + "--micro-batch-size 2": "train.micro_batch=2",
    TRAIN + "--seq-length 128": "train.sequence_length=128",
    TRAIN + "--sequence-parallel": "parallel.sequence=true",
    TRAIN + "--use-distributed-optimizer": "optimizer.zero=1",
    TRAIN + "--data-path corpus.jsonl": "data.path=corpus.jsonl",
    # nanoGPT
    TRAIN + "model.n_embd=64": "model.hidden_size",
    TRAIN + "train.block_size=64": "train.sequence_length",
    TRAIN + "eval_interval=5": "train.eval_every",
    TRAIN + "--compile": "compile.enabled=true",
    TRAIN + "--compile=False": "compile.enabled=false",
    TRAIN + "--no-compile": "compile.enabled=false",
    TRAIN + "--compile.no-enabled": "compile.enabled=false",
    "plan llama2-tiny --no-sequence-parallel": "parallel.sequence=false",
    # torchtitan, DeepSpeed, NeuronX, nanochat
    TRAIN + "--compile.enable": "compile.enabled=true",
    TRAIN + "--zero_optimization.stage=2": "optimizer.zero=2",
    TRAIN + "--training.mixed_precision_param=bfloat16": "precision.mode",
    TRAIN + "--model.name=llama3": "model.family",
    TRAIN + "--metrics.enable_wandb": "log.trackers=[wandb]",
    TRAIN + "--use_mix_precision": "precision.mode=mixed",
    TRAIN + "--total-batch-size=524288": "train.global_batch",
    TRAIN + "--resume_from_checkpoint=out/checkpoint-10": "--run-dir",
    # slips
    TRAIN + "train.global_bacth=8": "train.global_batch",
    TRAIN + "optimizer.learning_rat=1": "optimizer.lr",
    TRAIN + "trian.steps=3": "train",
    TRAIN + "parallelism.tensor_parallel_degree=2": "parallel",
    TRAIN + "lr_scheduler.warmup_steps=5": "optimizer.warmup_steps",
    TRAIN + "optimizer.muon.momentm=0.9": "optimizer.muon.momentum",
    TRAIN + "train.tensor=2": "parallel.tensor",
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
        ("branch", "missing RUN@STEP; `shardwise branch --help` says what it needs"),
        ("checkpoint export", "missing CHECKPOINT and DEST; `shardwise checkpoint export --help` says what it needs"),
        (TRAIN + "--nproc", "--nproc must have a value"),
        (TRAIN + "--nproc two", "--nproc ('two') must be a whole number"),
        ("plan llama2-tiny --why A", "--why must have 2 values"),
        ("generate a --prompt b --prompt-file c", "--prompt-file must not go with --prompt: leave one of them out"),
        ("generate a", "--prompt, --prompt-file or --interactive must be given"),
        ("evaluate runs/a --part tset", "--part ('tset') must be train, eval, test or all; did you mean test?"),
        (
            TRAIN + "--data-parallel-size 4",
            "unknown option --data-parallel-size: the data-parallel degree is ",
        ),
        (
            TRAIN + "--expert-parallel-size 2",
            "unknown option --expert-parallel-size: there are no experts",
        ),
        (
            TRAIN + "--train.max_tokens=1000",
            "unknown option --train.max_tokens: train.steps takes tokens with",
        ),
        (
            TRAIN + "--gradient_accumulation_steps 4",
            "unknown option --gradient_accumulation_steps: train.global_",
        ),
        (
            TRAIN + "--grad_accum_usteps 4",
            "unknown option --grad_accum_usteps: train.global_batch / (train.",
        ),
        (
            TRAIN + "--load ckpt",
            "unknown option --load: --run-dir RUN continues a run, and checkpoint.load=PATH",
        ),
        (TRAIN + "--config a.yaml", "unknown option --config: the recipe is the first argument"),
        (TRAIN + "train.fp16=true", "train.fp16: unknown key; float16 is not trained: precision.mode=mixed computes"),
        *(
            (f"{TRAIN}{option}", f"unknown option {option.partition('=')[0]}; `shardwise train --help` lists")
            for option in (
                *("--checkpoint.enable", "--validation.enable", "--validation.steps=5", "--scheduler.name=linear"),
                *("--data=TextFiles", "--overwrite_output_dir", "--model.flavor=8B", "--bf16=False"),
            )
        ),
        (TRAIN + "parallel.data=2", "parallel.data: unknown key; the data-parallel degree is the number of ranks"),
        (TRAIN + "--zzz", "unknown option --zzz; `shardwise train --help` lists the options"),
        ("zzz", "unknown command 'zzz'; `shardwise --help` lists what there is"),
        ("data zzz", "unknown action 'zzz'; `shardwise data --help` lists what there is"),
        ("checkpoint compare a b", "unknown action 'compare': did you mean `shardwise checkpoint diff`?"),
        ("checkpoint prun a", "unknown action 'prun': did you mean `shardwise checkpoint prune`?"),
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
        "- unknown option --lr: did you mean optimizer.lr=1?\n"
        "- unknown option --gpus: did you mean --nproc 2?\n"
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
    assert suggestions("--num-gpus", [], ["--json"]) == []
    assert suggestions("--JSON", [], ["--json"]) == ["--json"]
