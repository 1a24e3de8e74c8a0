"""Shell scripts of the tutorials' kind: every option is answered, and conditions are decided as the script would."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.config.error_texts import known_paths
from shardwise.config.suggestions import reason_without_key, suggestions
from shardwise_use.porting.recipes import recipe_of
from tests.arch.source import ROOT

OPTIONS: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "others/tutorial_options.yaml").read_text())
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "bf16SR": {"precision": {"mode": "bfloat16"}, "optimizer": {"zero": 0}},
    "fp32_ZeroOptMaster": {
        "precision": {"mode": "mixed", "gradient": "bfloat16", "reduce": "bfloat16"},
        "optimizer": {"zero": 1},
    },
    "fp32_ZeroOptMasterGradAcc": {"precision": {"mode": "mixed", "reduce": "bfloat16"}, "optimizer": {"zero": 1}},
    "megatron_amp_O2": {"precision": {"mode": "mixed"}, "optimizer": {"zero": 0}},
    "fp32": {"precision": {"mode": "float32"}, "optimizer": {"zero": 0}},
}
SETUP = """if [ -v SLURM_NNODES ]
then
    NTASKS=$SLURM_NTASKS
elif [ -v OMPI_COMM_WORLD_RANK ]; then
    NTASKS=$OMPI_COMM_WORLD_SIZE
else
    NTASKS=2
fi
training_precision="{mode}"
if [[ $training_precision == "bf16SR" ]];then
    export XLA_USE_BF16=1
    OPTIM=adamw ZERO=false
    export ZERO=false
elif [[ $training_precision == "fp32" ]]; then
    export XLA_USE_BF16=0
    export ZERO=false
else
    export XLA_DOWNCAST_BF16=1
    if [[ $training_precision == fp32_Zero* ]]; then
        export ZERO=true
    fi
fi
if [ "$COMPILE" = "1" ]; then
    export TRAIN_ITERS=4
fi
"""
TRAIN = """source ./setup.sh
: ${TRAIN_ITERS:=3000}
: ${GBS_MULTIPLE:=32}
GBS=$((NTASKS*GBS_MULTIPLE))
torchrun --nproc_per_node 32 pretraining.py \\
    trainer.max_steps=$TRAIN_ITERS trainer.precision=32 model.global_batch_size=$GBS model.micro_batch_size=1 \\
    model.tensor_model_parallel_size=8 model.encoder_seq_length=128 model.optim.sched.warmup_steps=75 \\
    model.optim.lr=0.00015 model.max_position_embeddings=128 model.hidden_size=64 model.num_layers=2 \\
    model.num_attention_heads=8 model.ffn_hidden_size=256 model.tokenizer.vocab_file=gpt2-vocab.json
