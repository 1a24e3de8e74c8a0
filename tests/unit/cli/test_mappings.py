"""Values of the configuration that are mappings or lists, in the commands that compute from the configuration alone."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.config import Config, load_config
from shardwise.config.rope_scaling import _OPTIONAL, _REQUIRED
from tests.arch.source import config_fields

FIELDS: dict[str, Any] = {
    "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 7 + [2.5], "attention_factor": 1.1, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False,
}  # fmt: skip
OTHERS: dict[str, list[str]] = {
    "model.ignore": ["model.ignore=[unsloth_fixed]"],
    "model.no_rope_layers": ["model.family=smollm3", "model.no_rope_layers=[1,0,1,0,1,0,1,0]"],
    "model.layer_types": ["model.family=qwen3", "model.sliding_window=16", "model.layer_types=4"],
    "model.mlp_only_layers": ["model.family=qwen3_moe", "model.mlp_only_layers=[1]"],
    "parallel.stages": ["parallel.stages=[3,5]"],
    "train.switches": ["train.switches=[update_in_backward]", "optimizer.max_norm=null"],
    "optimizer.betas": ["optimizer.betas=[0.8,0.9]"],
    "optimizer.no_decay": ["optimizer.no_decay=[model.embed_tokens.weight,'*norm.weight']"],
    "evaluation.sets": ["train.eval_every=2", "evaluation.sets={code: a, wiki: {path: b, split: '1,0'}}"],
    "evaluation.tasks": ["evaluation.tasks=[a,b]"],
    "data.blend": ["data.dataset=null", "data.blend=[0.5,a,0.5,b]"],
    "data.mixture": ["data.dataset=null", "data.mixture={a: {blend: [0.5, a, 0.5, b], weight: 1}}"],
    "data.stages.weights": [
        "data.dataset=null",
        "data.mixture={a: {path: a, weight: 1}}",
        "data.stages=[{at: 4, weights: {a: 2}}]",
    ],
    "data.stages.rope_scaling": ["data.stages=[{at: 4, rope_scaling: {rope_type: linear, factor: 2.0}}]"],
    "compile.options": ["compile.options={max_autotune: true, more: [1, {deep: [2]}]}"],
    "hooks.optimizer_options": ["hooks.optimizer=torch.optim:SGD", "hooks.optimizer_options={momentum: 0.9}"],
    "hooks.callbacks": ["hooks.callbacks=[builtins:print]"],
    "launch.sbatch": ["launch.sbatch=[--qos=high]"],
    "launch.environment": ["launch.environment={NCCL_DEBUG: WARN}"],
    "log.trackers": ["log.trackers=[wandb]"],
    "log.tags": ["log.tags=[ablation,team=nlp]"],
    "log.notify": ["log.notify=[env:CHAT,tee told.json]"],
    "log.profile_ranks": ["log.profile=2:4", "log.profile_ranks=[0]"],
}


def _scalings() -> Iterator[Any]:
    for rope_type, needed in _REQUIRED.items():
        for names in dict.fromkeys([needed, (*needed, *_OPTIONAL.get(rope_type, ()))]):
            scaling = {"rope_type": rope_type, **{name: FIELDS[name] for name in names}}
            yield pytest.param([f"model.rope_scaling={json.dumps(scaling)}"], id=f"{rope_type}, {len(names)} fields")


CASES = [*_scalings(), *(pytest.param(keys, id=key) for key, keys in OTHERS.items())]


def test_every_key_with_a_mapping_or_a_list_is_tried() -> None:
    structured = {
        key
        for key, field in config_fields().items()
        if any(kind in str(field.annotation) for kind in ("dict", "tuple["))
    }
    assert structured == {*OTHERS, "model.rope_scaling"}


def sections(config: Config) -> list[Any]:
    return [config, *(getattr(config, name) for name in type(config).model_fields)]


@pytest.mark.parametrize("keys", CASES)
def test_fault_06_each_section_is_a_key_of_a_cache(keys: list[str]) -> None:
    keys = [*keys, "parallel.pipeline=2"]
    config, again, other = (load_config("llama2-tiny", given) for given in (keys, keys, ["model.vocab_size=640"]))
    assert len({*sections(config)}) == len(sections(config))
    assert {*sections(config)} == {*sections(again)}
    assert other not in {config}
