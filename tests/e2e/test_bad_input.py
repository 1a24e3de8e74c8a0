"""Bad input: one clear text, exit code 2, and nothing started (faults 7 and 9 of the reference)."""

from pathlib import Path

import pytest

from tests.e2e.command import UNDER_TORCHRUN, miniature, shardwise, within

MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown key": (["train.global_batchs=8"], "train.global_batchs: unknown key; did you mean train.global_batch?"),
    "key of another section": (["train.lr=1.0e-3"], "train.lr: unknown key; did you mean optimizer.lr?"),
    "wrong type": (["train.steps=ten"], "train.steps ('ten') must be a whole number"),
    "text for a boolean": (["parallel.sequence='False'"], "parallel.sequence ('False') must be true or false"),
    "heads": (
        ["parallel.tensor=3"],
        "parallel.tensor (3) must divide model.num_attention_heads (4): valid degrees are 1, 2 and 4",
    ),
    "sequence length": (
        ["parallel.tensor=4", "parallel.sequence=true", "train.sequence_length=30"],
        "parallel.tensor (4) must divide train.sequence_length (30) with parallel.sequence: valid degrees are 1 and 2",
    ),
    "sequence too long": (
        ["train.sequence_length=64"],
        "train.sequence_length (64) must be at most model.max_position_embeddings (32)",
    ),
    "global batch": (
        ["train.global_batch=9", "--nproc", "2"],
        "train.global_batch (9) must be a multiple of train.micro_batch × data-parallel degree (2 × 2 = 4): "
        "nearest 8 or 12",
    ),
    "world size": (
        ["parallel.tensor=2", "--nproc", "3"],
        "the number of ranks (3) must be a multiple of parallel.tensor (2): nearest 2 or 4",
    ),
    "no data": (["data.path=nowhere.txt"], "data.path (nowhere.txt) does not exist in "),
    "empty data": (["data.path=empty.txt"], "empty.txt is empty: "),
    "data that is no text": (["data.path=binary.txt"], "binary.txt: byte 0 (0x80) is not UTF-8"),
    "broken json lines": (["data.path=broken.jsonl"], "broken.jsonl: line 2 is not JSON"),
    "too little data": (["data.path=short.txt"], "model.vocab_size (301) must be at most 257"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)) * 100)
    (tmp_path / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "short.txt").write_text("too short")
    miniature(tmp_path)
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_clear_text_and_nothing_starts(mistake: str, folder: Path) -> None:
    arguments, text = MISTAKES[mistake]
    said = within("train", "miniature.yaml", *arguments, at=folder)
    err = said.failed(2)
    assert err.count(text) == 1, f"expected once: {text}\nfound: {err}"
    assert err.count("shardwise: ") == 1
    assert said.out == ""
    assert not (folder / "runs").exists(), "a mistake must leave no run behind"


def test_an_unknown_recipe_names_the_nearest(folder: Path) -> None:
    assert "llama2-tiny" in within("train", "lama2-tiny", at=folder).failed(2)
    assert "no-such.yaml" in within("train", "no-such.yaml", at=folder).failed(2)


def test_all_mistakes_at_once(folder: Path) -> None:
    err = shardwise("train", "miniature.yaml", "train.steps=0", "optimizer.lrr=1", "data.split=x", at=folder).failed(2)
    assert err.startswith("shardwise: 3 errors\n")
    for key in ("train.steps (0)", "optimizer.lrr: unknown key", "data.split ('x')"):
        assert key in err


@pytest.mark.parametrize("word", ['"False"', "'true'", "0", "no!"])
def test_a_file_cannot_make_a_boolean_of_a_word(word: str, folder: Path) -> None:
    """The reference parsed "False" as true; here a word, or a number, is an error (fault 7)."""
    recipe = folder / "miniature.yaml"
    recipe.write_text(recipe.read_text() + f"parallel: {{tensor: 2, sequence: {word}}}\n")
    err = within("train", recipe, at=folder).failed(2)
    assert "parallel.sequence (" in err
    assert "must be true or false" in err


def test_a_file_that_is_no_recipe(folder: Path) -> None:
    (folder / "list.yaml").write_text("- 1\n- 2\n")
    (folder / "broken.yaml").write_text("train: {steps: 1\n")
    for name in ("list.yaml", "broken.yaml"):
        assert name in within("train", name, at=folder).failed(2)


def test_a_finished_run_is_not_overwritten(folder: Path) -> None:
    old = folder / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text("precious\n")
    assert "--run-dir (old)" in within("train", "miniature.yaml", "--run-dir", "old", at=folder).failed(2)
    assert (old / "metrics.jsonl").read_text() == "precious\n"


BY_ALL_RANKS: dict[str, tuple[list[str], str]] = {
    "configuration": (["train.global_batch=9"], "train.global_batch (9) must be a multiple of"),
    "data": (["data.path=empty.txt"], "empty.txt is empty: "),
}


@pytest.mark.parametrize("mistake", BY_ALL_RANKS)
def test_under_torchrun_the_text_appears_once(mistake: str, folder: Path) -> None:
    arguments, text = BY_ALL_RANKS[mistake]
    said = shardwise("train", "miniature.yaml", *arguments, at=folder, program=UNDER_TORCHRUN)
    assert said.code != 0
    assert said.err.count("shardwise: ") == 1, f"the text must appear once, not once a rank:\n{said.err}"
    assert said.err.count(text) == 1
    # The second: torchrun's own error where the other rank ends just as it is to be killed.
    assert "exitcode  : 2" in said.err or "ProcessLookupError" in said.err, "torchrun must see that the input is wrong"
    assert not (folder / "runs").exists()