"""


@pytest.mark.parametrize("program", OPTIONS)
def test_every_option_has_a_counterpart_or_a_reason(program: str) -> None:
    keys = known_paths()
    silent = [
        name for name in OPTIONS[program] if not reason_without_key(name) and not suggestions(name, keys, value=True)
    ]
    assert silent == []


@pytest.mark.parametrize("mode", MODES)
def test_the_precision_of_a_script_is_that_of_its_variable(mode: str, tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text(SETUP.replace("{mode}", mode), encoding="utf-8")
    (tmp_path / "train.sh").write_text(TRAIN, encoding="utf-8")
    made = recipe_of(str(tmp_path / "train.sh"))
    assert made.problems == []
    assert made.sections["precision"] == MODES[mode]["precision"]
    assert made.sections["optimizer"]["zero"] == MODES[mode]["optimizer"]["zero"]
    assert made.sections["train"]["steps"] == 3000, "the branch that compiles alone does not run"
    assert made.sections["train"]["global_batch"] == 64
    told = {row.name: row for row in made.rows}
    assert not told["trainer.precision"].keys or mode == "fp32"


def test_a_precision_without_counterpart_is_told(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text(SETUP.replace("{mode}", "fp32_OptStates"), encoding="utf-8")
    (tmp_path / "train.sh").write_text(TRAIN, encoding="utf-8")
    told = {row.name: row.reason for row in recipe_of(str(tmp_path / "train.sh")).rows}
    assert "precision.mode=mixed has float32 weights too" in told["training_precision"]


def test_micro_batches_of_a_pipeline_are_parts_of_the_batch_of_a_replica(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "BS=64\nrun_llama_nxd.py --train_batch_size $BS --num_microbatches 16 --tensor_parallel_size 4 "
        "--pipeline_parallel_size 2 --use_zero1_optimizer 1 --use_selective_checkpoint 0 --max_steps 30\n",
        encoding="utf-8",
    )
    made = recipe_of(str(tmp_path / "run.sh"), ["model.config=x"])
    assert made.sections["train"]["micro_batch"] == 4
    assert made.sections["train"]["global_batch"] == "64 per 8 ranks"
    assert made.sections["train"]["recompute"] == "full"
    assert made.sections["optimizer"]["zero"] == 1


CONDITIONS = {
    '[ -z "$SLURM_NTASKS" ]': "then",
    '[ ! -z "$SLURM_NTASKS" ]': "else",
    '[[ -n "$1" ]]': "else",
    "[ -v KNOWN ]": "then",
    '[[ "yes" == $KNOWN ]]': "then",
    '[ "$KNOWN" != yes ]': "else",
    "[ -v PERF_TEST ] && [ $PERF_TEST -gt 0 ]": "else",
    '[ -v PERF_TEST ] || [ "$NUMBER" -ge 3 ]': "then",
    "[ $UNSET -gt 0 ]": "else",
    "[ -e /opt/tool ]": "else",  # of a condition that is not known the last branch counts
    '[ "$KNOWN" == no ] && which tool': "else",
    '[ "$HOST" == node1 ]': "else",
}


def steps_of(lines: str, folder: Path) -> object:
    """The number of steps of a training whose script sets STEPS in these lines."""
    script = folder / "run.sh"
    script.write_text(
        f"{lines}\ntrain.py --max_steps $STEPS --grad_accum_usteps 2 --tensor_parallel_size 2\n", encoding="utf-8"
    )
    return {row.name: row.value for row in recipe_of(str(script)).rows}["max_steps"]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_decided_as_where_nothing_is_set(condition: str, tmp_path: Path) -> None:
    branches = f"if {condition}; then\n  STEPS=7\nelse\n  STEPS=9\nfi"
    steps = steps_of(f"KNOWN=yes\nNUMBER=3\nHOST=`hostname`\n{branches}", tmp_path)
    assert steps == {"then": 7, "else": 9}[CONDITIONS[condition]]


DOUBTS = (
    "MODEL=llama-7b\nif [[ $MODEL == llama* ]]; then",
    'MODEL=llama-7b\nif [ "${MODEL%%-*}" = llama ]; then',
    "for TP in 1 2 4; do :; done\nif [ $TP -eq 4 ]; then",
    "read -r N <<< 4\nif [ $N -eq 4 ]; then",
    "let N=4\nif [ $N -eq 4 ]; then",
    "N=0\n((N++))\nif [ $N -eq 1 ]; then",
    "N=1; N=4\nif [ $N -eq 4 ]; then",
    "export TP=8 PP=4\nif [ $PP -gt 1 ]; then",
    "readonly PP=4\nif [ $PP -gt 1 ]; then",
    'if [ "$HOSTNAME" != "" ]; then',
    'set_size() {\n  if [ "$1" = big ]; then',
    'source ../cluster/environment\nif [ "$PARTITION" = big ]; then',
)


@pytest.mark.parametrize("condition", DOUBTS)
def test_a_condition_on_what_is_not_known_is_not_decided(condition: str, tmp_path: Path) -> None:
    """The branch may run, so that what it assigns counts."""
    assert steps_of(f"STEPS=9\n{condition}\n  STEPS=7\nfi", tmp_path) == 7


def test_a_branch_after_the_one_that_runs_does_not(tmp_path: Path) -> None:
    branches = (
        "if [ $A -eq 1 ]; then\n  if [ -d x ]; then\n    STEPS=5\n  fi\nelif [ $A -eq 1 ]; then\n  STEPS=6\n"
        "elif [ -d y ]; then\n  STEPS=7\nelse\n  STEPS=8\nfi"
    )
    assert steps_of(f"A=1\n{branches}\n[ -z x ]\nif [ -z x ]; then STEPS=9; fi", tmp_path) == 5


def test_the_page_says_how_many_options_are_answered() -> None:
    page = " ".join((ROOT / "docs/porting.md").read_text(encoding="utf-8").split())
    assert f"All {len({name for names in OPTIONS.values() for name in names})} options of the programs" in page


def test_rates_that_end_after_the_training_are_told(tmp_path: Path) -> None:
    """nanoGPT's lr_decay_iters is 600,000 where it is left out."""
    (tmp_path / "nano.py").write_text("n_layer = 2\nn_head = 2\nn_embd = 64\nmax_iters = 5000\nbatch_size = 4\n")
    made = recipe_of(str(tmp_path / "nano.py"))
    assert made.problems == []
    assert "constant_steps" not in made.sections["optimizer"]
    (row,) = (row for row in made.rows if row.name == "lr_decay_iters")
    assert row.reason.startswith("optimizer.constant_steps would be -595000, as rates end after the training")
