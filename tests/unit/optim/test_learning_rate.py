"""The learning rate as a function of the step."""

import math
import re

import pytest
import torch
import transformers

from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import parse_yaml
from shardwise.cli.entry import main
from shardwise.config import Config, config_from_sections, load_config
from shardwise.config.learning_rate_specs import LEARNING_RATES, LearningRateSpec
from shardwise.config.optimizer import OptimizerConfig
from shardwise.config.recipe_files import recipe_text
from shardwise.optim.learning_rate import learning_rate, learning_rate_change_text
from tests.arch.source import ROOT


def make(
    schedule: str, *, warmup: int = 4, steps: int = 20, min_lr: float = 1e-5, constant: int = 0, lr: float = 1e-3
) -> Config:
    keys = {"schedule": schedule, "lr": lr, "min_lr": min_lr, "warmup_steps": warmup, "constant_steps": constant}
    overrides = [f"optimizer.{key}={value}" for key, value in keys.items()]
    return load_config("llama-small", [f"train.steps={steps}", *overrides])


def with_keys(*keys: str) -> Config:
    """llama-small, whose peak is 2e-3, with 2,048 tokens a step."""
    return load_config("llama-small", ["train.steps=40", "optimizer.warmup_steps=4", *keys])


def rate(config: Config, step: int) -> float:
    return learning_rate(config.optimizer, config.train.steps, step)


def rates(config: Config) -> list[float]:
    """Of all steps of the run."""
    return [rate(config, step) for step in range(1, config.train.steps + 1)]


def rates_of(scheduler: torch.optim.lr_scheduler.LambdaLR, steps: int) -> list[float]:
    """Of all updates of a run that calls `scheduler.step()` after each."""
    found = []
    for _ in range(steps):
        found += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()
    return found


