"""The page on fine-tuning, in small: from pretraining to answers, which transformers renders alike at any layout."""

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.arch.source import ROOT
from tests.e2e.command import metrics, shardwise, within
from tests.e2e.test_pages import assert_shown, blocks

SMALL = ["log.tensorboard=false", "log.sample_tokens=0", "train.eval_batches=1"]
STEPS = 12  # more than warm up
MESSAGES = [{"role": "user", "content": "What does a baker make?"}, {"role": "assistant", "content": "Bread."}]


def commands(heading: str) -> list[list[str]]:
    """The page's commands below a heading, with fewer steps; without `chat`, which waits for questions."""
    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
    text = block.replace("\\\n", "").replace("300", str(STEPS))
    lines = [shlex.split(line)[1:] for line in text.splitlines()]
    return [[argument.replace("step-00000" + str(STEPS), f"step-{STEPS:08}") for argument in line] for line in lines]


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    base, tuned, evaluation, chat = commands("From pretraining to a model that answers")
    assert chat[:2] == ["chat", "runs/answers"]
    _, trained = (shardwise(*arguments, *SMALL, at=tmp_path).succeeded() for arguments in (base, tuned))
    training, looks = blocks("docs/fine-tuning.md")
    assert_shown(training, trained.out + within(*evaluation, at=tmp_path).out)
    checkpoint = tmp_path / "runs" / "answers" / "checkpoints" / f"step-{STEPS:08}"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    end = "<|endoftext|>\n"
    assert text == f"<|user|>\nWhat does a baker make?{end}<|assistant|>\nBread.{end}"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.eos_token_id == tokenizer.eos_token_id

    # Stopped, and resumed at another layout.
    wanted = [line["loss"] for line in metrics(tmp_path / "runs" / "answers", "step")]
    again = ["runs/again" if argument == "runs/answers" else argument for argument in tuned]
    shardwise(*again, *SMALL, "train.stop_after=6", at=tmp_path).succeeded()
    shardwise(*again, *SMALL, "parallel.tensor=2", "parallel.sequence=true", at=tmp_path).succeeded()
    found = [line["loss"] for line in metrics(tmp_path / "runs" / "again", "step")]
    assert len(found) == len(wanted) == STEPS
    assert all(abs(mine - theirs) <= 1e-5 * theirs for mine, theirs in zip(found, wanted, strict=True))

    inspection, dry_run = commands("Your own conversations")
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': MESSAGES})}\n" * 40)
    shown, checked = within(*inspection, at=tmp_path).out, within(*dry_run, at=tmp_path).out
    assert "⟦Bread.<|endoftext|>⟧" in shown
    assert "chat.jsonl: conversations, 1 file" in checked
    assert_shown(looks, shown + checked)
