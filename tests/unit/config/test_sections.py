"""Derived values of the sections."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.cli import main
from shardwise.cli.entry import COMMANDS
from shardwise.config import OptimizerConfig, PrecisionConfig, apply_overrides, config_from_sections, load_config
from shardwise.config.suggestions import REMOVED
from tests.rows import rows_of
from tests.unit.config.refusals import layout_of, problem
from tests.unit.config.test_families import OWN, problems

ROWS = rows_of(__file__)


@pytest.mark.parametrize(("keys", "accelerator", "expected"), ROWS["precisions"])
def test_precision_of_each_mode(keys: dict[str, str], accelerator: bool, expected: list[str]) -> None:
    precision = PrecisionConfig.model_validate(keys).resolved(accelerator)
    assert (precision.parameter, precision.gradient, precision.reduce, precision.optimizer) == tuple(expected)


def test_a_batch_for_a_number_of_ranks_and_anything_else_to_go_on_at() -> None:
    config = load_config("llama2-tiny", ["train.global_batch=8 per 32 ranks"])
    assert config.train.global_batch == 8, "before the number of ranks is known, it is that of the rule"
    assert config.with_batch_for(64).train.global_batch == 16
    assert config.with_batch(4).train.global_batch == 4
    with pytest.raises(ConfigError, match=r"\(8 per 32 ranks\) must be a whole number on 1 rank \(0.25\): set"):
        config.with_batch_for(1)
    again = config_from_sections(config.with_batch_for(64).model_dump())
    assert (again.with_batch_for(128).train.global_batch, again.train.batch_rule) == (16, "8 per 32 ranks")
    values = again.model_dump()
    apply_overrides(values, ["train.global_batch=4"])
    assert config_from_sections(values).train.batch_rule is None, "no rule gave this number"
    assert load_config("llama2-tiny", ["train.global_batch=4 per 1 ranks"]).train.batch_rule == "4 per 1 rank"
    told = "train.batch_rule ('junk') must be left out: train.global_batch='N per M"
    assert problem("train.batch_rule=junk").startswith(told)
    assert load_config("gpt3-23b", ["train.global_batch=8"]).with_batch_for(64).train.global_batch == 8
    for wrong in ("8 per node", "0 per 32 ranks", "8 per 0 ranks"):
        told = f"train.global_batch ('{wrong}') must be a whole number, or 'N per M ranks'"
        assert problem(f"train.global_batch={wrong}") == told
    for value, shown in [("latest", "'latest'"), ("true", "true"), ("-1", "-1"), ("null", "null")]:
        told = f"checkpoint.resume ({shown}) must be auto, or the step of a checkpoint, such as 100"
        assert problem(f"checkpoint.resume={value}") == told


@pytest.mark.parametrize(("recipe", "keys", "section", "expected"), ROWS["derived"])
def test_what_a_key_is_derived_from(recipe: str, keys: str, section: str, expected: dict[str, object]) -> None:
    config = load_config(recipe, keys.split())
    assert config.model_dump()[section].items() >= expected.items()
    assert layout_of(keys.split(), recipe, world=config.parallel.tensor)


@pytest.mark.parametrize(
    ("overrides", "length", "expected"),
    [([], 128, 20), ([], 512, 77), (["data.max_predictions=80"], 512, 80), (["data.masked_fraction=0.5"], 16, 8)],
)
def test_masked_tokens_of_a_sequence(overrides: list[str], length: int, expected: int) -> None:
    assert load_config("bert-tiny", overrides).data.predictions(length) == expected


@pytest.mark.parametrize(("key", "scheme"), [("path", "https"), ("load", "az")])
@pytest.mark.parametrize("login", ["AKIA:se/cr+et", ":word"])
def test_passwords_and_query_strings_have_no_place_in_the_configuration(key: str, login: str, scheme: str) -> None:
    found = problem(f"checkpoint.{key}=s3://{login}@bucket/run")
    assert found.startswith(
        f"checkpoint.{key} (s3://(redacted)@bucket/run) must hold no password, which config.yaml and every manifest "
        "would show: set it in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    )
    assert "FSSPEC_FTP_PASSWORD" in found
    told = f"checkpoint.{key} ({scheme}://host/run?(redacted)) must hold no query string, which"
    assert problem(f"checkpoint.{key}={scheme}://host/run?sv=1&sig=5ecret").startswith(told)
    for url in ("s3://bucket/run", "sftp://user@host/run", "http://host:8080/a@b"):
        assert load_config("llama2-tiny", [f"checkpoint.path={url}"]).checkpoint.path == url


def test_a_set_is_a_path_or_keys_of_data_and_data_and_blends_have_names() -> None:
    config = load_config("gpt-tiny", ["data.blend=[0.7,/data/a,30,b/c]", "data.split=980,10,10"])
    data = config.data
    assert data.blend == (0.7, "/data/a", 30.0, "b/c")
    assert data.weighted_prefixes == [(0.7, "/data/a"), (30.0, "b/c")]
    assert (data.key, data.name, data.split_weights) == ("data.blend", "/data/a + b/c", (980.0, 10.0, 10.0))
    stored = parse_yaml(dump_yaml(config.model_dump(mode="json")), "config.yaml")
    assert config_from_sections(stored) == config
    tiny, own = (load_config("gpt-tiny", given).data for given in ([], ["data.path=a.txt"]))
    assert [(each.key, each.name) for each in (tiny, own)] == [("data.dataset", "tiny"), ("data.path", "a.txt")]
    assert (tiny.weighted_prefixes, own.weighted_prefixes) == ([], [(1.0, "a.txt")])
    assert tiny.split_weights == (95.0, 5.0, 0.0)
    given = "evaluation.sets={code: code.txt, wiki: {path: wiki.jsonl, text_key: body}}"
    config = load_config("llama2-tiny", [EVERY, given])
    sets = config.evaluation.sets
    assert (sets["code"].path, sets["wiki"].text_key) == ("code.txt", "body")
    assert sets["code"].split == sets["wiki"].split == "1,0"
    assert config_from_sections(parse_yaml(dump_yaml(config.recorded()), "recorded")).evaluation == config.evaluation
    # Nothing need be held out beside sets.
    keys = [EVERY, "data.split=1,0", "evaluation.sets.code=code.txt"]
    assert layout_of(keys, world=1)
    assert not load_config("llama2-tiny", keys).evaluates_held_out
    assert problem("evaluation.sets.a=x", world=1).startswith("evaluation.sets (a) need train.eval_every")
    told = "evaluation.tasks must be left out with model.family bert"
    assert problem("evaluation.tasks=[x]", recipe="bert-tiny", world=1).startswith(told)


@pytest.mark.parametrize(
    ("factor", "steps", "told"), [(0, 30, True), (0.0, 21, True), (0, 20, False), (0.1, 30, False), (None, 30, False)]
)
def test_steps_after_the_last_point_that_learn_nothing_are_told(factor: float | None, steps: int, told: bool) -> None:
    points = [] if factor is None else [{"at": 1, "factor": 1}, {"at": 20, "factor": factor}]
    schedule = {"schedule": "points", "points": points} if points else {"schedule": "constant"}
    settings = OptimizerConfig.model_validate({"lr": 1e-3, **schedule})
    lines = settings.steps_without_rate(steps)
    assert len(lines) == told
    assert not told or lines[0].startswith(f"steps 20 to {steps} (train.steps) have a learning rate of 0, ")


EVERY = "train.eval_every=2"


@pytest.mark.parametrize("spelling", REMOVED)
def test_what_was_removed_is_answered_by_what_to_use_instead(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    *command, name = spelling.split()
    if not command:
        name, _, value = name.partition("=")
        command, name = ["train", "quickstart"], f"{name}={value or 'x'}"
    assert command[0] in COMMANDS
    assert main([*command, name]) == 2
    assert f"{spelling} was removed: {REMOVED[spelling]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("degree", "schedule", "batches"),
    [(4, "1f1b", [4]), (2, "dualpipev", [4]), (4, "interleaved", [8, 10]), (4, "interleaved_zero_bubble", [12, 15])],
)
def test_batches_that_a_refusal_names_are_taken(degree: int, schedule: str, batches: list[int]) -> None:
    """The refusals themselves are rows of refusals.yaml."""
    keys = ["train.micro_batch=1", f"parallel.pipeline={degree}", f"parallel.schedule={schedule}"]
    for batch in batches:
        assert layout_of([*keys, f"train.global_batch={batch}"], "gpt-tiny", degree).pipeline == degree


def test_a_model_of_your_own_has_no_stages() -> None:
    (sentence,) = problems(OWN, world=2, parallel={"pipeline": 2})
    assert sentence.startswith("parallel.pipeline (2) must be 1 with a model of your own (model.family my.package")
