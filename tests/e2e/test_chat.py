"""A conversation as a person holds it: over pipes and in a terminal, at several layouts."""

import subprocess

import pytest

from tests.e2e import processes
from tests.e2e.command import ALONE, Outcome, environment, shardwise, within
from tests.e2e.conftest import Trained


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
