"""Files of other programs become recipes that do the same: each key with the value that means it, and valid.

The files in `others` are written in the form of the programs' own examples; `titan.json`, `olmo_core.json` and
`training_args.json` were saved by torchtitan 0.3.0, OLMo-core 3.0.0 and transformers 5.23.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml

from shardwise.config import config_from_sections, load_config
from shardwise.config.optimizer import OptimizerConfig
from shardwise.config.other_names import PROGRAMS
from shardwise.optim.learning_rate import learning_rate
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


RECORD = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))
RECIPES = RECORD["recipes"]
SETTINGS = RECORD["settings"]
FAMILIES = RECORD["families"]
SCHEDULES = RECORD["schedules"]
WARMUPS = RECORD["warmups"]
REFUSED = RECORD["refused"]
LACKS_MODEL = ("run_clm.sh", "training_args.json", "deepspeed.json", "axolotl.yaml", "litgpt.yaml")
LACKS_LENGTH = ("training_args.json", "deepspeed.json")


@pytest.mark.parametrize("file", RECIPES)
def test_a_file_becomes_a_recipe_that_does_the_same(file: str, others: Path) -> None:
    made = recipe_of(str(others / file))
    assert made.problems == []
    wanted = {**RECIPES[file]}
    if "config" in wanted["model"]:
        wanted["model"] = {"config": str(others / "model")}
    assert made.sections == wanted
    assert config_from_sections(made.sections).train.sequence_length == wanted["train"]["sequence_length"]


@pytest.mark.parametrize("file", SETTINGS)
def test_settings_carry_over_with_their_meaning(file: str, others: Path) -> None:
    beside = [f"model.config={others / 'model'}"] * (file in LACKS_MODEL)
    made = recipe_of(str(others / file), [*beside, *["train.sequence_length=64"] * (file in LACKS_LENGTH)])
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


def test_what_is_missing_or_misspelt_is_told(others: Path, cli: CommandLine) -> None:
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
    said = cli.refused("recipes", "--from", others / "megatron.sh", "train.stpes=3")
    assert "train.stpes: unknown key; did you mean train.steps?" in said
    assert "give keys beside it" not in said


MEGATRON = "pretrain_gpt.py --num-layers 2 --train-iters 10 --tensor-model-parallel-size 2"
GPT = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --train-iters 10 --lr 1e-3 --vocab-size 512 --data-path /data/text "
)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_flags_of_megatron_say_the_family(family: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{GPT}{FAMILIES[family]}\n", encoding="utf-8")
    made = recipe_of(str(tmp_path / "run.sh"))
    assert (made.problems, made.sections["model"]["family"]) == ([], family)
    dropout = [row for row in made.rows if row.name == "hidden_dropout"]
    # A default that has no counterpart in the family is told.
    if "--hidden-dropout" not in FAMILIES[family]:
        assert bool(dropout[0].keys) == (family in ("gpt", "gpt_neox"))
    assert made.sections["train"]["global_batch"] == "1 per 1 rank"


def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, cli: CommandLine) -> None:
    deep = ["long.py", f"a = 1{' + 1' * 20000}\nn_layer = a", "maximum recursion depth exceeded"]
    for name, text, problem in [*REFUSED, deep]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert problem in cli.refused("recipes", "--from", tmp_path / name), name


def test_nothing_in_a_file_is_executed(tmp_path: Path, cli: CommandLine) -> None:
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    script.write_text(f"X=$(touch {mark})\n{MEGATRON} --lr `touch {mark}` --save $(touch {mark})\n", encoding="utf-8")
    config = tmp_path / "config.py"
    config.write_text(f"open({str(mark)!r}, 'w')\nn_layer = open({str(mark)!r}, 'w')\nn_head = 2\n", encoding="utf-8")
    for file in (script, config):
        cli.refused("recipes", "--from", file)
        assert not mark.exists()


def test_a_config_of_torchtitans_package_has_more_than_its_name(tmp_path: Path) -> None:
    """The defaults of the classes are not those of a registered config, which is not in the file."""
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b --training.steps=500 \\\n"
        '  --training.local_batch_size 4 "$@"\n',
        encoding="utf-8",
    )
    made = recipe_of(str(script))
    assert made.sections["model"]["hidden_size"] == 4096
    assert made.sections["train"] == {"steps": 500, "micro_batch": 4}
    (row,) = (row for row in made.rows if row.name == "config")
    assert row.reason.startswith("its settings are in torchtitan's program: give that file")
    assert any(problem.startswith("train.global_batch is missing") for problem in made.problems)


def test_a_schedule_of_deepspeed(tmp_path: Path) -> None:
    params = {"warmup_num_steps": 100, "total_num_steps": 1000, "cos_min_ratio": 0.1, "warmup_type": "log"}
    content = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
    content["scheduler"] = {"type": "WarmupCosineLR", "params": params}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    made = recipe_of(str(tmp_path / "ds.json"))
    assert made.sections["optimizer"]["min_lr"] == pytest.approx(3e-5)
    reasons = {row.name: row.reason for row in made.rows}
    assert reasons["scheduler.params.warmup_type"].startswith("warmups are linear here")


@pytest.mark.parametrize(("schedule", "wanted"), SCHEDULES)
def test_defaults_of_a_schedule_of_deepspeed(schedule: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    """Its AdamW decays nothing by default."""
    schedule = {**schedule, "params": {"total_num_steps": 9000, **schedule.get("params", {})}}
    content = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "scheduler": schedule}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    made = recipe_of(str(tmp_path / "ds.json"))
    assert {key: made.sections["optimizer"][key] for key in wanted} == wanted
    assert made.sections["optimizer"]["weight_decay"] == 0.0
    (row,) = (row for row in made.rows if row.name == "optimizer.params.weight_decay")
    assert row.is_default


def test_muon_of_deepspeed_has_its_own_factor_and_rates(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8: √max(1, out / in), and betas (0.9, 0.95) of Adam beside it; a schedule sets both rates."""
    rule = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1}}
    content: dict[str, Any] = {"train_batch_size": 32, "optimizer": rule}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    optimizer = recipe_of(str(tmp_path / "ds.json")).sections["optimizer"]
    assert (optimizer["name"], optimizer["lr"], optimizer["betas"]) == ("muon", 0.02, [0.9, 0.95])
    assert optimizer["muon"] == {"adjust_lr_fn": "original", "adamw_lr": 3e-4}
    for peak, rates in {0.01: (0.01, 0.01), "auto": (0.02, 3e-4), None: (0.02, 3e-4)}.items():
        content["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": peak}}
        (tmp_path / "ds.json").write_text(json.dumps(content))
        optimizer = recipe_of(str(tmp_path / "ds.json")).sections["optimizer"]
        assert (optimizer["lr"], optimizer["muon"]["adamw_lr"]) == rates


