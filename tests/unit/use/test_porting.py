"""Files of other programs become recipes that do the same: each key with the value that means it, and valid.

The files in `others` are written in the form of the programs' own examples; `titan.json`, `olmo_core.json` and
`training_args.json` were saved by torchtitan 0.3.0, OLMo-core 3.0.0 and transformers 5.23.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.config import config_from
from shardwise.config.other_names import PROGRAMS
from shardwise_use.porting.recipes import recipe_of

OTHERS = Path(__file__).parent / "others"


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """The files in a folder of their own, with the model of a Hugging Face folder beside them."""
    shutil.copytree(OTHERS, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.py.txt"):
        file.rename(file.with_suffix(""))
    (tmp_path / "model").mkdir()
    model = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176}
    model |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return tmp_path


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "megatron.sh": {
        "model": {
            "family": "llama",
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_theta": 500000,
            "attention_dropout": 0.0,
            "initializer_range": 0.0134,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
            "rms_norm_eps": 1e-5,
        },
        "parallel": {"tensor": 2, "sequence": True, "vocab_multiple": 128},
        # samples / the global batch; the rate is at its minimum from decay-samples on
        "train": {
            "steps": 1000,
            "global_batch": 64,
            "micro_batch": 2,
            "sequence_length": 512,
            "seed": 1234,
            "eval_batches": 32,
            "eval_every": 100,
        },
        "optimizer": {
            "zero": 1,
            "lr": 3e-4,
            "min_lr": 3e-5,
            "schedule": "cosine",
            "warmup_steps": 50,
            "constant_steps": 100,
            "weight_decay": 0.1,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "max_norm": 1.0,
        },
        "precision": {"mode": "mixed"},
        "data": {
            "blend": [0.7, "/data/a_text_document", 0.3, "/data/b_text_document"],
            "tokenizer": "/data/tokenizer",
            "split": "99,1,0",
        },
        "checkpoint": {"path": "/ckpt/small", "every": 100},
        "launch": {"nodes": 1},
        "log": {"every": 1},
    },
    "titan_configs.py:small_on_eight": {
        "model": {
            "family": "llama",
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 2048,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": LLAMA3_ROPE,
        },
        "parallel": {"tensor": 8, "sequence": True, "schedule": "1f1b"},
        # the batch of a rank, on as many ranks as there are
        "train": {
            "steps": 20000,
            "global_batch": "2 per 8 ranks",
            "micro_batch": 2,
            "sequence_length": 512,
            "recompute": "full",
        },
        # the decay begins after the warmup, and ends one step after the last
        "optimizer": {
            "name": "adamw",
            "zero": 3,
            "lr": 3e-4,
            "min_lr": 3e-5,
            "schedule": "wsd",
            "warmup_steps": 2000,
            "decay_steps": 17999,
            "decay_shape": "cosine",
            "no_decay": [],
            "weight_decay": 0.05,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "max_norm": 1.0,
        },
        "precision": {"mode": "mixed"},
        "data": {"tokenizer": "./assets/tokenizer", "dataset": "allenai/c4", "config": "en", "streaming": True},
        "checkpoint": {"every": 500},
        "compile": {"enabled": True},
    },
    "olmo_core.py": {
        "model": {
            "family": "llama",
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "vocab_size": 50304,
            "max_position_embeddings": 1024,
        },
        # tokens / the length of a sequence
        "train": {"steps": 3815, "global_batch": 256, "micro_batch": 16, "sequence_length": 1024, "seed": 12536},
        "optimizer": {
            "name": "adamw",
            "zero": 3,
            "lr": 1e-3,
            "min_lr": 1e-4,
            "schedule": "cosine",
            "warmup_steps": 100,
            "constant_steps": 1,
            "weight_decay": 0.01,
            "no_decay": ["*.embed_tokens.weight"],
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "max_norm": 1.0,
        },
        "precision": {"mode": "mixed"},
        "data": {"path": "/data/a.npy", "tokenizer": "gpt2", "workers": 4},
        "checkpoint": {"every": 1000},
        "log": {"every": 5},
    },
    "neuron.sh": {
        "model": {"config": "HERE/model"},
        "parallel": {"tensor": 8, "sequence": True},
        # 1,024 sequences on the 4 replicas of one machine: 256 each
        "train": {
            "steps": 10000,
            "global_batch": "256 per 8 ranks",
            "micro_batch": 1,
            "sequence_length": 64,
            "recompute": "selective",
        },
        "optimizer": {"zero": 1, "lr": 1.5e-4, "warmup_steps": 100},
        "precision": {"mode": "mixed"},
        "data": {"path": "~/tokens"},
        "log": {"every": 10},
    },
    "nemo/small.sh": {
        "model": {
            "family": "gpt",
            "vocab_size": 50257,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "max_position_embeddings": 512,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
        "parallel": {"tensor": 8, "pipeline": 4, "sequence": True, "vocab_multiple": 128},
        "train": {
            "steps": 300000,
            "global_batch": 32,
            "micro_batch": 1,
            "sequence_length": 512,
            "recompute": "selective",
        },
        "optimizer": {
            "name": "adamw",
            "zero": 0,
            "lr": 1.5e-4,
            "min_lr": 1e-5,
            "schedule": "cosine",
            "warmup_steps": 750,
            "constant_steps": 80000,
            "betas": [0.9, 0.95],
        },
        "precision": {"mode": "float32"},
        "data": {"tokenizer": "~/gpt2/gpt2-vocab.json", "blend": [1.0, "~/gpt2/text_document"]},
        "checkpoint": {"every_minutes": 60},
        "launch": {"nodes": 1},
    },
    "nanogpt.py": {
        "model": {
            "family": "gpt",
            "vocab_size": 50304,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "activation_function": "gelu",
            "resid_pdrop": 0.2,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.2,
        },
        # 40 micro-batches of 4 sequences over all ranks, however many there are
        "train": {
            "steps": 5000,
            "global_batch": 160,
            "micro_batch": 4,
            "sequence_length": 256,
            "seed": 1337,
            "eval_batches": 200,
            "eval_every": 250,
        },
        "optimizer": {
            "zero": 0,
            "lr": 1e-3,
            "min_lr": 1e-4,
            "schedule": "cosine",
            "warmup_steps": 100,
            "constant_steps": 1000,
            "weight_decay": 0.1,
            "betas": [0.9, 0.99],
            "max_norm": 1.0,
        },
        "precision": {"mode": "mixed"},
        "compile": {"enabled": True},
        "log": {"every": 10},
    },
}


@pytest.mark.parametrize("file", RECIPES)
def test_a_file_becomes_a_recipe_that_does_the_same(file: str, others: Path) -> None:
    made = recipe_of(str(others / file))
    assert made.problems == []
    wanted = {**RECIPES[file]}
    if "config" in wanted["model"]:
        wanted["model"] = {"config": str(others / "model")}
    assert made.sections == wanted
    assert config_from(made.sections).train.sequence_length == wanted["train"]["sequence_length"]


CARRIED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "titan.json": (
        [],
        {
            "model.family": "llama",
            "model.num_hidden_layers": 6,
            "model.num_key_value_heads": 16,
            "model.rope_scaling": LLAMA3_ROPE,
            "train.global_batch": 64,
            "train.micro_batch": 8,
            "train.recompute": "selective",
            "train.eval_every": 0,
            "checkpoint.every": 0,
            "optimizer.schedule": "wsd",
            "optimizer.decay_steps": 7,
            "optimizer.zero": 3,
            "parallel.tensor": 2,
            "parallel.schedule": "interleaved",
            "precision.mode": "mixed",
        },
    ),
    "titan.toml": ([], {"model.intermediate_size": 14336, "optimizer.decay_steps": 799, "data.config": "en"}),
    "olmo_core.json": (
        [],
        {
            "model.family": "olmo2",
            "model.vocab_size": 100352,
            "train.global_batch": 256,
            "train.micro_batch": 16,
            "train.steps": 3815,
            "optimizer.min_lr": 4e-5,
            "optimizer.no_decay": ["*.embed_tokens.weight"],
            "optimizer.schedule": "cosine",
            "data.path": "/data/a.npy",
            "optimizer.zero": 3,
        },
    ),
    "run_clm.sh": (
        ["model.config=MODEL"],
        {
            "train.global_batch": "32 per 1 rank",
            "train.recompute": "full",
            "optimizer.warmup_steps": 500,
            "optimizer.zero": 0,
            "optimizer.betas": [0.9, 0.95],
            "log.trackers": ["wandb"],
            "data.config": "wikitext-103-raw-v1",
        },
    ),
    "training_args.json": (
        ["model.config=MODEL", "train.sequence_length=64"],
        {
            "train.global_batch": "32 per 1 rank",
            "optimizer.warmup_steps": 30,  # 0.03 of 1,000
            "optimizer.schedule": "cosine",
            "optimizer.weight_decay": 0.1,
            "train.eval_every": 0,
            "checkpoint.every": 100,
        },
    ),
    "deepspeed.json": (
        ["model.config=MODEL", "train.sequence_length=64"],
        {
            "train.global_batch": "8 per 1 rank",
            "train.steps": 1000,
            "optimizer.zero": 2,
            "optimizer.schedule": "linear",
            "optimizer.warmup_steps": 100,
            "optimizer.bucket_mib": 1907.34863281,
        },
    ),
}


@pytest.mark.parametrize("file", CARRIED)
def test_settings_carry_over_with_their_meaning(file: str, others: Path) -> None:
    overrides, wanted = CARRIED[file]
    made = recipe_of(str(others / file), [word.replace("MODEL", str(others / "model")) for word in overrides])
    assert made.problems == []
    keys = {f"{name}.{key}": value for name, section in made.sections.items() for key, value in section.items()}
    assert {key: keys.get(key) for key in wanted} == wanted


def test_a_table_says_what_became_of_each_setting(others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = others / "my.yaml"
    assert main(["recipes", "--from", str(others / "megatron.sh"), "--write", str(target)]) == 0
    said = capsys.readouterr().out
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
    overrides = [
        "data.blend=null",
        "data.tokenizer=null",
        "data.dataset=tiny",
        "model.vocab_size=512",
        "checkpoint.path=null",
    ]
    assert main(["train", str(target), *overrides, "--nproc", "8", "--dry-run"]) == 0
    assert "TP 2" in capsys.readouterr().out


def test_what_is_missing_is_told_with_the_command_that_gives_it(
    others: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(others / "deepspeed.json")
    assert main(["recipes", "--from", file, "--write", str(others / "my.yaml")]) == 2
    assert capsys.readouterr().err == (
        "shardwise: 3 errors\n- model is missing (what is trained)\n"
        "- train.sequence_length is missing (tokens per sequence)\n"
        f"- give keys beside it: `shardwise recipes --from {file} model.config=FOLDER train.sequence_length=VALUE "
        "--write my.yaml`\n"
    )
    assert not (others / "my.yaml").exists()
    assert main(["recipes", "--from", file, f"model.config={others / 'model'}", "train.sequence_length=64"]) == 0
    said = capsys.readouterr().out
    assert "missing: data; give data.path=YOUR_TEXT.jsonl to `shardwise train`" in said
    assert "# Your own data: data.path=YOUR_TEXT.jsonl\nmodel:\n  config: " in said


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


def test_a_model_that_no_family_is_like_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{GPT} --swiglu --ffn-hidden-size 176\n", encoding="utf-8")
    made = recipe_of(str(tmp_path / "run.sh"))
    assert any(problem.startswith("model.family is missing") for problem in made.problems)
    assert {row.name: row.reason for row in made.rows}["swiglu"] == "no family is like that"


BAD: dict[str, tuple[str, str]] = {
    "none.txt": ("hello --world 3\n", "must have arguments or a config of Megatron-LM, torchtitan, OLMo-core, "),
    "empty.sh": ("", "must have arguments or a config of Megatron-LM, "),
    "two.sh": (
        f"{MEGATRON} --per_device_train_batch_size 2 --learning_rate 1\n",
        "must be of one program, and it has settings of Hugging Face's Trainer and Megatron-LM: keep those of one",
    ),
    "two_commands.sh": (
        f"{MEGATRON}\nrun.py --per_device_train_batch_size 2 --learning_rate 1 --num_train_epochs 3\n",
        "must be of one program, and it has settings of Hugging Face's Trainer and Megatron-LM: keep those of one",
    ),
    "odd.sh": (f"{MEGATRON} --lr [1,\n", "the value '[1,' is not valid YAML: "),
    "bad.json": ('{"a":', "cannot be read: Expecting value: line 1 column 6"),
    "deep.json": ("[" * 2000, "cannot be read: "),
    "bad.toml": ("a = [", "cannot be read: "),
    "bad.yaml": ("a: [", "is not valid YAML: "),
    "bad.py": ("def f(:", "is no Python program: invalid syntax"),
    "deep.py": (f"a = {'(' * 500}1{')' * 500}\n", "is no Python program: "),
    "long.py": (f"a = 1{' + 1' * 20000}\nn_layer = a\n", "maximum recursion depth exceeded"),
    "itself.py": ("a = b\nb = a\nn_layer = a\nn_head = 2\nblock_size = 3\n", "model.num_hidden_layers is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_none_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, problem = BAD[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["recipes", "--from", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said


def test_other_bad_input(others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (others / "binary").write_bytes(b"\xff\xfe\x00")
    for arguments, problem in {
        f"--from {others / 'binary'}": "must be a text in UTF-8",
        f"--from {others}": "cannot be read: ",
        f"--from {others / 'nowhere.sh'}": "cannot be read: No such file",
        f"--from {others / 'titan_configs.py'}": "must name one config of those in it, as in ",
        f"--from {others / 'titan_configs.py'}:other": "small or small_on_eight",
        f"--from {others / 'megatron.sh'} llama2-tiny": "goes with --write and key=value alone",
        "llama2-tiny train.steps=3": "train.steps=3 must go with --from FILE",
        f"--from {others / 'megatron.sh'} train.stepz=3": "train.stepz: unknown key; did you mean train.steps?",
    }.items():
        assert main(["recipes", *arguments.split()]) == 2
        assert problem in capsys.readouterr().err, arguments


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    script.write_text(f"X=$(touch {mark})\n{MEGATRON} --lr `touch {mark}` --save $(touch {mark})\n", encoding="utf-8")
    config = tmp_path / "config.py"
    config.write_text(f"open({str(mark)!r}, 'w')\nn_layer = open({str(mark)!r}, 'w')\nn_head = 2\n", encoding="utf-8")
    for file in (script, config):
        assert main(["recipes", "--from", str(file)]) == 2
        assert not mark.exists()


def test_a_config_of_torchtitans_package_has_more_than_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    file = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4}}
    content = {
        "train_batch_size": 32,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupCosineLR", "params": params},
    }
    file.write_text(json.dumps(content))
    translation = recipe_of(str(file))
    assert translation.sections["optimizer"]["min_lr"] == pytest.approx(3e-5)
    reasons = {row.name: row.reason for row in translation.rows}
    assert reasons["scheduler.params.warmup_type"].startswith("warmups are linear here")


def test_a_misspelt_key_is_not_advised(others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--from", str(others / "megatron.sh"), "train.stpes=3"]) == 2
    said = capsys.readouterr().err
    assert "train.stpes: unknown key; did you mean train.steps?" in said
    assert "give keys beside it" not in said


@pytest.mark.parametrize(
    ("file", "keys"),
    [("titan.toml", ["warmup_steps", "decay_steps"]), ("megatron.sh", ["warmup_steps", "constant_steps"])],
)
def test_a_schedule_that_other_steps_do_not_fit_is_refused(
    file: str, keys: list[str], others: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a recipe is written that `train` refuses; with the keys that mend it."""
    assert main(["recipes", "--from", str(others / file), "train.steps=5"]) == 2
    said = capsys.readouterr().err
    assert all(f"optimizer.{key} (" in said for key in keys)
    assert " ".join(f"optimizer.{key}=VALUE" for key in keys) in said
    mended = [f"optimizer.{key}=1" for key in keys]
    assert main(["recipes", "--from", str(others / file), "train.steps=5", *mended]) == 0
