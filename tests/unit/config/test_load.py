"""From recipes and overrides to a configuration, or to all the reasons why not."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from shardwise.base.errors import ConfigError, listing
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.config import Config, config_from_sections, load_config, recipe_name, recipe_names, recipe_text
from tests.arch.source import config_fields
from tests.rows import rows_of
from tests.unit.config.hub import GPT2
from tests.unit.config.refusals import problem, problems

ROWS = rows_of(__file__)


def test_overrides_replace_keys_and_what_is_resolved_is_frozen_and_reads_back() -> None:
    config = load_config("llama2-tiny", ["optimizer.lr=1e-4", "data.path=my.txt", "optimizer.max_norm=null"])
    assert (config.optimizer.lr, config.data.path, config.optimizer.max_norm) == (1e-4, "my.txt", None)
    assert load_config("quickstart", ["precision.mode=bfloat16"]).precision.mode == "bfloat16"
    overrides = ["optimizer.name=AdamW", "parallel.schedule=1F1B", "precision.mode=BFloat16", "checkpoint.resume=Auto"]
    config = load_config("llama2-tiny", [*overrides, "log.trackers=[WandB, MLflow]"])
    assert (config.optimizer.name, config.parallel.schedule) == ("adamw", "1f1b")
    assert (config.precision.mode, config.checkpoint.resume) == ("bfloat16", "auto")
    assert config.log.trackers == ("wandb", "mlflow")
    overrides = ["log.sample_prompt='1e-4'", "data.path=no", "model.rope_scaling={rope_type: linear, factor: 2}"]
    config = load_config("quickstart", overrides)
    assert config_from_sections(parse_yaml(dump_yaml(config.model_dump()), "test")) == config
    with pytest.raises(ValidationError):
        config.train.steps = 3
    keys = config_fields()
    assert {"model.rotary_pct", "model.rms_norm_eps", "train.steps"} <= set(keys)
    assert [key for key, field in keys.items() if not field.description] == []
    assert [name for name, section in Config.model_fields.items() if not section.description] == []
    recipes = {"quickstart": "quickstart", "a/b.yaml": "b", "x.y.yml": "x.y", "a/b": "b"}
    assert {recipe: recipe_name(recipe) for recipe in recipes} == recipes


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.path=caf\udce9", "the override 'data.path=caf\\udce9' must be UTF-8: rename what it names"),
        ("train.global_batch=" + 5000 * "9" + " per 2 ranks", "train.global_batch ('99"),
        (
            "model.rope_scaling={rope_type: dynamic, factor: 1" + 400 * "0" + "}",
            "model.rope_scaling.factor (1" + 400 * "0" + ") must be a number of at least 1",
        ),
    ],
)
def test_values_that_no_file_holds_are_refused(override: str, told: str) -> None:
    """The rows of refusals.yaml have all others."""
    assert problem(override).startswith(told)


def test_fault_20_what_no_job_and_no_stream_takes_and_all_mistakes_at_once() -> None:
    for name in ("1", "ä", "A-B", '"A\\nB"', "A=B", '""'):
        assert "must be a variable's name with a text or a number" in problem(f"launch.environment={{{name}: a}}")
    assert problems("launch.environment={UID: 1, HOME: /a, BASHOPTS: a}") == [
        f"launch.environment.{name} must be left out: bash, which runs the job's script, sets it"
        for name in ("UID", "BASHOPTS")
    ]
    for option, told in {
        "--array=0-3": "must be without --array: a job is one training: submit each by itself",
        "--job-name=a": "must be without --job-name: --run-dir sets it",
        "--qos high": "must be a list of options of sbatch in full, such as [--qos=high]",
    }.items():
        assert told in problem(f"launch.sbatch=['{option}']")
    options = ("--exclude=n1", "--nodelist=n[1-2]", "--mem=3G", "--time-min=3", "--no-kill", "--wait-all-nodes=1")
    assert load_config("llama2-tiny", [f"launch.sbatch=[{', '.join(map(repr, options))}]"]).launch.sbatch == options
    streaming = ("data.streaming=true", "data.tokenizer=t")
    assert problem(*streaming) == "data.streaming (true) must be false with data.dataset (tiny), which is small"
    for named in ("data.path=wiki data.format=megatron", "data.path=shards data.format=hdf5", "data.blend=[1,wiki]"):
        assert problem(*streaming, *named.split()).endswith(": tokens are read as they are"), named
    config = load_config("llama2-tiny", [*streaming, "data.dataset=a/b", "data.shuffle_buffer=5"])
    assert (config.data.is_hub_dataset, config.data.shuffle_buffer) == (True, 5)
    found = problems("nonsense", "train.steps=x", "optimizer.min_lr=1", "model.num_attention_heads=four", "data.pth=a")
    names = ["data.pth:", "model.num_attention_heads", "optimizer.min_lr", "the", "train.steps"]
    assert sorted(text.split()[0] for text in found) == names
    found = problems("model.config=none", "train.steps=0", "data.pth=x")
    assert [text.split(" ")[0] for text in found] == ["model.config:", "train.steps", "data.pth:"]
    with pytest.raises(ConfigError) as caught:
        config_from_sections({"model": {"family": "llama"}, "optimizer": {}})
    assert {
        "optimizer.lr is missing (peak learning rate)",
        "train is missing (how long and in what portions)",
        "model.vocab_size is missing (rows of the embedding and of the output head)",
    } <= set(caught.value.problems)


def test_recipe_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(load_config("llama2-tiny").model_dump()))
    assert load_config(str(path)) == load_config("llama2-tiny")
    path.write_text("- 1\n")
    assert problem(recipe=str(path)) == (
        f"the recipe {path} must be a mapping of sections: "
        "model, parallel, train, optimizer, precision, data, evaluation, checkpoint, compile, hooks, launch and log"
    )
    path.write_text("")
    assert any(text.startswith("model is missing") for text in problems(recipe=str(path)))
    path.write_bytes(b"\xff\xfe\x00")
    assert problems(recipe=str(path))[0].startswith(f"the recipe file {path} cannot be read")
    for absent in (str(tmp_path / "none.yaml"), "none.json", str(tmp_path / "none")):
        assert problem(recipe=absent) == f"there is no recipe file {absent}"
    told = "must be a recipe or a model, and the folder holds no config.json"
    assert problem(recipe=f"{tmp_path}/") == f"RECIPE ({tmp_path}/) {told}"
    assert problem(recipe="quikstart") == (
        "unknown recipe 'quikstart': did you mean quickstart? "
        f"shipped recipes are {listing(recipe_names())}; a path to your own ends with .yaml, and a model of the hub "
        "reads owner/name"
    )


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


def test_keys_beside_a_hugging_face_file_change_it(gpt2_folder: Path, tmp_path: Path) -> None:
    overrides = ["model.n_embd=480", "model.resid_pdrop=0", f"model.config={gpt2_folder}"]
    model = load_config("llama2-tiny", overrides).model
    assert (model.hidden_size, model.resid_pdrop, model.intermediate_size) == (480, 0.0, 1920)

    values = load_config("llama2-tiny").model_dump(exclude={"model"})
    values["model"] = {"config": str(gpt2_folder), "num_hidden_layers": 2, "family": "gpt"}
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(values))
    model = load_config(str(path), ["model.num_hidden_layers=3"]).model
    assert (model.family, model.num_hidden_layers, model.hidden_size) == ("gpt", 3, 768)


@pytest.mark.parametrize(
    ("overrides", "told"),
    ROWS["hugging_face"],
)
def test_what_is_wrong_with_a_hugging_face_file(gpt2_folder: Path, overrides: list[str], told: str) -> None:
    (gpt2_folder / "alibi.json").write_text(json.dumps({**GPT2, "alibi": True}))
    found = problem(*(text.replace("FOLDER", str(gpt2_folder)) for text in overrides))
    assert found.startswith(told.replace("FOLDER", str(gpt2_folder)))


@pytest.mark.parametrize(
    ("spelling", "override"), [("n_layer", "model.num_hidden_layers=4"), ("num_hidden_layers", "model.n_layer=4")]
)
def test_an_override_wins_in_whichever_spelling(spelling: str, override: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(recipe_text("gpt-tiny").replace("num_hidden_layers", spelling))
    assert load_config(str(recipe), [override]).model.num_hidden_layers == 4
