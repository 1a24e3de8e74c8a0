"""Documents within a sample, as a user asks for them."""

import shlex
from pathlib import Path

import pytest

from tests.e2e.command import metrics, shardwise, within
from tests.e2e.test_pages import Block, assert_shown, blocks


def command_of(heading: str) -> tuple[Block, list[str]]:
    """The block in a section of the page, and the arguments of its command."""
    (block,) = (block for block in blocks("docs/documents.md") if block.heading == heading)
    return block, shlex.split(block.code.replace("\\\n", ""))[1:]


@pytest.mark.slow
def test_packed_documents_go_on_at_another_layout(tmp_path: Path) -> None:
    """The same bits at the layout that was stopped, and the same losses at another one."""
    tiny = ["model.num_hidden_layers=2", "train.global_batch=4", "train.eval_every=4", "train.eval_batches=2"]
    block, command = command_of("Whole documents in a sample")
    arguments = [*command, *tiny, "log.tensorboard=false"]
    whole = shardwise(*arguments, "--run-dir", "whole", at=tmp_path).succeeded()
    assert_shown(block, whole.out)
    assert "; packed by best fit: " in " ".join(whole.out.split())
    for run, changes in (("stopped", []), ("cut", ["parallel.tensor=2"])):
        shardwise(*arguments, "--run-dir", run, "train.stop_after=2", at=tmp_path).succeeded()
        shardwise("train", "--run-dir", run, "train.stop_after=null", *changes, at=tmp_path).succeeded()
    wanted, same, close = (
        [line["loss"] for event in ("step", "eval") for line in metrics(tmp_path / run, event) if line["step"] != 2]
        for run in ("whole", "stopped", "cut")
    )
    assert len(wanted) == 5
    assert same == wanted
    assert close == pytest.approx(wanted, rel=1e-5)
    found = within("evaluate", "whole", "--json", at=tmp_path)
    assert found.code == 0, found.err
