"""The cells of the verified matrix, their trainings and results, what is replayed, and choices that are recorded."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from scripts import device_tests, write_docs
from shardwise.base.errors import ConfigError, RunError
from shardwise.base.yaml_and_json import dump_yaml
from shardwise.config import Config, load_config
from shardwise.config.routing import Routing
from shardwise.distributed.mesh import Group
from shardwise.layers.experts import choose
from shardwise.runs.folder import RunDirectory
from shardwise.runs.state_records import RecordedHash, StateRecords
from shardwise.verify import rank_calls, recorded_choices
from shardwise.verify.cell_training import ReferenceTraining, train_cell, train_reference
from shardwise.verify.layouts import Cell, layouts_to_verify, parse_layouts
from shardwise.verify.miniature import miniature
from shardwise.verify.rank_calls import RankResults, call_on_ranks
from shardwise.verify.replay import ReplayedStretch, compare_replay, hash_difference, read_replay_config
from shardwise.verify.tolerance import Tolerance

RECIPE = load_config("llama2-tiny")


@pytest.mark.parametrize(("given", "number"), [([], 25), (["all"], 912), (["parallel.pipeline=8", "all"], 18)])
def test_every_layout_of_eight_ranks_occurs_once(given: list[str], number: int) -> None:
    cells = layouts_to_verify(RECIPE, "cpu", 8, parse_layouts(given))
    assert len(cells) == len(set(cells)) == number
    assert all(cell.tensor * cell.context * cell.pipeline * cell.data == 8 for cell in cells)
    assert not [cell for cell in cells if cell.sequence and cell.tensor == 1], "SP without TP is no layout of its own"
    assert not [cell for cell in cells if cell.zero and cell.data * cell.context == 1], (
        "ZeRO-1 of one rank is none either"
    )
    assert not [cell for cell in cells if (cell.schedule is None) != (cell.pipeline == 1)]


def test_keys_that_are_not_named_keep_the_recipes_values_and_other_texts_are_refused() -> None:
    recipe = load_config("llama2-tiny", ["parallel.schedule=zbv", "train.recompute=full"])
    cells = layouts_to_verify(recipe, "cpu", 4, {})
    assert {cell.schedule for cell in cells} == {None, "zbv"}
    assert {cell.recompute for cell in cells} == {"full"}
    named = layouts_to_verify(recipe, "cpu", 4, parse_layouts(["parallel.schedule=1f1b,gpipe", "train.recompute=all"]))
    assert {cell.schedule for cell in named} == {None, "1f1b", "gpipe"}
    assert {cell.recompute for cell in named} == {"none", "selective", "full"}
    for given, text in [
        ("parallel.tensr=2", "unknown key; did you mean parallel.tensor?"),
        ("precision.mode=float32", "unknown key; it chooses among parallel.tensor, "),
        ("parallel.tensor", "must read parallel.tensor=VALUE, parallel.tensor=VALUE,VALUE or parallel.tensor=all"),
        ("parallel.tensor=0", r"--layouts parallel.tensor \(0\) must be a degree, such as 2"),
        ("parallel.sequence=1", r"--layouts parallel.sequence \(1\) must be false or true"),
    ]:
        with pytest.raises(ConfigError, match=text):
            parse_layouts([given])


def test_a_result_that_was_cut_short_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.pickle"

    def launch(_command: list[str], _nproc: int, _folder: Path) -> None:
        assert not file.exists(), "results of an earlier call are removed"
        file.write_bytes(pickle.dumps(["whole"]) + pickle.dumps(["cut"])[:-1])

    monkeypatch.setattr(rank_calls, "launch", launch)
    for _ in range(2):
        assert call_on_ranks(len, ranks=1, folder=tmp_path) == RankResults([["whole"]], None)


def test_what_a_replay_refuses_and_compares(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config(dump_yaml(load_config("llama2-tiny", ["train.bitwise=true"]).recorded()))
    with pytest.raises(ConfigError) as caught:
        read_replay_config(run, ["parallel.grain=2", "train.seed=9", "parallel.tensor=2"])
    assert sorted(caught.value.problems) == [
        "parallel.grain (2) must be 4, as in the run that is replayed: leave it out",
        "train.seed (9) must be 1234, as in the run that is replayed: leave it out",
    ]
    _, changed = read_replay_config(run, ["parallel.tensor=2"])
    assert changed.parallel.tensor == 2
    state = RecordedHash("0" * 16, {})
    recorded = StateRecords({1: 4.0, 2: 3.0}, {1: 1.0, 2: 1.5}, {1: state, 2: state})
    replayed = StateRecords({1: 4.0}, {1: 1.0}, {1: state})
    assert compare_replay(recorded, recorded, ReplayedStretch(0, 2)).step is None
    comparison = compare_replay(recorded, replayed, ReplayedStretch(0, 2))
    assert comparison.step == 2
    assert comparison.differences == (
        "loss 3.0 in the run, None in the replay",
        "gradient norm 1.5 in the run, None in the replay",
        "state after it: no hash in the replay",
    )
    recorded = RecordedHash("one", {"model/a": "00000000", "model/b": "11111111"})
    assert hash_difference(recorded, recorded) is None
    other = RecordedHash("two", {"model/a": "00000000", "model/b": "22222222"})
    assert hash_difference(recorded, other) == "1 of 2 tensors (model/b)"
    assert hash_difference(recorded, RecordedHash("six", recorded.tensors)) == "the place in the data or the seed"


COUNTS = {"tests": 12, "skipped": 2}


@pytest.mark.parametrize("asked", ["", "cuda"])
def test_without_the_device_it_says_so(asked: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(device_tests.devices, "local_device", lambda: device_tests.torch.device("cpu"))
    monkeypatch.setenv("DEVICE", asked)
    assert device_tests.main([]) == 2
    error = capsys.readouterr().err
    assert f"must find {asked or 'an accelerator'} that torch" in error
    assert error.count("\n") == 1


def test_a_pass_replaces_that_of_the_same_device_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "devices.json", tmp_path / "devices.md"
    page.write_text("before\n<!-- tested:begin -->\nold\n<!-- tested:end -->\nafter\n")
    for module in (device_tests, write_docs):
        monkeypatch.setattr(module, "RESULTS", results)
        monkeypatch.setattr(module, "DEVICES", page)
    device_tests.keep(device_tests.record("cpu", "CPU", COUNTS, "first"))
    device_tests.keep(device_tests.record("cpu", "CPU", COUNTS, "second"))
    assert "second" in page.read_text()
    assert "Nothing has been run on ROCm" in page.read_text()
    device_tests.keep(device_tests.record("cuda", "1 × H100", COUNTS, "third"))
    assert [row["commit"] for row in json.loads(results.read_text())] == ["second", "third"]
    assert [row["passed"] for row in json.loads(results.read_text())] == [10, 10]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("Nothing has been run on ROCm") == 1


@pytest.fixture(scope="module")
def config() -> Config:
    return small(bitwise=False)


def small(*, bitwise: bool) -> Config:
    recipe = load_config("llama2-tiny", ["model.num_hidden_layers=1", "train.global_batch=2", "train.micro_batch=1"])
    return miniature(recipe, [Cell()], 2, has_accelerator=False, bitwise=bitwise)


def test_tensors_of_another_model_are_named(config: Config, tmp_path: Path) -> None:
    source = train_reference(config, Cell(), tmp_path)
    found = ReferenceTraining.load(tmp_path)
    weights = {name: tensor for name, tensor in found.weights.items() if name != "model.norm.weight"}
    (tmp_path / "other").mkdir()
    ReferenceTraining(found.losses, weights | {"more.weight": torch.ones(2)}, found.gradients).save(tmp_path / "other")
    told = "the tensors of the model must be those of one process: they lack more.weight and have model.norm.weight"
    with pytest.raises(RunError, match=told):
        train_cell(config, Cell(), tmp_path / "other", source, tmp_path / "target")


def test_other_bits_are_named(tmp_path: Path) -> None:
    config = small(bitwise=True)
    source = train_reference(config, Cell(), tmp_path)
    differences, _ = train_cell(config, Cell(), tmp_path, source, tmp_path / "same")
    assert differences.problems(Tolerance.of(config), "A") == []
    found = ReferenceTraining.load(tmp_path)
    middle, end = found.states
    states = (middle | {"exp_avg/lm_head.weight": "0" * 8}, end | {"the gradient norm of step 2": "0x1.0p+0"})
    next_losses = [loss * (1 + 2**-52) for loss in found.losses]
    (tmp_path / "other").mkdir()
    replace(found, losses=next_losses, states=states).save(tmp_path / "other")
    differences, _ = train_cell(config, Cell(), tmp_path / "other", source, tmp_path / "target")
    losses, resumed, *others = differences.problems(Tolerance.of(config), "A")
    assert losses.startswith("the losses differ by ")
    assert resumed.startswith("after the checkpoint of A was read the losses differ by ")
    assert others == [
        "exp_avg/lm_head.weight differs in the middle of the training, and must be equal",
        "after the checkpoint of A was read the gradient norm of step 2 differs at the end",
    ]


def test_a_choice_that_no_rounding_explains_is_told_and_counted_once(tmp_path: Path) -> None:
    """The worst experts in the place of the best."""
    recipe = load_config("olmoe-tiny", ["model.num_hidden_layers=1", "train.global_batch=2"])
    config = miniature(recipe, [Cell()], 2, has_accelerator=False)
    source = train_reference(config, Cell(), tmp_path)
    number = sum(tensor.numel() for tensor in ReferenceTraining.load(tmp_path).choices.values())
    assert number == 2 * 4 * 4 * 16 * 2, "steps, blocks, samples, tokens, experts of each"

    def worst(routing: Routing, scores: Tensor) -> Tensor:
        return choose(routing, -scores)

    with mock.patch.object(recorded_choices, "choose", worst):
        differences, _ = train_cell(config, Cell(), tmp_path, source, tmp_path / "target")
    assert differences.choices.differing == number
    (told,) = differences.problems(Tolerance.of(config), "A")
    assert told == (
        "the choice of experts by model.layers.0.mlp.gate for token 0 of sample 0 is not that of one process, though "
        "no scores were nearly equal"
    )
    by_rank = [{("gate", 1): 2, ("gate", 2): 1}, {("gate", 1): 2}]
    with mock.patch.object(recorded_choices.collectives, "all_gather_objects", return_value=by_rank):
        assert recorded_choices._joined({}, Group()) == {("gate", 1): 2, ("gate", 2): 1}


@pytest.mark.parametrize(
    ("routing", "scores", "wanted", "is_wrong"),
    [
        # A third group has nearly the score of the one that stays.
        (
            Routing(8, 3, groups=4, chosen_groups=2),
            [0.5, 0.5 - 2e-6, 0.5, 0.5, 0.5, 0.5 - 1e-6, 0.5, 0.5 - 2e-6],
            [0, 1, 2],
            False,
        ),
        (Routing(4, 2), [0.4, 0.3, 0.3 - 1e-7, 0.1], [0, 2], False),
        (Routing(4, 2), [0.4, 0.3, 0.3 - 1e-4, 0.1], [0, 2], True),
        # The sums of the groups' scores are nearly equal, and no two scores are.
        (Routing(6, 2, groups=3, chosen_groups=1), [0.6, 0.4, 0.9, 0.1 - 1e-7, 0.0, 0.0], [2, 3], False),
        (Routing(6, 2, groups=3, chosen_groups=1), [0.6, 0.4, 0.9, 0.09, 0.0, 0.0], [2, 3], True),
    ],
)
def test_choices_of_nearly_equal_scores(
    routing: Routing, scores: list[float], wanted: list[int], is_wrong: bool
) -> None:
    found = recorded_choices.RecordedChoices({}, 1e-5)
    given = torch.tensor([scores])
    layer = mock.Mock(router=mock.Mock(routing=routing))
    found._compare(layer, given, choose(routing, given), torch.tensor([wanted]), [(("gate", 3), 5)])
    assert list(found.differing) == [(("gate", 3), 5)]
    assert bool(found.wrong) == is_wrong
