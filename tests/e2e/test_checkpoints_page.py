"""docs/checkpoints.md: its commands and its code run in their order, and what it promises of them holds."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from tests.e2e import processes
from tests.e2e.command import environment, metrics, outcome, start
from tests.e2e.test_pages import assert_shown, blocks
from tests.hugging_face import save
from tests.unit.use.importing import megatron_shards, nemo_shards, neuronx_shards, trainer_files

PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
RUN = Path("runs/demo")


def follow(code: str, language: str, at: Path) -> str:
    """Run a block as a reader does; returns what it printed."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-eu", "-c", code]
    done = subprocess.run(
        command, cwd=at, env=environment(PATH=path), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{code}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def write_shards(at: Path) -> None:
    """The checkpoints of other systems that the page imports, of small models with the vocabulary that it names."""
    gpt = save("gpt", at / "gpt", vocab_size=50257)
    megatron_shards.write(
        megatron_shards.Source(gpt, megatron_shards.gpt_args(gpt)), at / "megatron/gpt2", "core", tp=2, pp=2
    )
    experiment = at / "nemo_experiments/megatron_gpt/2023-06-10_00-22-42/checkpoints"
    nemo = nemo_shards.Source(gpt, nemo_shards.gpt_config(gpt))
    nemo_shards.write(nemo, experiment, tp=2, pp=2, xser=True, moments=(nemo, nemo))
    bert = save("bert", at / "bert-large-uncased")
    moments = (dict(bert.state_dict()), dict(bert.state_dict()))
    neuronx_shards.write(bert, at / "output", tp=2, old=True, moments=moments, dp=None, beside={"global_step": 6})
    trainer_files.save("llama", at / "out").rename(at / "out/checkpoint-500")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every block was run: the first one in the background, until the second stops it."""
    at = tmp_path_factory.mktemp("page")
    write_shards(at)
    (_, train), (_, stop), *others = BLOCKS
    job = start(*shlex.split(train.replace("\\\n", ""))[1:], at=at)
    try:
        assert processes.wait_for(lambda: (at / RUN / "metrics.jsonl").exists() and metrics(at / RUN, "step"), 120)  # type: ignore[arg-type,return-value]
        said = [follow(stop, "sh", at)]
        stopped = outcome(job)
    finally:
        job.kill()
    assert stopped.code == 75, stopped.err
    said = [stopped.out + stopped.err, *said, *(follow(code, language, at) for language, code in others)]
    yield at, said
    shutil.rmtree(at, ignore_errors=True)


@pytest.mark.slow
def test_the_page_runs(followed: Any) -> None:
    at, _ = followed
    (resume,) = metrics(at / RUN, "resume")
    assert "parallel.tensor 2 → 1" in resume["changes"]
    steps = [event["step"] for event in metrics(at / RUN, "step")]
    assert steps == list(range(1, 61)), "a step is missing, or was done twice"
    assert [event["samples"] for event in metrics(at / RUN, "step")] == [8 * step for step in steps]
    _, said = followed
    (text,) = [out for (language, _), out in zip(BLOCKS, said, strict=True) if language == "python"]
    commands = next(out for (_, code), out in zip(BLOCKS, said, strict=True) if "shardwise generate" in code)
    assert text.strip().startswith("In spring"), text
    assert text.strip().removeprefix("In spring").strip() in commands, f"{text!r} is not in\n{commands}"
    at, said = followed
    for block in blocks("docs/checkpoints.md"):
        assert_shown(block, next(out for (_, code), out in zip(BLOCKS, said, strict=True) if code == block.code))
    printed = "\n".join(said)
    for expected in ("exp_avg", "step-00000060", "loss"):
        assert expected in printed, f"{expected!r} is not in what the commands printed"
    files = {path.name for path in (at / RUN / "checkpoints/step-00000060").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "optimizer", "manifest.json"} <= files
    runs = ("gpt3/checkpoints/step-00000100: ", "bert/checkpoints/step-00000006: ")
    imported = [made in printed for made in ("imported/step-00000000: ", "gpt2/step-00000000: ", *runs)]
    assert all(imported), imported
    assert len(list((at / "exported").glob("model-*.safetensors"))) > 1, "1 MB a shard makes several"
