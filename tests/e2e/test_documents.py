"""Documents within a sample, as a user asks for them."""

import re
import shlex
from pathlib import Path

from tests.arch.source import ROOT
from tests.e2e.command import metrics, shardwise, within


def test_the_page_runs_and_layouts_agree(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    section = page.partition("\n## Documents within a sample")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^```sh\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
    tiny = ["data.dataset=tiny", "train.stop_after=2", "train.eval_every=2", "train.eval_batches=2"]
    tiny += ["model.num_hidden_layers=2", "model.vocab_size=300", "train.global_batch=4", "log.tensorboard=false"]
    arguments = [*shlex.split(command)[1:], *tiny]
    shardwise(*arguments, "--run-dir", "one", at=tmp_path).succeeded()
    shardwise(*arguments, "--run-dir", "cut", "parallel.tensor=2", "parallel.sequence=true", at=tmp_path).succeeded()
    wanted, found = (
        [line["loss"] for line in metrics(tmp_path / run) if line["event"] in ("step", "eval")]
        for run in ("one", "cut")
    )
    assert len(wanted) == 4
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert abs(mine - theirs) <= 1e-5 * theirs, f"loss {step}: {mine!r}, one process has {theirs!r}"
    evaluated = within("evaluate", "one", at=tmp_path)
    assert evaluated.code == 0, evaluated.err
    assert within("train", "bert-tiny", "data.reset_position_ids=true", at=tmp_path).failed(2) == (
        "shardwise: data.reset_position_ids (true) must be false with model.family bert, which masks tokens\n"
    )
