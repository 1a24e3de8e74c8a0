"""A sparse model of transformers, as a user evaluates it and lets it write, on ranks that divide its experts."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.dist.test_expert_files import written
from tests.e2e.command import shardwise, within

TEXT = "The ring of keys was lost in spring, and a song went with it.\n" * 4
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("--prompt", "The ring", "--max-tokens", "8"),
    "evaluate": ("data.path=own.txt", "train.sequence_length=32"),
}
MEASURED = ("seconds", "tokens_per_second", "layout")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("sparse")
    written("glm4_moe", at / "glm", fused=True, vocab_size=270)
    train_tokenizer([TEXT], 270, "test").save(at / "glm")
    (at / "own.txt").write_text(TEXT)
    return at


def facts(out: str) -> dict[str, Any]:
    read = json.loads(out)
    return {key: value for key, value in read.items() if not key.endswith(MEASURED)}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_that_divide_experts_say_what_one_process_does(command: str, place: Path) -> None:
    given = (command, "glm", *COMMANDS[command], "--json")
    alone = within(*given, at=place).succeeded()
    divided = shardwise(*given, "parallel.expert=2", at=place).succeeded()
    found, wanted = facts(divided.out), facts(alone.out)
    for key, value in wanted.items():
        assert found[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


def test_a_number_of_ranks_that_has_no_copy_is_one_sentence(place: Path) -> None:
    refused = within("generate", "glm", *COMMANDS["generate"], "parallel.expert=2", "--nproc", "3", at=place)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        "shardwise: --nproc (3) must be parallel.tensor (1) × parallel.expert (2): one copy of the model writes one "
        "text\n"
    )
