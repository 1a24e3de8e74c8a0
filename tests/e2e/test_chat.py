"""A conversation as a person holds it: over pipes and in a terminal, at several layouts."""

import os
import pty
import signal
import subprocess

import pytest

from tests.e2e import processes
from tests.e2e.command import ALONE, Outcome, environment, shardwise
from tests.e2e.conftest import Trained


def chat(trained: Trained, *arguments: str, lines: str) -> Outcome:
    done = subprocess.run(
        [*ALONE, *arguments],
        input=lines,
        cwd=trained.at,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_a_text_is_continued_as_generate_continues_it(trained: Trained) -> None:
    run = str(trained.run)
    expected = shardwise(
        "generate", run, "--prompt", "The ring", "--max-tokens", "6", "--temperature", "0", at=trained.at
    )
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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["chat", "missing"], "shardwise: CHECKPOINT (missing)"),
        (["chat", "RUN", "--temperature", "-1"], "shardwise: --temperature (-1.0) must be at least 0"),
        (["chat", "RUN", "--nproc", "2"], "shardwise: --nproc (2) must be parallel.tensor (1)"),
        (["generate", "RUN", "--interactive", "--prompt", "a"], "shardwise: --prompt must not go with --interactive"),
    ],
)
def test_bad_input(trained: Trained, arguments: list[str], problem: str) -> None:
    done = chat(trained, *(str(trained.run) if word == "RUN" else word for word in arguments), lines="x\n")
    assert done.code == 2
    assert not done.out
    assert problem in done.err.removeprefix("loading")
    assert "Traceback" not in done.err


def test_ctrl_c_stops_an_answer_and_not_the_conversation(trained: Trained) -> None:
    """A model of the miniature reads 32 tokens: without a stop, an answer has 16."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*ALONE, "chat", str(trained.run), "--stats"],
        cwd=trained.at, env=environment(), stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    shown = ""

    def until(text: str, since: int = 0) -> None:
        nonlocal shown
        while text not in shown[since:]:
            shown += os.read(controller, 4096).decode(errors="replace")

    until("> ")
    os.write(controller, b"The ring\n")
    process.send_signal(signal.SIGINT)
    until("> ", len(shown))
    os.write(controller, b"/quit\n")
    assert process.wait(60) == 0
    os.close(controller)


def test_the_terminal_and_the_model_end_together(trained: Trained) -> None:
    command = [*ALONE, "chat", str(trained.run)]
    with subprocess.Popen(
        command, cwd=trained.at, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("The ring\n")
        process.stdin.flush()
        process.stdout.read(1)
        (model,) = processes.descendants(process.pid)
        process.kill()
    assert processes.wait_for(lambda: not processes.alive(model), 60)
