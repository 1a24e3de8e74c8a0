"""Scripts whose settings stand in files beside them: a TOML, a tokenizer; and jobs of several nodes."""

import re
import shutil
from pathlib import Path

import pytest
import tokenizers

from shardwise.config import load_config
from shardwise_use.porting.recipes import recipe_of
from tests.command_line import CommandLine


@pytest.fixture
def others(tmp_path: Path) -> Path:
    for name in ("titan.toml", "megatron.sh"):
        shutil.copy(Path(__file__).parent / "others" / name, tmp_path)
    return tmp_path


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
    assert made.problems == []
    assert made.sections["train"]["steps"] == 5000
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
