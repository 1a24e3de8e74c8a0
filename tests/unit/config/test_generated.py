"""Generated configurations and overrides: a valid one has a plan, an invalid one gets a clear error, none a traceback.

The keys come from the configuration's own models, so a new key is covered without a change here.
"""

import json
import math
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.cli import main
from shardwise.config import Config, check_layout, config_from_sections, load_config, recipe_names
from shardwise.estimates.memory import memory_by_rank
from shardwise.models.parameter_counts import parameter_count
from shardwise_plan import device_specs
from shardwise_plan.step_time import step_time
from tests.arch.source import config_fields

FIELDS = config_fields()
KEYS = sorted(FIELDS)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 64, 96, 100, 128, 256, 1000, 1024, 4096, 50257, 2**31 - 1])
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "é", "\x00", "[1", "{a: 1}", "1e400", "-0", "x" * 5000, "!!python/object:os.system", "a: b", "&a *a"]
    ),
    st.lists(st.integers(-2, 300), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a key's type, sensible ones first."""
    origin = get_origin(annotation)
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin in (Union, types.UnionType):
        return st.one_of(*(values_of(each) for each in get_args(annotation)))
    if origin in (list, tuple):
        return st.lists(SIZES, max_size=4)
    if origin is dict or annotation is dict:
        return st.dictionaries(st.text(max_size=4), SIZES, max_size=2)
    plain = {
        bool: st.booleans(),
        int: SIZES | st.integers(-2, 2**33),
        float: st.sampled_from([0.0, 0.1, 0.5, 1.0, 1e-5, 1e30]) | st.floats(-1, 2),
        str: st.sampled_from(["a", "auto", "cpu", "30 days", "x.y:Z", "1,2"]) | st.text(max_size=6),
        type(None): st.none(),
    }
    return plain.get(annotation, JUNK)


def spelled(key: str, value: Any) -> str:
    """An override as a user may type it."""
    return f"{key}={value}" if isinstance(value, str) else f"{key}={json.dumps(value)}"


MISSPELT = (
    st.sampled_from(KEYS).map(lambda key: key[:-1])
    | st.text(max_size=8)
    | st.sampled_from(["a..b", ".", "model", "train.steps.x"])
)
GOOD = st.sampled_from(KEYS).flatmap(
    lambda key: values_of(FIELDS[key].annotation).map(lambda value: spelled(key, value))
)
WRONG = st.tuples(st.sampled_from(KEYS) | MISSPELT, JUNK).map(lambda pair: spelled(*pair))
BROKEN = st.text(max_size=12) | st.sampled_from(
    ["=1", "train.steps", "train.steps=", "train.steps=[1", "a..b=1", "train={x: 1}"]
)
OVERRIDES = st.lists(st.one_of(GOOD, GOOD, GOOD, WRONG, BROKEN), max_size=4)
WORLD = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64, 256, 1024])
NEVER = re.compile(
    r"pydantic|Traceback|<class|validation error|object at 0x|shardwise\.config|KeyError|NoneType", re.IGNORECASE
)


def expect_clear(error: ConfigError) -> None:
    assert error.problems, "an error without a text"
    assert len(set(error.problems)) == len(error.problems), f"said twice: {error.problems}"
    for problem in error.problems:
        assert problem.strip(), "an empty problem"
        assert not NEVER.search(problem), f"internal words: {problem}"
        assert len(problem) < 1200, f"{len(problem)} characters: {problem[:200]}…"
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", problem), f"control characters: {problem!r}"


def expect_plan(config: Config, world: int) -> None:
    """All that is predicted of a valid configuration is finite and positive, and its own file says the same."""
    layout = check_layout(config, world, is_new=True)
    config = config.with_batch_for(world)
    again = config_from_sections(parse_yaml(dump_yaml(config.model_dump(mode="json")), "again"))
    assert again.model_dump() == config.model_dump(), "its own file reads otherwise"
    parameters = parameter_count(config.model)
    ranks = memory_by_rank(config, layout)
    if parameters is None or ranks is None:  # a model of one's own
        return
    assert parameters > 0
    assert all(size >= 0 for memory in ranks for _, size in memory.rows()), ranks
    ranks_of_stage = layout.tensor * layout.expert * (layout.data if config.optimizer.zero == 3 else 1)
    assert sum(memory.parameters for memory in ranks) * ranks_of_stage >= parameters, "a rank lacks parameters"
    if config.parallel.pipeline * config.parallel.stages_per_rank <= 64 and layout.world <= 256:
        found = step_time(config, layout, device_specs.parse_cluster("h100:8", max(1, math.ceil(layout.world / 8))))
        seconds = found.total
        assert math.isfinite(seconds), seconds
        assert seconds > 0


def expect_plan_or_error(recipe: str, overrides: list[str], world: int) -> bool:
    """Whether there was a plan."""
    try:
        config = load_config(recipe, overrides)
        expect_plan(config, world)
    except ConfigError as error:
        expect_clear(error)
        return False
    return True


def examples(number: int, *, derandomize: bool = True) -> settings:
    plain = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return settings(plain, max_examples=number, derandomize=derandomize)


def sweep(number: int, *, derandomize: bool) -> None:
    seen = {True: 0, False: 0}

    @examples(number, derandomize=derandomize)
    @given(st.sampled_from(recipe_names()), OVERRIDES, WORLD)
    @example("llama2-tiny", [], 1)
    def check(recipe: str, overrides: list[str], world: int) -> None:
        seen[expect_plan_or_error(recipe, overrides, world)] += 1

    check()
    assert min(seen.values()) >= number // 20, f"too few of a kind: {seen[True]} valid, {seen[False]} refused"


def test_some_configurations_plan_or_get_one_clear_error() -> None:
    sweep(40, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_configurations_plan_or_get_one_clear_error() -> None:
    sweep(10_000, derandomize=False)


def expect_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that only looks: it ends with 0 and tells something, or with 2 and an error.

    A dry run also tells its numbers if a file is missing.
    """
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code in (0, 2), f"{arguments}: exit code {code}\n{err}"
    assert not NEVER.search(err), err
    assert code == 2 or out.strip(), "exit code 0, and printed nothing"
    assert (code == 2) == err.startswith("shardwise: "), err


@examples(25)
@given(st.sampled_from(["llama2-tiny", "gpt3-tiny", "bert-tiny", "gpt3-175b"]), OVERRIDES, WORLD)
def test_dry_run_or_refusal(capsys: pytest.CaptureFixture[str], recipe: str, overrides: list[str], world: int) -> None:
    expect_command(["train", recipe, "--dry-run", "--nproc", str(world), "--", *overrides], capsys)


@examples(4)
@given(st.sampled_from(["llama2-tiny", "gpt3-tiny", "bert-tiny"]), OVERRIDES)
def test_a_plan_ranks_or_refuses(capsys: pytest.CaptureFixture[str], recipe: str, overrides: list[str]) -> None:
    expect_command(["plan", recipe, "--device", "h100:8", "--", *overrides], capsys)
