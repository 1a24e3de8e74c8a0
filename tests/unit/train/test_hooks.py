"""Hooks: a reader, a loss, an optimizer and callbacks of the user's own train; what is wrong with one is a sentence."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise
from shardwise.base.errors import ConfigError, DataError, RunError, StoppedError
from shardwise.base.user_code import given_objects
from shardwise.cli import main
from shardwise.config import check_layout
from shardwise.config.resume_rules import resume_problems
from shardwise.data.formats.prepared_data import make_batches
from shardwise.data.open_data import prepare_data
from shardwise.launch import stop_requests
from shardwise.train.hooks import MetricsWithCallbacks, check_hooks, user_optimizer
from shardwise_watch.run import RunView
from tests import own_hooks
from tests.arch.source import ROOT
from tests.dist.training import SMALL_MODELS, make_config
from tests.e2e.command import within
from tests.rows import rows_of

ROWS = rows_of(__file__)

HERE = "tests.own_hooks"


def losses(run: shardwise.Run) -> list[float]:
    return [event["loss"] for event in run.metrics()]


@pytest.mark.slow
def test_all_hooks_together_are_recorded_and_continued(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    own_hooks.Recorder.heard.clear()
    hooks = {
        "data": f"{HERE}:Reader",
        "loss": f"{HERE}:cross_entropy",
        "optimizer": f"{HERE}:SignMomentum",
        "optimizer_options": {"momentum": 0.5},
        "callbacks": [f"{HERE}:Recorder"],
    }
    # The vocabulary of 301 has no tokenizer here, so there is no sample either.
    config = shardwise.load_recipe(recipe, data={"dataset": None}, hooks=hooks, train={"steps": 6})
    first = shardwise.train(config.model_copy(update={"train": config.train.model_copy(update={"stop_after": 3})}))
    heard = (first.path / "metrics.jsonl").read_text().splitlines()
    assert own_hooks.Recorder.heard == [json.loads(line)["event"] for line in heard]
    assert first.config().hooks == config.hooks
    whole = shardwise.train(config, run_dir="runs/whole")
    resumed = shardwise.train(config, run_dir=first.path)  # the optimizer's own state came from the checkpoint
    assert losses(resumed) == losses(whole)
    # A stranger's checkpoint must not name code that an evaluation runs.
    assert main(["evaluate", str(whole.path)]) == 2
    assert f"was trained on hooks.data ({HERE}:Reader), code that an evaluation does not run" in capsys.readouterr().err


def test_callbacks_stop_runs_with_a_checkpoint_and_those_that_they_end_have_failed(recipe: str) -> None:
    config = shardwise.load_recipe(recipe, train={"eval_every": 0})
    with pytest.raises(StoppedError, match=r"hooks\.callbacks \(tests\.own_hooks:stop_at_2\)"):
        shardwise.train(config, run_dir="runs/a", callbacks=[own_hooks.stop_at_2])
    run = shardwise.Run("runs/a")
    assert run.metrics()[-1]["step"] == 3  # the step after the one that it heard of
    assert [Path(path).name for path in run.checkpoints()] == ["step-00000003"]
    told = r"hooks\.callbacks \(tests\.own_hooks:breaks\) failed: KeyError: 'loss' \(.*line"
    with pytest.raises(RunError, match=told):
        shardwise.train(config, callbacks=[own_hooks.breaks])

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            sys.exit(0)

    config = shardwise.load_recipe(recipe, train={"eval_every": 0})
    with pytest.raises(RunError, match=r"hooks\.callbacks \(.*\) failed: sys\.exit\(0\) was called \(.*, line \d+\)"):
        shardwise.train(config, run_dir="runs/ended", callbacks=[hear])
    run = RunView(Path("runs/ended"), all_steps=False)
    assert (run.state, run.results) == ("failed", {})


@pytest.mark.parametrize(
    ("value", "stops"),
    [(True, True), (np.True_, True), (None, False), (1, False), (np.ones(3), False)],
    ids=repr,
)  # fmt: skip
def test_a_callback_stops_by_true(value: object, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(stop_requests, "request", lambda run, by: asked.append(by))
    with given_objects({"a:b": lambda event: value}), MetricsWithCallbacks(tmp_path / "m.jsonl", ["a:b"]) as m:
        m.write({"event": "start"})
    assert bool(asked) == stops


def test_options_changes_and_the_page_of_hooks(tmp_path: Path) -> None:
    hooks = {"optimizer": f"{HERE}:SignMomentum", "optimizer_options": {"momentum": 0.5}}
    config = make_config(hooks=hooks)
    found, options = user_optimizer(config.hooks, config.optimizer)
    assert found is own_hooks.SignMomentum
    assert options == {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.5}  # neither betas nor eps

    def stored(**hooks: Any) -> dict[str, Any]:
        return make_config(hooks=hooks).model_dump(mode="json")

    for key in ("data", "loss", "optimizer"):
        (problem,) = resume_problems(stored(), stored(**{key: "a:b"}))
        assert f"hooks.{key} (a:b) must be null" in problem
    assert not resume_problems(stored(), stored(callbacks=["a:b"]))
    page = (ROOT / "docs/hooks.md").read_text("utf-8")
    (command,) = re.findall(r"`shardwise (train llama2-tiny\s+hooks\.optimizer=\S+)`", page)
    within(*command.split(), "--dry-run", at=tmp_path).succeeded()


def test_an_optimizer_whose_state_no_checkpoint_holds_is_refused() -> None:
    config = make_config(hooks={"optimizer": f"{HERE}:NestedState"})
    told = (
        r"hooks\.optimizer \(tests\.own_hooks:NestedState\) must keep .* and means \(dict\) would be lost when the run"
    )
    with pytest.raises(ConfigError, match=told):
        user_optimizer(config.hooks, config.optimizer)


def reader_config(name: str, **train: Any) -> Any:
    return make_config(hooks={"data": f"{HERE}:{name}"}, train=train)


def test_samples_are_padded_and_the_same_at_any_layout(tmp_path: Path) -> None:
    config = reader_config("Reader", eval_every=5)
    data = prepare_data(config, tmp_path)
    batches = make_batches(config, data, "train")
    assert batches.num_samples == 40
    whole = batches.global_batch(0, 8)
    parts = [batches.local_batch(0, 8, rank, 2, 2) for rank in range(2)]
    assert sum(int(part.counts[0]) for rank in parts for part in rank) == int(whole.counts[0])
    short = [column for column in range(8) if (whole.inputs["targets_SB"][:, column] == -100).any()]
    assert short, "no sample of the batch is shorter"
    for column in short:
        assert (whole.inputs["targets_SB"][-5:, column] == -100).all()
        assert (whole.inputs["targets_SB"][:-5, column] != -100).all()
    ids, targets = whole.inputs["ids_SB"], whole.inputs["targets_SB"]
    assert np.array_equal(ids[1:-5], targets[:-6])
    assert (data.count("train"), data.count("eval")) == (40 * 16, 9 * 16)
    assert data.beginning("train", 3) == [0, 1, 2]
    assert prepare_data(config, tmp_path).fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("sample", "found"), [([1, 131], "ids from 1 to 131"), ([1], "1 of them"), ("text", "of type str")], ids=str
)
def test_a_sample_that_is_no_row_of_tokens_is_refused(sample: Any, found: str, tmp_path: Path) -> None:
    config = reader_config("Reader")
    own_hooks.given_rows = lambda config, part: [sample]  # type: ignore[attr-defined]
    config = config.model_copy(update={"hooks": config.hooks.model_copy(update={"data": f"{HERE}:given_rows"})})
    with pytest.raises(DataError) as caught:
        prepare_data(config, tmp_path)
    told, length = str(caught.value), "2 to train.sequence_length + 1 (17)"
    assert told.endswith(f"and it is {found}")
    assert f"sample 0 must be a row of {length} whole numbers below model.vocab_size (131)" in told


@pytest.mark.parametrize(("hooks", "problem"), ROWS["wrong"], ids=str)
def test_a_wrong_hook_is_one_sentence_with_its_key(hooks: dict[str, Any], problem: str) -> None:
    config = make_config(hooks=hooks)

    with pytest.raises(ConfigError) as caught:  # noqa: PT012  either of the two refuses
        check_layout(config, 1)
        check_hooks(config.hooks, config.optimizer)
    assert any(problem in text for text in caught.value.problems), caught.value
    assert all("\n" not in text for text in caught.value.problems)


REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    r"data.dataset \(tiny\) .* with hooks.data": {"data": {"dataset": "tiny"}, "hooks": {"data": "a:B"}},
    "hooks.data .* with model.family bert": {"model": SMALL_MODELS["bert"], "hooks": {"data": "a:B"}},
    "hooks.loss .* with model.family bert": {"model": SMALL_MODELS["bert"], "hooks": {"loss": "a:b"}},
    "compile.enabled .* must be false with hooks.loss": {"compile": {"enabled": True}, "hooks": {"loss": "a:b"}},
    r"optimizer.name \(lamb\) must be left out": {"optimizer": {"name": "lamb"}, "hooks": {"optimizer": "a:B"}},
    r"hooks.loss \('no path'\) must read package.module:Name": {"hooks": {"loss": "no path"}},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_keys_that_leave_no_place_for_a_hook(problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_layout(make_config(**REFUSED[problem]), 1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("mean_of_each", "one number, not torch.float32 of shape"), ("fails", "failed: ValueError: I have no heart")],
)
def test_a_loss_that_gives_no_sum_ends_the_run(recipe: str, name: str, problem: str) -> None:
    config = shardwise.load_recipe(recipe, hooks={"loss": f"{HERE}:{name}"}, train={"eval_every": 0})
    with pytest.raises(ConfigError, match=rf"hooks.loss \(tests.own_hooks:{name}\) .*{problem}"):
        shardwise.train(config)
