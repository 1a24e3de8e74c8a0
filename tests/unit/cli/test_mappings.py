"""Values of the configuration that are mappings or lists, in the commands that compute from the configuration alone."""

from typing import Any

import pytest

from shardwise.config import Config, load_config

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
