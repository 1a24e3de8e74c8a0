"""The section `evaluation`: sets by a path or by keys of the section `data`."""

from shardwise.base.parsing import dump_yaml, parse_yaml
from shardwise.config import config_from_sections, load_config
from tests.unit.config.refusals import layout_of, problem

EVERY = "train.eval_every=2"


def test_a_set_is_a_path_or_keys_of_data() -> None:
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
