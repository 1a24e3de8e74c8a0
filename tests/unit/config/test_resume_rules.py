"""What of a configuration may change when a run goes on."""

from typing import Any

import pytest

from shardwise.config import config_from_sections, kept_batch_note, load_config, resume_changes, resume_problems


def resolved(*overrides: str, recipe: str = "llama2-tiny") -> dict[str, Any]:
    return load_config(recipe, overrides).model_dump(mode="json")


def expect_no_change(then: dict[str, Any], now: dict[str, Any]) -> None:
    assert resume_problems(then, now) == []
    assert resume_changes(then, now) == []


def test_what_may_change_is_told_a_line_each() -> None:
    expect_no_change(resolved(), resolved())
    overrides = [
        "parallel.tensor=2",
        "train.steps=480",
        "train.global_batch=16",
        "optimizer.lr=1e-4",
        "precision.mode=mixed",
        "checkpoint.load=null",
        "checkpoint.keep=null",
        "data.workers=3",
        "log.every=10",
        "model.ignore=[notes]",
    ]
    assert resume_problems(resolved(), resolved(*overrides)) == []
    assert resume_changes(resolved(), resolved(*overrides)) == [
        'model.ignore [] → ["notes"]',
        "parallel.tensor 1 → 2",
        "train.steps 20 → 480",
        "train.global_batch 8 → 16",
        "optimizer.lr 0.001 → 0.0001",
        "precision.mode float32 → mixed",
        "data.workers 1 → 3",
        "checkpoint.keep 3 → null",
        "log.every null → 10",
    ]


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.num_hidden_layers=9", "model.num_hidden_layers (9) must be 8"),
        ("model.rope_scaling={rope_type: linear, factor: 2}", "model.rope_scaling ({"),
        ("train.seed=7", "train.seed (7) must be 1234"),
        ("optimizer.name=lamb", "optimizer.name (lamb) must be adamw"),
    ],
)
def test_what_must_stay(override: str, difference: str) -> None:
    (problem,) = resume_problems(resolved(), resolved(override))
    head, line, fix = problem.splitlines()
    assert head == "the run in this folder can be resumed only with the model and data that it began with:"
    assert line.strip().startswith(difference)
    key = override.partition("=")[0]
    change = "" if key.startswith(("model", "optimizer")) else f", or let the run go on with it by --change {key}"
    load = "" if key.startswith("model") else ", with checkpoint.load for the weights of this one"
    rest = f", or start a new run in another --run-dir{load}"
    assert fix == f"set it back{change}{rest}"


def test_fault_23_what_is_recorded_holds_no_secret_and_younger_keys_change_nothing() -> None:
    old = resolved()
    del old["train"]["skip_batches"], old["train"]["dropout_mode"], old["checkpoint"]
    expect_no_change(old, resolved())
    assert resume_changes(old, resolved("checkpoint.every=5")) == ["checkpoint.every 0 → 5"]
    (problem,) = resume_problems(resolved(), resolved(recipe="gpt-tiny"))
    assert "  model.family (gpt) must be llama\n" in problem
    assert problem.count(") must be ") > 3
    weights = "checkpoint.load=weights"  # fault 7: positions stay where weights were loaded, too
    (problem,) = resume_problems(resolved(weights), resolved(weights, "model.rope_theta=5e6"))
    assert "  model.rope_theta (5000000.0) must be 10000.0\n" in problem
    (problem,) = resume_problems({"model": {"family": "llama"}}, resolved())
    assert problem.startswith("the configuration of the run in this folder is not valid:\n  ")
    assert "model.vocab_size is missing" in problem
    rule = load_config("llama2-tiny", ["train.global_batch=4 per 1 rank"])
    began = rule.with_batch_for(2).model_dump(mode="json")
    note = "global batch: 8 is kept, as the run in this folder has it; train.global_batch=NUMBER changes it"
    assert kept_batch_note(began, rule.train) == note
    assert kept_batch_note(began, load_config("llama2-tiny", ["train.global_batch=8 per 2 ranks"]).train) == note
    assert kept_batch_note(began, load_config("llama2-tiny", ["train.global_batch=8 per 1 rank"]).train) is None
    assert kept_batch_note(began, load_config("llama2-tiny").train) is None
    del began["train"]["batch_rule"]
    assert kept_batch_note(began, rule.train) == note, "a run of before rules were stored"
    options = f"compile.options={{a: ['{SECRET}'], api_key: word}}"
    environment = f"launch.environment={{URL: '{SECRET}'}}"
    config = load_config("llama2-tiny", [f"log.sample_prompt={SECRET}", options, environment])
    recorded = config.recorded()
    assert "word" not in str(recorded).replace("tie_word_embeddings", "")
    assert recorded["log"]["sample_prompt"] == recorded["launch"]["environment"]["URL"] == SHOWN
    assert config.log.sample_prompt == SECRET, "the run itself needs it"
    assert config_from_sections(recorded).model == config.model
    # With the same secret, or a renewed one; also where an older version recorded it.
    for key in ["log.sample_prompt", "data.path"]:
        new = load_config("llama2-tiny", [f"{key}={SECRET}"])
        renewed = load_config("llama2-tiny", [f"{key}={SECRET.replace('word', 'other')}"])
        for stored in (new.recorded(), new.model_dump(mode="json")):
            for config in (new, renewed):
                expect_no_change(stored, config.recorded())


SECRET = "see https://me:word@host/page?key=word"
SHOWN = "see https://(redacted)@host/page?(redacted)"