def test_what_megatrons_muon_and_decay_leave_out(tmp_path: Path) -> None:
    """Megatron Core 0.20: momentum 0.9 without Nesterov's, √max(out, in) times a factor; WSD by 2 · 0.5^p - 1."""
    made = {}
    for name, flags in {
        "spectral": "--optimizer muon",
        "fifth": "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2",
        "old": "--optimizer muon --muon-use-nesterov",
        "shape": "--optimizer dist_muon --muon-scale-mode shape_scaling",
        "wsd": "--lr-decay-style WSD --lr-wsd-decay-iters 4",
        "sqrt": "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style minus_sqrt",
    }.items():
        (tmp_path / f"{name}.sh").write_text(f"{GPT} {flags}\n", encoding="utf-8")
        made[name] = recipe_of(str(tmp_path / f"{name}.sh"))
        assert made[name].problems == []
    rules = {name: each.sections["optimizer"].get("muon") for name, each in made.items()}
    assert rules["spectral"] == {"momentum": 0.9, "nesterov": False}
    assert rules["fifth"] == {"momentum": 0.9, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    assert rules["old"] == {"momentum": 0.9, "nesterov": True}, "the name in Megatron Core 0.16"
    assert rules["shape"] == {"momentum": 0.9, "nesterov": False, "adjust_lr_fn": "original"}
    reasons = {name: {row.name: row.reason for row in each.rows} for name, each in made.items()}
    reason = reasons["spectral"]["muon_extra_scale_factor"]
    assert reason.startswith("0.2 is optimizer.muon.adjust_lr_fn=match_rms_adamw")
    assert reasons["wsd"]["lr_wsd_decay_style"] == "optimizer.decay_shape has linear, cosine and sqrt"
    assert made["sqrt"].sections["optimizer"]["decay_shape"] == "sqrt"


@pytest.mark.parametrize("form", ["json", "script"])
def test_arguments_of_a_trainers_schedule_are_read(form: str, tmp_path: Path) -> None:
    """transformers 5.24: a decay is of a cosine unless decay_type says otherwise."""
    given: dict[str, Any] = {"num_decay_steps": 100, "min_lr_ratio": 0.1}
    settings = {
        "per_device_train_batch_size": 4, "max_steps": 1000, "learning_rate": 3e-4,
        "lr_scheduler_type": "warmup_stable_decay",
    }  # fmt: skip
    if form == "json":
        (tmp_path / "run.json").write_text(json.dumps({**settings, "lr_scheduler_kwargs": given}))
    else:
        options = " ".join(f"--{name} {value}" for name, value in settings.items())
        text = f"python run_clm.py {options} --lr_scheduler_kwargs '{json.dumps(given)}'\n"
        (tmp_path / "run.script").write_text(text)
    made = recipe_of(str(tmp_path / f"run.{form}")).sections["optimizer"]
    assert (made["schedule"], made["decay_steps"], made["decay_shape"]) == ("wsd", 100, "cosine")
    assert made["min_lr"] == pytest.approx(3e-5)


def test_a_config_of_trl_has_its_defaults(others: Path) -> None:
    """trl 1.16's SFTConfig: 2e-5, bf16, checkpointing of activations and 1,024 tokens; the Trainer has others."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 100, "dataset_text_field": "text", "output_dir": "out"}
    wanted = {True: (2e-5, "mixed", "full", 1024), False: (5e-5, "float32", None, 64)}
    for is_trl, values in wanted.items():
        given = {name: value for name, value in settings.items() if is_trl or name != "dataset_text_field"}
        (others / "run.json").write_text(json.dumps(given))
        beside = [] if is_trl else ["train.sequence_length=64"]
        made = recipe_of(str(others / "run.json"), [f"model.config={others / 'model'}", *beside]).sections
        train = made["train"]
        found = (made["optimizer"]["lr"], made["precision"]["mode"], train.get("recompute"), train["sequence_length"])
        assert found == values


@pytest.mark.parametrize(
    ("lines", "recompute"), [("packing: true", "full"), ("disable_gradient_checkpointing: true", None)]
)
def test_a_config_of_llama_factory_has_its_defaults(lines: str, recompute: str | None, others: Path) -> None:
    """LLaMA-Factory 0.9.5 computes activations anew and cuts at 2,048 tokens, beside the Trainer's defaults."""
    file = others / "pt.yaml"
    text = f"stage: pt\nfinetuning_type: full\nper_device_train_batch_size: 2\nmax_steps: 9\n{lines}\n"
    file.write_text(text, encoding="utf-8")
    made = recipe_of(str(file), [f"model.config={others / 'model'}", "model.max_position_embeddings=2048"]).sections
    found = (made["train"].get("recompute"), made["train"]["sequence_length"], made["optimizer"]["lr"])
    assert found == (recompute, 2048, 5e-5)


@pytest.mark.parametrize(("name", "value"), [("max_length", 64), ("max_length", None), ("max_seq_length", 64)])
def test_a_config_of_trl_keeps_its_own_length(name: str, value: int | None, others: Path) -> None:
    """Without a limit, the length is asked for."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 100, "packing": True, name: value}
    (others / "run.json").write_text(json.dumps(settings))
    made = recipe_of(str(others / "run.json"), [f"model.config={others / 'model'}"])
    assert made.sections["train"].get("sequence_length") == value
    assert {row.name for row in made.rows} & {"max_length", "max_seq_length"} == ({name} if value else set())
    assert ["train.sequence_length" in problem for problem in made.problems] == [True] * (value is None)


@pytest.mark.parametrize(
    "flags", ["sft.py --padding_free", "sft.py --max_length 64", "sft.py --loss_type dft", "trl sft", "sft.py"]
)
def test_a_command_of_trl_is_known(flags: str, others: Path, cli: CommandLine) -> None:
    """And the options that are told are those of `train`: the length is no --max-tokens."""
    script = others / "sft.sh"
    script.write_text(f"{flags} --per_device_train_batch_size 2 --max_steps 9 --logging_steps 5\n", encoding="utf-8")
    beside = [f"model.config={others / 'model'}", *(["train.sequence_length=64"] if flags == "sft.py" else [])]
    made = recipe_of(str(script), beside)
    assert made.sections["optimizer"]["lr"] == (5e-5 if flags == "sft.py" else 2e-5)
    assert made.problems == []
    assert not made.options
    assert "trl" not in {row.name for row in made.rows}
    target = others / "my.yaml"
    said = cli("recipes", "--from", script, *beside, "--write", target).out
    assert said.endswith(f"train it with: shardwise train {target}\n")


@pytest.mark.parametrize(("lines", "beside", "warmup"), WARMUPS)
def test_the_warmup_of_axolotl(lines: str, beside: list[str], warmup: int, others: Path) -> None:
    """axolotl 0.19, `_configure_warmup_and_logging`: 3 % of the steps, at most 100, rounded down, and 2 for 1."""
    file = others / "axolotl.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("max_steps: 5000", lines), encoding="utf-8")
    made = recipe_of(str(file), [f"model.config={others / 'model'}", *beside])
    assert (made.problems, made.sections["optimizer"].get("warmup_steps", 0)) == ([], warmup)


def test_the_warmup_of_litgpt(others: Path) -> None:
    """litgpt 0.5.13 takes the fraction only beside `lr_warmup_steps: null`, and does not stop at max_steps."""
    file = others / "litgpt.yaml"
    more = "  lr_warmup_steps: null\n  lr_warmup_fraction: 0.1\n  max_steps: 7\n"
    file.write_text(file.read_text(encoding="utf-8").replace("train:\n", f"train:\n{more}"), encoding="utf-8")
    made = recipe_of(str(file), [f"model.config={others / 'model'}"])
    assert made.problems == []
    assert "warmup_steps" not in made.sections["optimizer"]
    assert made.sections["train"]["steps"] == 22888
    reasons = {row.name: row.reason for row in made.rows}
    assert reasons["train.lr_warmup_fraction"].startswith("it is a part of an epoch: give optimizer.warmup_steps")
    assert reasons["train.max_steps"].endswith("give train.steps to train for so many")


def test_rates_of_nanogpt_are_told() -> None:
    """With W = 5 and D = 20, by the formula of its train.py: (i + 1) / (W + 1), then a cosine of (i - W) / (D - W)."""
    note = PROGRAMS["nanogpt"].note.partition("optimizer.points=")[2].partition("] give")[0] + "]"
    points = yaml.safe_load(note.replace("W + 1", "6").replace("D + 1", "21").replace("min_lr / lr", "0.1"))
    settings = OptimizerConfig.model_validate({"lr": 1e-3, "schedule": "points", "points": points})
    for i in range(25):
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (i - 5) / 15)))
        wanted = (i + 1) / 6 if i < 5 else 0.1 + 0.9 * cosine
        assert learning_rate(settings, 25, i + 1) == pytest.approx(1e-3 * wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("file", "keys"),
    [("titan.toml", ["warmup_steps", "decay_steps"]), ("megatron.sh", ["warmup_steps", "constant_steps"])],
)
def test_a_schedule_must_fit_the_given_steps(file: str, keys: list[str], others: Path, cli: CommandLine) -> None:
    """Before a recipe is written that `train` refuses; with the keys that mend it."""
    said = cli.refused("recipes", "--from", others / file, "train.steps=5")
    assert all(f"optimizer.{key} (" in said for key in keys)
    assert " ".join(f"optimizer.{key}=VALUE" for key in keys) in said
    mended = [f"optimizer.{key}=1" for key in keys]
    cli("recipes", "--from", others / file, "train.steps=5", *mended)


def test_a_command_line_counts_before_its_toml(others: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As up to torchtitan 0.2; a file that is not there is named, and its settings are not guessed."""
    script = others / "run.sh"
    script.write_text(
        'CONFIG_FILE=${CONFIG_FILE:-"./titan.toml"}\n'
        "torchrun --nproc_per_node=8 --local-ranks-filter 0 -m torchtitan.train --job.config_file ${CONFIG_FILE} \\\n"
        "  --training.steps 5000 --parallelism.tensor_parallel_degree 2 --job.dump_folder /data/out\n",
        encoding="utf-8",
    )
    made = recipe_of(str(script))
    assert (made.problems, made.sections["train"]["steps"]) == ([], 5000)
    assert made.sections["parallel"]["tensor"] == 2
    assert (made.sections["model"]["hidden_size"], made.sections["optimizer"]["lr"]) == (4096, 3e-4)
    reasons = {row.name: row.reason for row in made.rows}
    assert reasons.keys() >= {"job.dump_folder", "local_ranks_filter"}
    assert reasons["parallelism.data_parallel_shard_degree"].startswith("the data-parallel degree is the number of")
    assert not {"model.flavor", "job.config_file"} & reasons.keys()
    (others / "titan.toml").rename(others / "elsewhere.toml")
    out, err = cli("recipes", "--from", script, code=2)
    assert "  job.config_file = ./titan.toml  there is no such file here, and its settings are not read" in out
    assert "optimizer.lr" not in out, "a default of the program"
    assert "- optimizer.lr is missing" in err
    (others / "there").mkdir()
    (others / "elsewhere.toml").rename(others / "there" / "titan.toml")
    monkeypatch.chdir(others / "there")
    assert recipe_of(str(script)).sections == made.sections, "a script runs where the user is"
    (others / "titan.toml").write_text("lr = ", encoding="utf-8")
    assert f"{others / 'titan.toml'}) cannot be read" in cli.refused("recipes", "--from", script)


def test_torchtitan_shortens_a_decay_to_the_steps_after_the_warmup(others: Path, cli: CommandLine) -> None:
    """Its message: "Warmup (200) + decay (240) steps exceed total steps (300). Adjusting decay steps to 100."."""
    toml, script = others / "titan.toml", others / "run.sh"
    toml.write_text(toml.read_text().replace("warmup_steps = 200", "warmup_steps = 200\ndecay_ratio = 0.8"))
    script.write_text(f"torchrun -m torchtitan.train --job.config_file {toml} --training.steps 300\n", encoding="utf-8")
    said = cli("recipes", "--from", script).out
    assert "optimizer.decay_steps=99 (torchtitan shortens a decay to the steps after the warmup)" in said
    for steps, decay in {1000: 799, 999: 798, 990: 789, 3000: 2399}.items():
        script.write_text(script.read_text().rpartition(" ")[0] + f" {steps}\n", encoding="utf-8")
        assert recipe_of(str(script)).sections["optimizer"]["decay_steps"] == decay
        assert ("torchtitan shortens" in cli("recipes", "--from", script).out) == (steps == 990)


def test_a_tokenizer_that_is_here_gives_the_vocabulary_and_several_nodes_a_job(others: Path, cli: CommandLine) -> None:
    """Megatron pads the vocabulary to a multiple on the ranks of TP, as parallel.vocab_multiple does."""
    text = (others / "megatron.sh").read_text(encoding="utf-8")
    text = text.replace("--vocab-size 32000", "").replace(":-1}", ":-4}")
    script = others / "four.sh"
    script.write_text(text, encoding="utf-8")
    assert any("vocab_size" in problem for problem in recipe_of(str(script)).problems)
    tokens = {chr(code): code - 33 for code in range(33, 120)}
    (others / "tokenizer").mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, "!")).save(str(others / "tokenizer" / "tokenizer.json"))
    script.write_text(text.replace("/data/tokenizer", str(others / "tokenizer")), encoding="utf-8")
    out = cli("recipes", "--from", script, "--write", others / "my.yaml").out
    assert re.search(rf"data.tokenizer = {others / 'tokenizer'} +→ model.vocab_size=87\n", out)
    wanted = f"train it with: shardwise submit {others / 'my.yaml'} launch.ranks_per_node=8\n"
    assert out.endswith(wanted), out[-200:]
    config = load_config(str(others / "my.yaml"))
    assert (config.model.vocab_size, config.parallel.vocab_multiple, config.launch.nodes) == (87, 128, 4)
