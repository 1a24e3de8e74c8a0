"""Evaluation and generation as a user runs them: the page's commands, bad input, other people's folders."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise_use.cli import evaluate, generate
from tests.arch.source import ROOT
from tests.e2e import processes
from tests.e2e.command import ALONE, UNDER_TORCHRUN, Outcome, environment, shardwise, within
from tests.e2e.conftest import Trained
from tests.hugging_face import save

PAGE = (ROOT / "docs" / "evaluate-and-generate.md").read_text(encoding="utf-8")
TEXT = "The ring of keys — naïve, 键 — was lost in spring, and a song went with it.\n" * 4


def answer(outcome: Outcome) -> dict[str, Any]:
    """The one JSON object that was printed."""
    assert outcome.code == 0, outcome.err
    (line,) = outcome.out.splitlines()
    facts: dict[str, Any] = json.loads(line)
    return facts


def test_the_page_names_every_way_to_cut_a_model() -> None:
    keys = {key for key in (*evaluate.KEYS, *generate.KEYS) if key.startswith("parallel.")}
    assert "parallel.pipeline" in keys
    assert [key for key in sorted(keys) if key not in PAGE] == []


@pytest.mark.slow
def test_inside_torchrun_they_join(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(TEXT[:60])
    given = ("evaluate", trained.run, "--json", "data.path=own.txt")
    one, two = (answer(shardwise(*given, at=tmp_path, **options)) for options in ({}, {"program": UNDER_TORCHRUN}))
    assert two["layout"]["data"] == 2
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    asked = ("generate", trained.run, "parallel.tensor=2", "--prompt", "The", "--max-tokens", "3", "--json")
    assert len(answer(shardwise(*asked, at=tmp_path, program=UNDER_TORCHRUN))["tokens"]) == 3


@pytest.mark.slow
def test_a_run_is_evaluated_alike_at_any_layout(trained: Trained, tmp_path: Path) -> None:
    whole = answer(within("evaluate", trained.run, "--json", at=tmp_path))
    cut = answer(shardwise("evaluate", trained.run, "--json", "--nproc", "4", "parallel.context=2", at=tmp_path))
    assert cut["layout"] == {"ranks": 4, "tensor": 1, "sequence": False, "pipeline": 1, "data": 2, "context": 2}
    assert cut["counted"] == whole["counted"]
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_a_run_goes_on_with_a_text_alike_at_any_layout(trained: Trained, tmp_path: Path) -> None:
    options = ("--prompt", "The ring", "--max-tokens", "8", "--json")
    alone = answer(within("generate", trained.run, *options, at=tmp_path))
    cut = answer(shardwise("generate", trained.run, *options, "parallel.tensor=2", at=tmp_path))
    assert alone["text"] == cut["text"]
    assert len(alone["tokens"]) == 8


def test_a_run_means_its_newest_intact_checkpoint(trained: Trained, tmp_path: Path) -> None:
    at = tmp_path
    (at / "own.txt").write_text(TEXT[:60])
    run = tmp_path / "run" / "checkpoints"
    run.parent.mkdir()
    assert "holds no checkpoint" not in within("evaluate", run.parent, at=at).failed(2)
    run.mkdir()
    assert "holds no checkpoint yet" in within("evaluate", run.parent, at=at).failed(2)
    intact = trained.run / "checkpoints/step-00000004"
    shutil.copytree(intact, run / "step-00000004")
    shutil.copytree(intact, run / "step-00000030")
    (run / "step-00000030" / "manifest.json").unlink()
    done = within("evaluate", run.parent, "data.path=own.txt", "--json", at=at)
    assert answer(done)["model"].endswith("step-00000004")
    assert "step-00000030 has no manifest.json" in done.err


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of transformers' models with tokenizers of their own, and a text."""
    at = tmp_path_factory.mktemp("foreign")
    (at / "own.txt").write_text(TEXT)
    (at / "short.txt").write_text("x")
    for case in ("gpt", "bert"):
        save(case, at / case, vocab_size=270)
        train_tokenizer([TEXT], 270, "test", pairs=case == "bert").save(at / case)
    save("gpt", at / "small")
    train_tokenizer([TEXT], 270, "test").save(at / "small")
    save("gpt", at / "mute")
    (at / "empty").mkdir()
    (at / "latin.txt").write_bytes(b"na\xefve")
    weights = shutil.copytree(at / "gpt", at / "diverged") / "model.safetensors"
    held = load_file(weights)
    held["transformer.ln_f.bias"][:3] = torch.nan
    save_file(held, weights, {"format": "pt"})
    return at


