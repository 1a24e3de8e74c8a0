"""Every key of a recipe is taken on a command line, in a dry run: with the recipe's value, and with another one."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.config import Config, load_config, recipe_names
from shardwise.config.pydantic_errors import known_paths
from tests.arch.source import config_fields
from tests.command_line import CommandLine

KEYS = config_fields()
PLAIN = {bool: [True, False], int: [1, 2, 8, 64], float: [0.5, 0.1, 1.0, 2.0], str: ["a", "1h", "tiny"]}
MIXTURE = ["data.dataset=null", "data.mixture={a: {path: a, weight: 0.5}, b: {path: b, weight: 0.5}}"]
STAGE = "at: 3, weights: {a: 1.0}, sequence_length: 32, global_batch: 4, micro_batch: 1, rope_theta: 1.0e+4"
STAGES = [*MIXTURE, f"data.stages=[{{{STAGE}, rope_scaling: {{rope_type: linear, factor: 2.0}}}}]"]
POINTS = [
    "optimizer.schedule=points",
    "optimizer.warmup_steps=0",
    "optimizer.min_lr=0",
    "optimizer.points=[{at: 0, factor: 0}, {at: 4, factor: 0.5, shape: sqrt}]",
]
GIVEN = {
    "model.family": ["model.family=mistral"],
    "model.rope_scaling": ["model.rope_scaling={rope_type: linear, factor: 2.0}"],
    "model.layer_types": [f"model.layer_types={json.dumps(['full_attention'] * 26)}"],
    "model.no_rope_layers": [f"model.no_rope_layers={[1] * 36}"],
    "model.topk_group": ["model.n_group=4", "model.topk_group=2"],
    "train.switches": ["train.switches=[update_in_backward]"],
    "train.batch_rule": ["train.global_batch='8 per 1 rank'"],
    "optimizer.min_lr": ["optimizer.min_lr=1.0e-6"],
    "optimizer.name": ["optimizer.name=lamb"],
    "optimizer.schedule": ["optimizer.schedule=constant"],
    "optimizer.trust_clip": ["optimizer.name=lamb", "optimizer.trust_clip=true"],
    **{f"optimizer.muon.{name}": ["optimizer.name=muon", f"optimizer.muon.{name}={value}"] for name, value in {
        "adamw_lr": 0.1, "momentum": 0.9, "nesterov": "false", "ns_steps": 4, "ns_dtype": "bfloat16",
        "adjust_lr_fn": "original", "split_heads": "true",
    }.items()},
    **{key: POINTS for key in KEYS if key.startswith("optimizer.points.")},
    **{key: STAGES for key in KEYS if key.startswith("data.stages.")},
    "data.mixture": MIXTURE,
    "data.blend": ["data.format=megatron", "data.blend=[0.7, a, 0.3, b]"],
    "data.config": ["data.dataset=acme/words", "data.config=a"],
    "data.split": ["data.split='90,10'"],
    "data.shuffle_buffer": ["data.streaming=true", "data.path=a", "data.shuffle_buffer=8"],
    "evaluation.sets": ["evaluation.sets={mine: {path: a}}"],
    "evaluation.tasks_every": ["evaluation.tasks=[a.yaml]", "evaluation.tasks_every=2"],
    "checkpoint.revision": ["checkpoint.load=acme/model", "checkpoint.revision=a"],
    "compile.options": ["compile.options={max_autotune: true}"],
    "compile.cache_dir": ["compile.cache_dir=a"],
    "hooks.optimizer_options": ["hooks.optimizer=a:B", "hooks.optimizer_options={momentum: 0.5}"],
    "launch.time": ["launch.time='24:00:00'"],
    "launch.sbatch": ["launch.sbatch=[--qos=high]"],
    "launch.environment": ["launch.environment={A: b}"],
    "log.trackers": ["log.trackers=[wandb]"],
    "log.price": ["log.price='2.50 USD/device'"],
    "log.profile": ["log.profile='10:12'"],
}  # fmt: skip
"""Keys that need others beside them, or values that no type tells."""


@cache
def recipe_of_each_family() -> dict[str, str]:
    names = sorted(recipe_names(), key=lambda name: name.endswith("-tiny"))
    return {load_config(name).model.family: name for name in names}


def values_of(annotation: Any) -> list[Any]:
    """Values that a key of this type may take."""
    if get_origin(annotation) is Literal:
        return [*get_args(annotation)]
    if get_origin(annotation) in (list, tuple, dict):
        return [[0.9, 0.95], [1], ["a"]]
    return PLAIN.get(annotation) or [value for part in get_args(annotation) for value in values_of(part)]


def leaves(sections: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in sections.items():
        key = f"{path}{name}"
        if key in KEYS or key in ("data.stages", "optimizer.points"):
            yield key, value
        elif isinstance(value, dict):
            yield from leaves(value, f"{key}.")


def test_all_keys_at_once_with_the_values_that_they_have(cli: CommandLine) -> None:
    """Keys of a stage or a point stand in a list."""
    given: set[str] = set()
    for name in recipe_of_each_family().values():
        recorded = load_config(name).recorded()
        keys = dict(leaves(recorded))
        said = cli("train", name, "--dry-run", "--full", *(f"{key}={json.dumps(keys[key])}" for key in keys))
        assert parse_yaml(said.out, "dry run") == recorded
        given |= keys.keys()
    assert {key for key in KEYS if not key.startswith(("data.stages.", "optimizer.points."))} <= given


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in KEYS}))
def test_each_key_with_another_value(section: str) -> None:
    alike = []
    for key in (key for key in KEYS if key.startswith(f"{section}.")):
        names = [name for family, name in recipe_of_each_family().items() if key in known_paths(family)]
        choices = (
            [GIVEN[key]] if key in GIVEN else [[f"{key}={json.dumps(v)}"] for v in values_of(KEYS[key].annotation)]
        )
        if not any(is_taken(name, words) for name in names or recipe_of_each_family().values() for words in choices):
            alike.append(key)
    assert alike == []


def is_taken(name: str, words: list[str]) -> bool:
    """True if these keys are valid and change the configuration."""
    try:
        return load_config(name, words).recorded() != load_config(name).recorded()
    except ConfigError:
        return False


CASES = {
    "a list of numbers": ["parallel.stages=[3,5]", "optimizer.betas=[0.8,0.9]"],
    "a list of texts": ["launch.sbatch=[--qos=high]", "log.tags=[ablation,team=nlp]"],
    "a list in a mapping": ["model.rope_scaling={rope_type: longrope, short_factor: [1, 1, 1, 1, 1, 1, 1, 1], "
                            "long_factor: [2, 2, 2, 2, 2, 2, 2, 2], original_max_position_embeddings: 32}"],
    "mappings in lists in a mapping": ["compile.options={max_autotune: true, more: [1, {deep: [2]}]}"],
    "sections in a mapping": ["train.eval_every=2", "evaluation.sets={code: a, wiki: {path: b, split: '1,0'}}"],
    "a list in a section in a mapping": ["data.dataset=null", "data.mixture={a: {blend: [0.5, a, 0.5, b], weight: 1}}"],
    "mappings of sections in a list": ["data.stages=[{at: 4, rope_scaling: {rope_type: linear, factor: 2.0}}]"],
}  # fmt: skip


def sections(config: Config) -> list[Any]:
    return [config, *(getattr(config, name) for name in type(config).model_fields)]


@pytest.mark.parametrize("case", CASES)
def test_fault_06_each_section_is_a_key_of_a_cache(case: str) -> None:
    keys = [*CASES[case], "parallel.pipeline=2"]
    config, again, other = (load_config("llama2-tiny", given) for given in (keys, keys, ["model.vocab_size=640"]))
    assert len({*sections(config)}) == len(sections(config))
    assert {*sections(config)} == {*sections(again)}
    assert other not in {config}
