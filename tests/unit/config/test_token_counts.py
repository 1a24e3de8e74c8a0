"""Keys that count steps, given in tokens."""

from shardwise.config import load_config
from shardwise.config.token_counts import parse_tokens, steps_of_tokens, tokens_text
from tests.unit.config.refusals import problem

TOKENS_OF_STEP = 8 * 256
"""Of llama-small."""
POINTS = ("optimizer.schedule=points", "optimizer.warmup_steps=0", "optimizer.min_lr=0")


def test_tokens_are_written_as_they_are_read() -> None:
    for text in ["500k", "1.5T", "300B", "2M", "1.234567M", "0.5k"]:
        assert tokens_text(parse_tokens(text)) == text
        number, unit = float(text[:-1]), {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[text[-1]]
        assert parse_tokens(f"{text[:-1]} {text[-1]} tokens") == parse_tokens(text) == round(number * unit)
    for text in ["20", 400 * "9" + "B", "20X", "20b", "1e9", "-2M", "M", "", "auto", 20, None, True]:
        assert parse_tokens(text) is None


def test_all_keys_that_count_steps_take_tokens_and_other_texts_are_refused() -> None:
    keys = {
        "train.steps": "4M",
        "train.eval_every": "1M",
        "optimizer.warmup_steps": "100k",
        "checkpoint.every": "2M",
        "log.drift_every": "500k",
    }
    config = load_config("llama-small", [f"{key}={value}" for key, value in keys.items()])
    values = config.recorded()
    for key, text in keys.items():
        section, name = key.split(".")
        assert values[section][name] == steps_of_tokens(parse_tokens(text), TOKENS_OF_STEP)
    points = "optimizer.points=[{at: 0, factor: 0}, {at: 100k, factor: 1}]"
    assert [point.at for point in load_config("llama-small", [*POINTS, points]).optimizer.points] == [0, 49]
    told = "train.steps ('20X') must be a whole number of steps, or tokens such as 20B, 500M or 1.5T"
    assert refused("train.steps=20X") == told
    told = "train.global_batch ('none') must be a whole number, or 'N per M ranks'"
    assert refused("train.steps=20B", "train.global_batch=none") == told
    assert refused("train.steps=9000T").startswith("train.steps ")


def refused(*overrides: str) -> str:
    return problem(*overrides, recipe="llama-small", world=2)


def test_steps_follow_a_batch_by_a_rule_where_the_tokens_are_to_stay() -> None:
    points = "optimizer.points=[{at: 0, factor: 0}, {at: 10, factor: 1}]"
    keys = [
        *POINTS,
        points,
        "train.steps=1000",
        "train.eval_every=0",
        "checkpoint.every=100",
        "train.global_batch=8 per 2 ranks",
    ]
    config = load_config("llama-small", keys)
    assert config.with_batch_for(4).train.steps == 1000
    doubled = config.with_tokens_for_any_batch().with_batch_for(4)
    assert (doubled.train.global_batch, doubled.train.steps, doubled.train.eval_every) == (16, 500, 0)
    assert doubled.checkpoint.every == 50
    assert [point.at for point in doubled.optimizer.points] == [0, 5]
    assert doubled.steps_follow_batch
    assert not config.steps_follow_batch
    written = doubled.with_tokens(doubled.model_dump(mode="json", exclude_unset=True))
    assert written["train"]["steps"] == tokens_text(1000 * TOKENS_OF_STEP)
