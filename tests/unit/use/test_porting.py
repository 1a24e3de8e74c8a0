"""Files of other programs become recipes that do the same: each key with the value that means it, and valid.

The files in `others` are written in the form of the programs' own examples; `titan.json`, `olmo_core.json` and
`training_args.json` were saved by torchtitan 0.3.0, OLMo-core 3.0.0 and transformers 5.23.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from shardwise.config import config_from_sections
from shardwise.config.other_names import PROGRAMS
from shardwise_use.porting.recipes import recipe_of
from tests.command_line import CommandLine

OTHERS = Path(__file__).parent / "others"


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """The files in a folder of their own, with the model of a Hugging Face folder beside them."""
    shutil.copytree(OTHERS, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.py.txt"):
        file.rename(file.with_suffix(""))
    (tmp_path / "model").mkdir()
    model = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return tmp_path


RECIPES, SETTINGS = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8")).values()


@pytest.mark.parametrize("file", RECIPES)
def test_a_file_becomes_a_recipe_that_does_the_same(file: str, others: Path) -> None:
    made = recipe_of(str(others / file))
    assert made.problems == []
    wanted = {**RECIPES[file]}
    if "config" in wanted["model"]:
        wanted["model"] = {"config": str(others / "model")}
    assert made.sections == wanted
    assert config_from_sections(made.sections).train.sequence_length == wanted["train"]["sequence_length"]


BESIDE = {
    "run_clm.sh": ["model.config=MODEL"],
    "training_args.json": ["model.config=MODEL", "train.sequence_length=64"],
    "deepspeed.json": ["model.config=MODEL", "train.sequence_length=64"],
}
"""Keys that are given beside files which do not have them."""


@pytest.mark.parametrize("file", SETTINGS)
def test_settings_carry_over_with_their_meaning(file: str, others: Path) -> None:
    beside = [word.replace("MODEL", str(others / "model")) for word in BESIDE.get(file, [])]
    made = recipe_of(str(others / file), beside)
    assert made.problems == []
    for name, wanted in SETTINGS[file].items():
        assert {key: made.sections[name].get(key) for key in wanted} == wanted, name


def test_a_table_says_what_became_of_each_setting(others: Path, cli: CommandLine) -> None:
    target = others / "my.yaml"
    said = cli("recipes", "--from", others / "megatron.sh", "--write", target).out
    rows = {row.split(" = ")[0].strip(): row for row in said.splitlines() if " = " in row}
    assert rows["lr_warmup_samples"].endswith("→ optimizer.warmup_steps=50")
    assert rows["adam_eps"].endswith("→ optimizer.eps=1e-08 (its default)")
    assert rows["swiglu"].endswith("→ model.family=llama")
    assert rows["use_mcore_models"].endswith("attention and norms run on torch's fused kernels where there are any")
    blocks = [line for line in said.splitlines() if not line.startswith(" ")]
    assert blocks == [
        "Megatron-LM: carried over",
        "nothing to set",
        "not understood",
        PROGRAMS["megatron"].note,
        f"wrote {target}; train it with: shardwise train {target} --nproc 8",
    ]
    assert "  decoupled_lr = 0.0005" in said
    # The recipe is one: its dry run sizes the run, with data that are here.
    overrides = [f"{key}=null" for key in ("data.blend", "data.tokenizer", "checkpoint.path")]
    overrides += ["data.dataset=tiny", "model.vocab_size=512"]
    assert "TP 2" in cli("train", target, *overrides, "--nproc", "8", "--dry-run").out


def test_what_is_missing_is_told_with_the_command_that_gives_it(others: Path, cli: CommandLine) -> None:
    file = str(others / "deepspeed.json")
    assert cli.refused("recipes", "--from", file, "--write", others / "my.yaml") == (
        "shardwise: 3 errors\n- model is missing (what is trained)\n"
        "- train.sequence_length is missing (tokens per sequence)\n"
        f"- give keys beside it: `shardwise recipes --from {file} model.config=FOLDER train.sequence_length=VALUE "
        "--write my.yaml`\n"
    )
    assert not (others / "my.yaml").exists()
    said = cli("recipes", "--from", file, f"model.config={others / 'model'}", "train.sequence_length=64").out
    assert "missing: data; give data.path=YOUR_TEXT.jsonl to `shardwise train`" in said
    assert "# Your own data: data.path=YOUR_TEXT.jsonl\nmodel:\n  config: " in said


SEVERAL = "must be of one program, and it has settings of Hugging Face's Trainer and Megatron-LM: keep those of one"
MEGATRON = "pretrain_gpt.py --num-layers 2 --train-iters 10 --tensor-model-parallel-size 2"
GPT = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --train-iters 10 --lr 1e-3 --vocab-size 512 --data-path /data/text "
)
FAMILIES = {
    "": "gpt",
    "--position-embedding-type rope --ffn-hidden-size 256": "gpt_neox",
    "--swiglu --normalization RMSNorm --use-rotary-position-embeddings --disable-bias-linear "
    "--ffn-hidden-size 176": "llama",
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --add-qkv-bias "
    "--ffn-hidden-size 176 --hidden-dropout 0": "qwen2",
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--ffn-hidden-size 176 --kv-channels 16": "qwen3",
}


@pytest.mark.parametrize("flags", FAMILIES)
def test_several_flags_of_megatron_say_the_family(flags: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{GPT}{flags}\n", encoding="utf-8")
    made = recipe_of(str(tmp_path / "run.sh"))
    assert made.problems == []
    assert made.sections["model"]["family"] == FAMILIES[flags]
    dropout = [row for row in made.rows if row.name == "hidden_dropout"]
    # A default that has no counterpart in the family is told.
    if "--hidden-dropout" not in flags:
        assert bool(dropout[0].keys) == (FAMILIES[flags] in ("gpt", "gpt_neox"))
    assert made.sections["train"]["global_batch"] == "1 per 1 rank"


BAD: dict[str, tuple[str, str]] = {
    "none.txt": ("hello --world 3\n", "must have arguments or a config of Megatron-LM, torchtitan, OLMo-core, "),
    "two.sh": (f"{MEGATRON} --per_device_train_batch_size 2 --learning_rate 1\n", SEVERAL),
    "odd.sh": (f"{MEGATRON} --lr [1,\n", "the value '[1,' is not valid YAML: "),
    "bad.json": ('{"a":', "cannot be read: Expecting value: line 1 column 6"),
    "bad.yaml": ("a: [", "is not valid YAML: "),
    "bad.py": ("def f(:", "is no Python program: invalid syntax"),
    "long.py": (f"a = 1{' + 1' * 20000}\nn_layer = a\n", "maximum recursion depth exceeded"),
    "itself.py": ("a = b\nb = a\nn_layer = a\nn_head = 2\nblock_size = 3\n", "model.num_hidden_layers is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_none_is_refused_in_a_sentence(name: str, tmp_path: Path, cli: CommandLine) -> None:
    text, problem = BAD[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert problem in cli.refused("recipes", "--from", tmp_path / name)


def test_nothing_in_a_file_is_executed(tmp_path: Path, cli: CommandLine) -> None:
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    script.write_text(f"X=$(touch {mark})\n{MEGATRON} --lr `touch {mark}` --save $(touch {mark})\n", encoding="utf-8")
    config = tmp_path / "config.py"
    config.write_text(f"open({str(mark)!r}, 'w')\nn_layer = open({str(mark)!r}, 'w')\nn_head = 2\n", encoding="utf-8")
    for file in (script, config):
        cli.refused("recipes", "--from", file)
        assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "keys"),
    [("titan.toml", ["warmup_steps", "decay_steps"]), ("megatron.sh", ["warmup_steps", "constant_steps"])],
)
def test_a_schedule_that_other_steps_do_not_fit_is_refused(
    file: str, keys: list[str], others: Path, cli: CommandLine
) -> None:
    """Before a recipe is written that `train` refuses; with the keys that mend it."""
    said = cli.refused("recipes", "--from", others / file, "train.steps=5")
    assert all(f"optimizer.{key} (" in said for key in keys)
    assert " ".join(f"optimizer.{key}=VALUE" for key in keys) in said
    mended = [f"optimizer.{key}=1" for key in keys]
    cli("recipes", "--from", others / file, "train.steps=5", *mended)
