"""Mixtures of sources of any format: their order over stops and layouts, their stages, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.config import Config, changed_size_stages
from shardwise.data.formats.prepared_data import make_evaluation_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.preview import preview_data
from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.request import continued_stages
from shardwise.data.samples.batch import Batch, BlendedBatches
from shardwise.data.samples.order import MixtureStage
from tests.unit.data import small_runs
from tests.unit.data.small_runs import batches_of, json_lines, refusal, refusals, saved_tokenizer

TEXT = "The ring of keys was lost in spring. A song went with it! Who sang it? Nobody knows.\n"
BATCH = 12


class Rows:
    """Samples of a program."""

    def __init__(self, _config: Config, part: str) -> None:
        self.first = 250 if part == "train" else 290

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> list[int]:
        return [self.first + number] * 17


def config(mixture: dict[str, Any], stages: Any = (), *, batch: int = BATCH, **data: Any) -> Config:
    return small_runs.config(steps=9, batch=batch, mixture=mixture, stages=list(stages), **data)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with documents of Megatron, lines of text, a stream and a tokenizer."""
    with IndexedWriter(tmp_path / "tokens", 300) as writer:
        for number in range(40):
            writer.add([number] * 30, [30])
    for name, count in (("lines", 40), ("stream", 60)):
        json_lines(tmp_path / f"{name}.jsonl", [f"{number} {name}: {TEXT * 2}" for number in range(count)])
    saved_tokenizer(tmp_path / "tokenizer", TEXT, 264)
    return tmp_path


def four_sources(place: Path) -> dict[str, Any]:
    return {
        "tokens": {"path": str(place / "tokens"), "weight": 0.4},
        "lines": {"path": str(place / "lines.jsonl"), "weight": 0.3},
        "stream": {"path": str(place / "stream.jsonl"), "streaming": True, "shuffle_buffer": 5, "weight": 0.2},
        "rows": {"hook": f"{__name__}:Rows", "weight": 0.1},
    }


def training(chosen: Config, place: Path) -> BlendedBatches:
    return batches_of(chosen, place / "cache")


def ids(batches: list[Batch]) -> list[list[int]]:
    return np.concatenate([batch.inputs["ids_SB"] for batch in batches], axis=1).T.tolist()