def test_a_hugging_face_folder(foreign: Path) -> None:
    facts = answer(within("evaluate", "gpt", "data.path=own.txt", "--json", at=foreign))
    assert facts["part"] == "all"
    assert facts["sequence_length"] == 24
    assert facts["perplexity"] > 1
    both = answer(shardwise("evaluate", "bert", "data.path=own.txt", "--json", "--nproc", "2", at=foreign))
    assert both["loss"] == pytest.approx(sum(both["losses"].values()))
    assert 0 <= both["mlm_accuracy"] <= 1
    assert "perplexity" not in both


NOT_FINITE = "must have finite weights, and it has values that are NaN or infinite in transformer.ln_f.bias"


WRONG: dict[str, tuple[str, str]] = {
    "weights that are NaN": ("evaluate diverged data.path=own.txt", f"diverged) {NOT_FINITE}"),
    "no such folder": ("evaluate ./nowhere", "CHECKPOINT (./nowhere) must be a folder with weights"),
    "another key": ("evaluate gpt optimizer.lr=1", "optimizer.lr: evaluate reads data.*"),
    "no tokenizer": ("generate mute --prompt a", "mute must hold the model's tokenizer (tokenizer.json, vocab.json"),
    "ranks beside a copy": (
        "generate gpt --prompt a parallel.tensor=2 --nproc 3",
        "--nproc (3) must be parallel.tensor (2): ",
    ),
    "a long prompt": ("generate gpt --prompt-file own.txt", "must be at most model.max_position_embeddings (24)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_told_in_a_sentence(case: str, foreign: Path) -> None:
    line, text = WRONG[case]
    said = within(*shlex.split(line), at=foreign, SHARDWISE_CACHE=str(foreign / "cache"))
    complaint = said.failed(2)
    assert said.out == ""
    assert text in complaint
    assert "checkpoint.load" not in complaint, "the user gave an argument, not that key"


def test_what_a_rank_meets_is_told_once(foreign: Path) -> None:
    """Weights that do not fit: found by every rank, said by the launcher, nothing left behind."""
    damaged = foreign / "damaged"
    shutil.copytree(foreign / "gpt", damaged)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    told = shardwise("generate", damaged, "--prompt", "a", "parallel.tensor=2", at=foreign).failed(2)
    assert told.count("lacks transformer.h.2") > 0
    assert "CHECKPOINT (" in told


def chat(trained: Trained, *arguments: str, lines: str) -> Outcome:
    typed = trained.at / "lines.txt"
    typed.write_text(lines)
    return shardwise(*arguments, at=trained.at, stdin=typed)


def test_a_text_is_continued_as_generate_continues_it(trained: Trained) -> None:
    run = str(trained.run)
    expected = within("generate", run, "--prompt", "The ring", "--max-tokens", "6", "--temperature", "0", at=trained.at)
    greedy = ("--max-tokens", "6", "--temperature", "0")
    once = chat(trained, "chat", run, *greedy, lines="The ring\n")
    assert once.code == 0, once.err
    assert f"The ring{once.out}" == expected.out
    cut = chat(
        trained,
        "generate",
        run,
        "--interactive",
        *greedy,
        "parallel.tensor=2",
        lines="The ring\n\n/reset\n\nThe ring\n",
    )
    # The second answer continues the first one. After the reset an empty line is refused, and the last text is new.
    assert "there is no text yet" in cut.err
    assert cut.out.startswith(once.out)
    assert cut.out.endswith(once.out)
    assert len(cut.out) > 2 * len(once.out)


def test_commands_and_refusals(trained: Trained) -> None:
    lines = "\n/temperature warm\n/temperature 0\n/help\n/reset\nThe ring\n/quit\nnever read\n"
    done = chat(trained, "chat", str(trained.run), "--max-tokens", "3", "--stats", lines=lines)
    assert done.code == 0
    loading, nothing, wrong, commands, stats = done.err.splitlines()
    assert loading == f"loading {trained.run} …"
    assert nothing == "there is no text yet that could be continued: write some"
    assert wrong == "/temperature (warm) must be a number of at least 0, such as /temperature 0.7"
    assert commands.startswith("/reset begins anew")
    assert stats.startswith("3 tokens; the first after 0.")


@pytest.mark.slow
def test_the_terminal_and_the_model_end_together(trained: Trained) -> None:
    command = [*ALONE, "chat", str(trained.run)]
    with subprocess.Popen(
        command, cwd=trained.at, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write("The ring\n")
        process.stdin.flush()
        process.stdout.read(1)
        (model,) = processes.descendants(process.pid)
        process.kill()
    assert processes.wait_for(lambda: not processes.alive(model), 60)