def rates_of_transformers(schedule: str, *, warmup: int, steps: int, lr: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    made = getattr(transformers, f"get_{schedule}_schedule_with_warmup")(optimizer, warmup, steps)
    return rates_of(made, steps)


def rates_of_nemo(*, warmup: int, steps: int, lr: float, min_lr: float = 0.0, constant: int = 0) -> list[float]:
    """Of all updates: `CosineAnnealing` of neuronx-nemo-megatron.

    Update i, from 0, has lr (i + 1) / (warmup + 1) up to i = warmup, then a cosine which ends at i = steps - constant.
    """
    decay = steps - warmup - constant
    found = []
    for i in range(steps):
        if warmup and i <= warmup:
            found.append(lr * (i + 1) / (warmup + 1))
        else:
            cosine = math.cos(math.pi * min(i - warmup, decay) / decay)
            found.append(min_lr + (lr - min_lr) * (1 + cosine) / 2)
    return found


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warmup_rises_from_the_first_step_to_the_peak(schedule: str) -> None:
    assert rates(make(schedule))[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert rate(make(schedule, warmup=20), 20) == pytest.approx(1e-3), "all steps may be warmup"
    assert rate(make(schedule, warmup=0, steps=1, min_lr=0.0), 1) == pytest.approx(1e-3)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_would_reach_the_minimum_one_step_after_the_last(schedule: str) -> None:
    config = make(schedule)
    assert rate(config, 21) == pytest.approx(1e-5)
    assert rate(config, 20) > 1.001e-5, "the last step is one of the decay"
    assert rate(make(schedule, steps=19), 12) == pytest.approx(5.05e-4), "halfway from step 4 to step 20"
    assert rates(config)[3:] == sorted(rates(config)[3:], reverse=True)
    assert min(rates(make(schedule, min_lr=0.0))) > 0, "an update is wasted"
    found = rates(make(schedule, constant=5))
    assert found[15:] == pytest.approx([1e-5] * 5)
    assert found[14] > 1.001e-5, "step 15 of 20 is one of the decay"
    assert found[:15] == pytest.approx(rates(make(schedule, steps=15)))


def test_the_documented_table_is_true() -> None:
    """Each row of rates in docs/configuration.md, of 100 steps with 10 of warmup, lr 1 and min_lr 0."""
    run = {"warmup": 10, "steps": 100, "lr": 1.0}
    wanted = {
        "`cosine`": rates(make("cosine", min_lr=0.0, **run)),
        "`get_cosine_schedule_with_warmup`": rates_of_transformers("cosine", **run),
        "NeMo's `CosineAnnealing`": rates_of_nemo(**run),
        "`linear`": rates(make("linear", min_lr=0.0, **run)),
        "`get_linear_schedule_with_warmup`": rates_of_transformers("linear", **run),
        "`cosine`, `constant_steps=20`": rates(make("cosine", min_lr=0.0, constant=20, **run)),
        "NeMo's, `constant_steps=20`": rates_of_nemo(constant=20, **run),
    }
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    header = re.search(r"^\| rate of step \|(.*)\|$", text, re.MULTILINE)
    steps = [int(cell) for cell in header[1].split("|")]
    for name, found in wanted.items():
        row = f"| {name} | " + " | ".join(f"{found[step - 1]:.4f}" for step in steps) + " |"
        assert row in text, f"docs/configuration.md, which scripts/write_docs.py writes, must have the row\n{row}"


@pytest.mark.parametrize(
    ("shape", "theirs", "decay"), [("linear", "linear", 1), ("cosine", "cosine", 7), ("sqrt", "1-sqrt", 7)]
)
def test_wsd_is_that_of_transformers(shape: str, theirs: str, decay: int) -> None:
    """As for the others, its first update has a rate of 0, and its decay would reach the minimum one step later."""
    keys = [f"optimizer.decay_steps={decay}", f"optimizer.decay_shape={shape}", "optimizer.min_lr=0"]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    scheduler = transformers.get_wsd_schedule(optimizer, 4, decay + 1, num_training_steps=41, decay_type=theirs)
    found = rates(with_keys("optimizer.schedule=wsd", *keys))
    assert found == pytest.approx(rates_of(scheduler, 41)[1:])


def test_wsd_and_points_are_any_curve() -> None:
    wsd = "optimizer.schedule=wsd"
    assert rates(with_keys(wsd, "optimizer.decay_steps=0")) == rates(with_keys("optimizer.schedule=constant"))
    found = rates(with_keys(wsd, "optimizer.decay_steps=9", "optimizer.constant_steps=5", "optimizer.min_lr=2e-4"))
    assert found[3:26] == [2e-3] * 23
    assert found[26:35] == pytest.approx([2e-3 - 1.8e-3 * step / 10 for step in range(1, 10)])
    assert found[35:] == [2e-4] * 5
    points = "[{at: 2, factor: 0.5}, {at: 10, factor: 1}, {at: 20, factor: 1}, {at: 36, factor: 0.1, shape: sqrt}]"
    found = rates(with_keys(*FREE, f"optimizer.points={points}"))
    assert found[:2] == [1e-3] * 2, "before the first point"
    assert found[5] == pytest.approx(1.5e-3), "halfway"
    assert found[9:20] == [2e-3] * 11
    assert found[23] == pytest.approx(2e-4 + 1.8e-3 * 0.5), "a quarter of the way, whose root is a half"
    assert found[35:] == [2e-4] * 5, "after the last point"
    cosine = "[{at: 0, factor: 0}, {at: 4, factor: 1}, {at: 41, factor: 0.1, shape: cosine}]"
    wanted = rates(with_keys("optimizer.schedule=cosine", "optimizer.min_lr=2e-4"))
    assert rates(with_keys(*FREE, f"optimizer.points={cosine}")) == wanted
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(optimizer:\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    recipe = parse_yaml(recipe_text("llama2-tiny"), "llama2-tiny")
    recipe["optimizer"] = parse_yaml(block, "the page")["optimizer"]
    recipe["train"]["steps"] = "11B"
    config = config_from_sections(recipe)
    step_tokens = config.train.global_batch * config.train.sequence_length
    billions = {number: rate(config, round(number * 1e9 / step_tokens)) for number in (0.05, 1, 8, 8.5, 10, 11)}
    assert billions == pytest.approx({0.05: 5e-4, 1: 1e-3, 8: 1e-3, 8.5: 5.5e-4, 10: 1e-4, 11: 1e-4}, rel=1e-3)


def test_an_end_that_moved_and_a_new_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*keys: str, former_steps: int = 240) -> str | None:
        settings = load_config("llama2-tiny", keys).optimizer
        return learning_rate_change_text(settings, 480, former_steps, 200)

    linear = ["optimizer.schedule=linear", "optimizer.warmup_steps=0", "optimizer.lr=4.8e-4"]
    moved = "schedule ends at step 480 in place of 240, so that step 201 has"
    assert text(*linear) == f"the linear {moved} 2.80e-04 in place of 8.00e-05"
    late = ["optimizer.schedule=wsd", "optimizer.warmup_steps=0", "optimizer.decay_steps=10", "optimizer.lr=1e-3"]
    assert text(*late) == f"the wsd {moved} 1.00e-03, as before"
    assert text(*linear, former_steps=480) is None
    assert text("optimizer.schedule=constant", "optimizer.warmup_steps=0") is None
    record = LearningRateSpec("inverse_root", f"{__name__}:inverse_root", excludes=("min_lr",), reason="it has none")
    monkeypatch.setitem(LEARNING_RATES, record.name, record)
    keys = ["optimizer.schedule=inverse_root", "optimizer.warmup_steps=4", "optimizer.min_lr=0", "train.steps=16"]
    assert rates(with_keys(*keys)) == [2e-3 * min(step / 4, (4 / step) ** 0.5) for step in range(1, 17)]
    assert main(["train", "llama-small", *keys, "--dry-run"]) == 0
    assert "inverse_root" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"optimizer.min_lr \(0.1\) must be left out .* inverse_root: it has none"):
        with_keys(*keys, "optimizer.lr=1", "optimizer.min_lr=0.1")


FREE = ("optimizer.schedule=points", "optimizer.warmup_steps=0", "optimizer.min_lr=0")


def inverse_root(settings: OptimizerConfig, steps: int, step: int) -> float:
    """The schedule of arXiv:1706.03762: the root of the warmup over the step."""
    return settings.lr * min(step / settings.warmup_steps, (settings.warmup_steps / step) ** 0.5)
