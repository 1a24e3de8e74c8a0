"""Derived values of the sections."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import PrecisionConfig, apply_overrides, check_layout, config_from, dump_yaml, load_config
from shardwise.config.recipe_files import parse_yaml


def test_heads_are_derived_where_hugging_face_has_null() -> None:
    config = load_config("quickstart", ["model.num_key_value_heads=null", "model.head_dim=null"])
    assert (config.model.num_key_value_heads, config.model.head_dim) == (4, 32)


@pytest.mark.parametrize(
    ("mode", "accelerator", "expected"),
    [
        (None, False, ("float32",) * 4),
        (None, True, ("bfloat16", "float32", "float32", "float32")),
        ("float32", True, ("float32",) * 4),
        ("mixed", False, ("bfloat16", "float32", "float32", "float32")),
        ("bfloat16", False, ("bfloat16",) * 4),
    ],
)
def test_precision_of_each_mode(mode: str | None, accelerator: bool, expected: tuple[str, ...]) -> None:
    precision = PrecisionConfig.model_validate({"mode": mode}).resolved(accelerator)
    assert (precision.parameter, precision.gradient, precision.reduce, precision.optimizer) == expected


def test_precision_keys_refine_the_mode() -> None:
    precision = PrecisionConfig(mode="bfloat16", optimizer="float32", reduce="float32").resolved(accelerator=True)
    assert (precision.parameter, precision.gradient) == ("bfloat16", "bfloat16")
    assert (precision.reduce, precision.optimizer) == ("float32", "float32")


@pytest.mark.parametrize(
    "scaling",
    [
        "{rope_type: default}",
        "{type: linear, factor: 2}",
        "{rope_type: dynamic, factor: 2.0}",
        "{rope_type: dynamic, factor: 2.0, original_max_position_embeddings: 32}",
        "{rope_type: null, type: linear, factor: 2.0, original_max_position_embeddings: null}",
        "{rope_type: yarn, factor: 4, beta_fast: 32, beta_slow: 1, truncate: false}",
        "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64}",
        "{rope_type: longrope, short_factor: [1, 1, 1, 1, 1, 1, 1, 1], long_factor: [2, 2, 2, 2, 2, 2, 2, 2], "
        "original_max_position_embeddings: 64}",
    ],
)
def test_rope_scaling_as_hugging_face_writes_it(scaling: str) -> None:
    model = load_config("llama2-tiny", [f"model.rope_scaling={scaling}"]).model
    assert model.rope_scaling is not None
    assert model.extends_positions == (model.rope_scaling["rope_type"] != "default")


@pytest.mark.parametrize(
    ("scaling", "problem"),
    [
        ("{factor: 2}", "rope_scaling.rope_type is missing: one of default, linear,"),
        ("{rope_type: ntk}", "rope_scaling.rope_type ('ntk') must be one of default, linear,"),
        ("{rope_type: dynamic, factor: 2, beta_fast: 32}", "rope_scaling.beta_fast: unknown key; rope_type"),
        ("{rope_type: linear}", "rope_scaling.factor is missing: rope_type linear needs it"),
        ("{rope_type: linear, factor: 0.5}", "rope_scaling.factor (0.5) must be a number of at least 1"),
        (
            "{rope_type: dynamic, factor: 1" + 400 * "0" + "}",
            "rope_scaling.factor (1" + 400 * "0" + ") must be a number of at least 1",
        ),
        ("{rope_type: linear, factor: two}", "rope_scaling.factor ('two') must be a number"),
        ("{rope_type: linear, factor: 2, facto: 1}", "rope_scaling.facto: unknown key; did you mean factor?"),
        ("{rope_type: yarn, factor: 2, beta_fast: 1, beta_slow: 8}", "rope_scaling.beta_fast (1) must be at least"),
        ("{rope_type: yarn, factor: 2, truncate: 1}", "rope_scaling.truncate (1) must be true or false"),
        (
            "{rope_type: llama3, factor: 8, low_freq_factor: 4, high_freq_factor: 4, "
            "original_max_position_embeddings: 64}",
            "rope_scaling.high_freq_factor (4) must",
        ),
        (
            "{rope_type: longrope, short_factor: [1], long_factor: x, original_max_position_embeddings: 6.5}",
            "rope_scaling.short_factor",
        ),
    ],
)
def test_rope_scaling_mistakes(scaling: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("llama2-tiny", [f"model.rope_scaling={scaling}"])
    assert caught.value.problems[0].startswith(f"model.{problem}")


def test_rope_scaling_mistakes_are_told_at_once() -> None:
    scaling = "{rope_type: longrope, short_factor: [1], long_factor: x, original_max_position_embeddings: 6.5}"
    with pytest.raises(ConfigError) as caught:
        load_config("llama2-tiny", [f"model.rope_scaling={scaling}"])
    assert len(caught.value.problems) == 3


def test_a_batch_for_a_number_of_ranks_becomes_a_number() -> None:
    config = load_config("llama2-tiny", ["train.global_batch=8 per 32 ranks"])
    assert config.train.global_batch == 8, "before the number of ranks is known, it is that of the rule"
    assert config.with_batch_for(64).train.global_batch == 16
    assert config.with_batch(4).train.global_batch == 4
    with pytest.raises(ConfigError, match=r"\(8 per 32 ranks\) must be a whole number on 1 rank \(0.25\): set"):
        config.with_batch_for(1)
    again = config_from(config.with_batch_for(64).model_dump())
    assert (again.with_batch_for(128).train.global_batch, again.train.batch_rule) == (16, "8 per 32 ranks")
    values = again.model_dump()
    apply_overrides(values, ["train.global_batch=4"])
    assert config_from(values).train.batch_rule is None, "no rule gave this number"
    assert load_config("llama2-tiny", ["train.global_batch=4 per 1 ranks"]).train.batch_rule == "4 per 1 rank"
    with pytest.raises(ConfigError, match=r"train.batch_rule \('junk'\) must be left out: train.global_batch='N per M"):
        load_config("llama2-tiny", ["train.batch_rule=junk"])
    assert load_config("gpt3-23b", ["train.global_batch=8"]).with_batch_for(64).train.global_batch == 8
    for wrong in ("8 per node", "0 per 32 ranks", "8 per 0 ranks"):
        with pytest.raises(ConfigError, match=r"\('.*'\) must be a whole number, or 'N per M ranks'$"):
            load_config("llama2-tiny", [f"train.global_batch={wrong}"])


def test_constant_steps_need_a_decay_before_them() -> None:
    keys = ["optimizer.constant_steps=5", "optimizer.schedule=constant"]
    with pytest.raises(ConfigError, match=r"optimizer.constant_steps \(5\) must be left out with .* constant"):
        load_config("llama2-tiny", keys)
    assert load_config("llama2-tiny", keys[:1]).optimizer.constant_steps == 5


def test_lamb_has_its_own_epsilon_and_needs_decay() -> None:
    assert load_config("llama2-tiny").optimizer.eps == 1e-8
    assert load_config("llama2-tiny", ["optimizer.name=lamb"]).optimizer.eps == 1e-6
    assert load_config("llama2-tiny", ["optimizer.name=lamb", "optimizer.eps=1e-7"]).optimizer.eps == 1e-7
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay \(0.0\) must be greater than 0 with optimizer.name"):
        load_config("llama2-tiny", ["optimizer.name=lamb", "optimizer.weight_decay=0.0"])


def test_fault_05_ratios_are_clipped_only_where_there_are_some() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer.trust_clip \(true\) must be false with optimizer.name adamw, which"
    ):
        load_config("llama2-tiny", ["optimizer.trust_clip=true"])
    assert load_config("llama2-tiny", ["optimizer.name=lamb", "optimizer.trust_clip=true"]).optimizer.trust_clip


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_the_host_updates_no_whole_tensors_and_rounds_to_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer.offload \(true\) must be false with optimizer.name {name}"):
        load_config("llama2-tiny", [f"optimizer.name={name}", "optimizer.offload=true"])
    refused = r"optimizer.offload \(true\) must be false with precision.rounding stochastic"
    for rounding in (["precision.rounding=stochastic"], []):  # which is the default of the mode
        config = load_config("llama2-tiny", ["precision.mode=bfloat16", "optimizer.offload=true", *rounding])
        with pytest.raises(ConfigError, match=refused):
            check_layout(config, 1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["optimizer.name=lamb"], r"precision.moments \(bfloat16\) must be left out with optimizer.name lamb"),
        (["optimizer.name=muon"], r"precision.moments \(bfloat16\) must be left out with optimizer.name muon"),
        (["optimizer.offload=true"], r"optimizer.offload \(true\) must be false with precision.moments \(bfloat16\)"),
    ],
)
def test_bfloat16_moments_need_adamw_on_the_device(keys: list[str], said: str) -> None:
    moments = ["precision.mode=mixed", "precision.moments=bfloat16"]
    check_layout(load_config("llama2-tiny", moments), 1)
    with pytest.raises(ConfigError, match=said):
        check_layout(load_config("llama2-tiny", [*moments, *keys]), 1)


def test_moments_are_not_wider_than_masters() -> None:
    said = r"precision.moments \(float32\) must be bfloat16 where masters are bfloat16: leave it out, or set "
    with pytest.raises(ConfigError, match=said):
        load_config("llama2-tiny", ["precision.mode=bfloat16", "precision.moments=float32"])
    narrow = load_config("llama2-tiny", ["precision.mode=bfloat16", "precision.moments=bfloat16"])
    assert narrow.precision.resolved(accelerator=False).rounded(2) == 3


def test_muons_keys_need_muon() -> None:
    keys = ["optimizer.muon.momentum=0.9", "optimizer.muon.split_heads=true"]
    said = r"optimizer.muon.momentum and optimizer.muon.split_heads must be left out with optimizer.name adamw, which"
    with pytest.raises(ConfigError, match=said):
        load_config("llama2-tiny", keys)
    with pytest.raises(ConfigError, match=r"optimizer.trust_clip \(true\) must be false with optimizer.name muon"):
        load_config("llama2-tiny", ["optimizer.name=muon", "optimizer.trust_clip=true"])
    with pytest.raises(ConfigError, match=r"optimizer.muon.ns_steps \(0\) must be at least 1"):
        load_config("llama2-tiny", ["optimizer.name=muon", "optimizer.muon.ns_steps=0"])
    assert load_config("llama2-tiny", ["optimizer.name=muon", *keys]).optimizer.muon.split_heads


@pytest.mark.parametrize(
    ("overrides", "length", "expected"),
    [([], 128, 20), ([], 512, 77), (["data.max_predictions=80"], 512, 80), (["data.masked_fraction=0.5"], 16, 8)],
)
def test_masked_tokens_of_a_sequence(overrides: list[str], length: int, expected: int) -> None:
    assert load_config("bert-tiny", overrides).data.predictions(length) == expected


@pytest.mark.parametrize(("value", "read"), [("auto", "auto"), ("0", 0), ("100", 100)])
def test_a_run_goes_on_at_its_newest_checkpoint_or_a_step(value: str, read: str | int) -> None:
    config = load_config("llama2-tiny", [f"checkpoint.resume={value}", "train.steps=200"])
    check_layout(config, 1)
    assert config.checkpoint.resume == read


@pytest.mark.parametrize(
    ("value", "shown"), [("latest", "'latest'"), ("true", "true"), ("-1", "-1"), ("1.5", "1.5"), ("null", "null")]
)
def test_anything_else_to_go_on_at_is_one_mistake(value: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("llama2-tiny", [f"checkpoint.resume={value}"])
    assert caught.value.problems == [
        f"checkpoint.resume ({shown}) must be auto, or the step of a checkpoint, such as 100"
    ]


def test_batches_are_left_out_after_a_named_step() -> None:
    config = load_config("llama2-tiny", ["checkpoint.resume=10", "train.skip_batches=3"])
    check_layout(config, 1)
    assert config.train.skip_batches == 3


def test_a_long_run_is_saved_on_its_way() -> None:
    for recipe in ("llama2-7b", "quickstart"):
        assert load_config(recipe).checkpoint.every_minutes == 30


@pytest.mark.parametrize("key", ["path", "load"])
@pytest.mark.parametrize("login", ["AKIA:se/cr+et", "user:1234", ":word"])
def test_a_password_has_no_place_in_the_configuration(key: str, login: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("llama2-tiny", [f"checkpoint.{key}=s3://{login}@bucket/run"])
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"checkpoint.{key} (s3://(redacted)@bucket/run) must hold no password, which config.yaml and every manifest "
        "would show: set it in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    )
    assert "FSSPEC_FTP_PASSWORD" in problem


@pytest.mark.parametrize("key", ["path", "load"])
@pytest.mark.parametrize("scheme", ["https", "az"])
def test_a_query_string_has_no_place_in_the_configuration(key: str, scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("llama2-tiny", [f"checkpoint.{key}={scheme}://host/run?sv=1&sig=5ecret"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"checkpoint.{key} ({scheme}://host/run?(redacted)) must hold no query string, which")


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "sftp://user@host/run", "abfs://container@account.host/run", "http://host:8080/a@b"]
)
def test_a_url_without_a_password_is_taken(url: str) -> None:
    assert load_config("llama2-tiny", [f"checkpoint.path={url}"]).checkpoint.path == url


def test_a_blend_as_megatron_writes_it() -> None:
    config = load_config("gpt-tiny", ["data.blend=[0.7,/data/a,30,b/c]", "data.split=980,10,10"])
    data = config.data
    assert data.blend == (0.7, "/data/a", 30.0, "b/c")
    assert data.weighted_prefixes == [(0.7, "/data/a"), (30.0, "b/c")]
    assert (data.key, data.name, data.split_weights) == ("data.blend", "/data/a + b/c", (980.0, 10.0, 10.0))
    stored = parse_yaml(dump_yaml(config.model_dump(mode="json")), "config.yaml")
    assert config_from(stored) == config


def test_what_the_data_are_called() -> None:
    names = [load_config("gpt-tiny", given).data for given in ([], ["data.path=a.txt"])]
    assert [(data.key, data.name) for data in names] == [("data.dataset", "tiny"), ("data.path", "a.txt")]
    assert names[1].weighted_prefixes == [(1.0, "a.txt")]
    assert names[0].weighted_prefixes == []
    assert names[0].split_weights == (95.0, 5.0, 0.0)


def test_all_that_is_wrong_with_the_data_at_once() -> None:
    given = ["data.blend=[1,a]", "data.path=b.txt", "data.format=text", "data.split=0,1"]
    with pytest.raises(ConfigError) as caught:
        load_config("gpt-tiny", given)
    assert [text.split(" must ")[0] for text in caught.value.problems] == [
        "data.split ('0,1')",
        "data.path (b.txt)",
        "data.format (text)",
    ]
    assert caught.value.problems[2] == (
        "data.format (text) must be megatron with data.blend (a), or left out: other data come by data.path"
    )