def test_a_mixture_that_stops_goes_on_sample_by_sample_at_any_layout(place: Path) -> None:
    stages = [{"at": 3, "weights": {"lines": 1, "stream": 2, "rows": 1}}]
    chosen = config(four_sources(place), stages, tokenizer=str(place / "tokenizer"))
    undisturbed = training(chosen, place)
    expected = [row for step in range(8) for row in ids([undisturbed.global_batch(step * BATCH, BATCH)])]
    undisturbed.close()
    read = []
    state: dict[str, Any] = {}
    for start, stop, ranks in ((0, 2, 2), (2, 3, 1), (3, 5, 4), (5, 8, 3)):
        # A process that was killed: all is opened again.
        batches = training(chosen, place)
        if state:
            batches.restore(state)
            batches.set_stages(continued_stages(chosen, state["stages"], start, start * BATCH))
        for step in range(start, stop):
            by_rank = [batches.local_batch(step * BATCH, BATCH, rank, ranks, 1) for rank in range(ranks)]
            read += ids([by_rank[rank][number] for number in range(BATCH // ranks) for rank in range(ranks)])
        # As a manifest keeps it.
        state = json.loads(json.dumps(batches.state(stop * BATCH), sort_keys=True))
        batches.close()
    assert read == expected
    assert len({tuple(row) for row in expected}) > 60, "few samples are equal"
    in_first_stage = {name: undisturbed.drawn(source, 3 * BATCH) for source, name in enumerate(undisturbed.order.names)}
    # By weight 14.4, 10.8, 7.2 and 3.6.
    assert in_first_stage == {"tokens": 15, "lines": 11, "stream": 7, "rows": 3}
    tokens = undisturbed.order.names.index("tokens")
    assert tokens not in undisturbed.order.sources(np.arange(3 * BATCH, 8 * BATCH))


def test_an_evaluation_has_all_sources_that_hold_samples_out(place: Path) -> None:
    mixture = four_sources(place)
    mixture["tokens"]["split"] = "100,0"
    mixture["stream"]["split"] = "50,50"
    del mixture["rows"]["weight"]
    stages = [{"at": 3, "weights": {"rows": 1}}]
    chosen = config(mixture, stages, eval_every=1, tokenizer=str(place / "tokenizer"))
    data = prepare_data(chosen, place / "cache")
    evaluation = make_evaluation_batches(chosen, data, "eval")
    assert evaluation.order.names == ("lines", "rows", "stream")
    rows = ids([*evaluation.eval_batches(100, BATCH, 0, 1, BATCH)])
    assert len(rows) == -(-evaluation.num_samples // BATCH) * BATCH
    assert sorted(row[0] for row in rows if row[0] >= 290) == [*range(290, 299)]
    assert data.count("eval") == sum(source.count("eval") for source in data.sources.values())


def test_sources_of_text_share_a_tokenizer_and_others_are_refused(place: Path) -> None:
    (place / "more.txt").write_text(TEXT * 40, encoding="utf-8")
    mixture = {"lines": {"path": str(place / "lines.jsonl"), "weight": 1}, "more": {"path": str(place / "more.txt")}}
    chosen = config(mixture, [{"at": 1, "weights": {"more": 1}}])
    data = prepare_data(chosen, place / "cache")
    texts = [source.tokenizer_path for source in data.sources.values()]
    trained = (data.tokenizer_path / "tokenizer.json").read_bytes()
    assert {path and (path / "tokenizer.json").read_bytes() for path in texts} == {trained}
    assert [name for name, _ in preview_data(chosen).rows] == ["data, lines", "data, more", "tokenizer", "held out"]
    mixture = {name: four_sources(place)[name] for name in ("tokens", "lines")}
    said = refusal(config(mixture), place / "cache")
    assert "must be the one that made the tokens of data.mixture.tokens" in said
    (place / "empty.txt").write_text("", encoding="utf-8")
    mixture = {name: {"path": str(place / f"{name}.txt"), "weight": 1} for name in ("empty", "missing")}
    begins = [problem.split(": ")[0] for problem in refusals(config(mixture), place / "cache")]
    assert begins == ["data.mixture.empty", "data.mixture.missing"], "each of them is named"


MIXTURE = {"web": {"path": "web", "weight": 3}, "code": {"path": "code", "weight": 1}, "math": {"path": "math"}}
CODE, LATER = {"at": 4, "weights": {"code": 1}}, {"at": 6, "weights": {"math": 1.0}}
RECORDED = [
    {"step": 0, "sample": 0, "weights": {"code": 1.0, "web": 3.0}},
    {"step": 4, "sample": 48, "weights": {"code": 1.0}},
    {"step": 6, "sample": 72, "weights": {"math": 1.0}},
]


def test_stages_begin_at_samples_and_those_of_the_past_stay() -> None:
    chosen = config(MIXTURE, [CODE, LATER])
    assert continued_stages(chosen, (), 0, 0) == [MixtureStage(**stage) for stage in RECORDED]
    # After the steps before them, where batches are skipped.
    skipped = [MixtureStage(4, 9 * BATCH, {"code": 1.0}), MixtureStage(6, 11 * BATCH, {"math": 1.0})]
    assert continued_stages(chosen, RECORDED, step=3, position=8 * BATCH)[1:] == skipped
    # Later stages follow another batch, and earlier ones stay.
    chosen = config(MIXTURE, [CODE, {"at": 8, "weights": {"web": 1}}], batch=6)
    other = [MixtureStage(4, 48, {"code": 1.0}), MixtureStage(8, 78, {"web": 1.0})]
    assert continued_stages(chosen, RECORDED, step=5, position=60)[1:] == other
    stored = config(MIXTURE, [CODE, LATER]).recorded()
    earlier = {"at": 3, "weights": {"code": 1}}, {"at": 2, "weights": {"web": 1}}
    for stages in ([LATER], [{"at": 4, "weights": {"code": 2}}, LATER], [earlier[0], LATER], [earlier[1], CODE]):
        (problem,) = changed_size_stages(stored, config(MIXTURE, stages), 5)
        assert problem.startswith("the stages before step 5, "), stages
        assert problem.endswith(" must begin at 5 or later"), stages
    mixture = MIXTURE | {"web": {"path": "web", "weight": 2}}
    (problem,) = changed_size_stages(stored, config(mixture, [LATER]), 4)
    assert "the weights of data.mixture ({'web': 3.0, 'code': 1.0})" in problem
    assert changed_size_stages(stored, config(MIXTURE, [LATER]), 4) == []
    renamed = {name.upper(): source for name, source in mixture.items()}
    other = {"at": 6, "weights": {"MATH": 1}}
    assert changed_size_stages(stored, config(renamed, [other]), 5) == [], "other data, which --change allows"
