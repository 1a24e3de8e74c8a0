"""`shardwise data` as a user runs it: from text to a run, cut off by kill -9, on bad input; runs on what it made."""

import contextlib
import json
import shlex
import signal
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.tokens.tokenizer import train_tokenizer
from tests.e2e import processes
from tests.e2e.command import CASES, Outcome, imported_first, outcome, shardwise, start, within
from tests.e2e.test_pages import assert_shown, blocks
from tests.loopback_files import serve
from tests.unit.data import hdf5_shards
from tests.unit.data.prepare.jobs import WORDS, texts
from tests.unit.data.small_runs import json_lines

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT_WORDS = ["the", "ring", "of", "keys", "was", "lost", "in", "spring", "and", "a", "song", "went", "with", "it"]
TRAINING = (
    *("train", "gpt-tiny", "model.num_hidden_layers=2", "train.steps=2", "train.global_batch=4"),
    *("train.sequence_length=32", "log.tensorboard=false", "data.path=a"),
)
BAD = CASES["wrong data"]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.jsonl`, `b.txt`, and the vocabulary of BERT in which the words' ends go on with them."""
    folder = tmp_path_factory.mktemp("data")
    json_lines(folder / "a.jsonl", texts(200))
    (folder / "b.txt").write_text("\n".join(texts(200, seed=1)))
    (folder / "vocabulary").mkdir()
    pieces = [word[:2] for word in WORDS] + [f"##{word[2:]}" for word in WORDS if len(word) > 2] + ["a", "."]
    (folder / "vocabulary" / "vocab.txt").write_text("\n".join(dict.fromkeys(SPECIAL + pieces)) + "\n")
    return folder


def prepared(at: Path, *arguments: str | Path) -> Outcome:
    done = within("data", "prepare", *arguments, at=at)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def shards(at: Path) -> Path:
    (at / "shards").mkdir()
    for number in range(2):
        hdf5_shards.write(at / "shards" / f"shards_training_{number}.hdf5", hdf5_shards.arrays(100))
    return at / "shards"


SIGNAL_AT_A_MOMENT = """
import os, signal, sys
number, place, size = os.environ.get("SIGNAL_AT", "0 none 0").split()
watched = ["open", "os.rename"] if "prepare" in sys.argv else []  # not by the processes that work for it
def signal_once(event, _):
    if event in watched and os.path.exists(place) and os.path.getsize(place) > int(size):
        watched.clear()
        os.kill(os.getpid(), int(number))
if int(number):
    sys.addaudithook(signal_once)
"""
"""The process of the command sends itself a signal as it opens or renames the first file after a file has its size."""
IN_SEVERAL_PROCESSES = """
import shardwise.data.prepare.tokenizing as tokenizing
tokenizing.COMMIT_SECONDS = 0.0
tokenizing.BATCH_CHARACTERS = 20_000
tokenizing.SMALL_BYTES = 0
"""
"""What is done is durable at once."""
MOMENTS = ("state.json 0", "tokens.bin 200000", "tokens.idx 0")


@pytest.mark.slow
def test_what_sigkill_leaves_is_read_by_nobody_and_gone_on_with(at: Path, tmp_path: Path) -> None:
    """Killed at several moments, and then left alone: the same bytes as without."""
    json_lines(tmp_path / "large.jsonl", texts(200, seed=2) * 20)
    variables = imported_first(SIGNAL_AT_A_MOMENT + IN_SEVERAL_PROCESSES, tmp_path)
    variables["SHARDWISE_CACHE"] = str(tmp_path / "cache")
    given = ("data", "prepare", "large.jsonl", "--format", "megatron", "--tokenizer", at / "vocabulary")
    for moment in MOMENTS:
        killed = shardwise(*given, "part", at=tmp_path, **variables, SIGNAL_AT=f"9 .part.preparing/{moment}")
        assert killed.code == -signal.SIGKILL, killed
        assert not (tmp_path / "part.idx").exists()
    for name in ("part", "whole"):
        done = shardwise(*given, name, at=tmp_path, **variables)
        assert done.code == 0, done.err
        assert ("continuing after" in done.err) == (name == "part"), done.err
    whole, part = ({path.name: path.read_bytes() for path in files(tmp_path, name)} for name in ("whole", "part"))
    assert {name.replace("whole", "part") for name in whole} == set(part)
    assert [name for name in whole if whole[name] != part[name.replace("whole", "part")]] == []
    assert processes.wait_for(lambda: not working_in(tmp_path), 60), "a process outlives the preparation it worked for"


def files(at: Path, name: str) -> list[Path]:
    return [*at.glob(f"{name}.*"), *at.glob(f"{name}/*")]


def working_in(at: Path) -> list[str]:
    """Processes in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink() == at:
                found.append(place.name)
    return found


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(line: str, at: Path) -> None:
    (at / "raw.bin").write_bytes(b"\x05\x00\x20\x00")
    said = within("data", *line.split(), at=at).failed(2)
    assert BAD[line] in said, said
    assert len(said.splitlines()) == 1, said
    assert not [*at.glob("*out*"), *at.glob(".*out*")]


def test_what_the_documentation_shows(at: Path, tmp_path: Path) -> None:
    """docs/data.md: from text to runs, which are not started, and a look at what was made."""
    pytest.importorskip("datasets")
    json_lines(tmp_path / "wiki.jsonl", texts(400))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("\n".join(texts(400, seed=1)))
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    for name in ("gpt2", "bert-large-uncased"):
        (tmp_path / name).symlink_to(at / "vocabulary")
    shown = [block for block in blocks("docs/data.md") if block.heading in ("Preparing data", "Looking at data")]
    lines = [[line for line in block.code.replace("\\\n", "").splitlines() if line[:1].isalpha()] for block in shown]
    assert sum(map(len, lines)) > 9
    for block, of_block in zip(shown, lines, strict=True):
        printed = ""
        for line in of_block:
            _, *arguments = shlex.split(line)
            if arguments[0] == "train":
                arguments += ["model.vocab_size=64", "--dry-run"]
            done = within(*arguments, at=tmp_path)
            assert done.code == 0, f"{line}\n{done.err}"
            printed += done.out
        assert_shown(block, printed)


def test_inspect_fits_a_terminal(at: Path, shards: Path) -> None:
    prepared(at, "a.jsonl", "seen", "--format", "megatron", "--tokenizer", "vocabulary")
    for path, words in (
        ("seen", ("Megatron .bin and .idx", "documents  200\n", "uint16", "made of    a.jsonl, 200 documents")),
        ("seen.idx", ("Megatron .bin and .idx",)),
        ("shards", ("2 of 100 samples", "HDF5 shards")),
        ("shards/*_0.hdf5", ("HDF5 shards", "1 of ")),
        ("a.jsonl", ("text", "documents   200\n")),
        (".", ("files",)),
    ):
        if path == ".":
            (at / "texts").mkdir(exist_ok=True)
            for name in ("x", "y"):
                (at / "texts" / f"{name}.txt").write_text("some text")
            path = "texts"
        said = within("data", "inspect", path, at=at).succeeded().out
        assert all(word in said for word in words), said
        assert max(map(len, said.splitlines())) <= 80, said
    found = json.loads(within("data", "inspect", "seen", "--json", "--samples", "1", at=at).succeeded().out)
    assert (found["documents"], found["dtype"]) == (200, "uint16")
    assert len(found["samples"]) == 1
    assert sum(number for _, _, number in found["lengths"]["bins"]) == 200


def test_a_killed_fetch_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(40 << 20)
    target, part = tmp_path / "data.bin", tmp_path / ".data.bin.fetch"
    with serve(content) as site:
        site.waits_at = 24 << 20
        process = start("data", "fetch", site.url, "data.bin", at=tmp_path)
        assert processes.wait_for(lambda: part.exists() and part.stat().st_size > 8 << 20, 60)
        process.kill()
        outcome(process)
        site.goes_on.set()
        assert not target.exists()
        shardwise("data", "fetch", site.url, "data.bin", at=tmp_path).succeeded()
    assert target.read_bytes() == content
    assert not part.exists()


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of a tokenizer that lies beside it."""
    megatron = tmp_path_factory.mktemp("megatron")
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(TEXT_WORDS, 40)) for _ in range(200)]
    tokenizer = train_tokenizer(texts, 300, "test")
    tokenizer.save(megatron / "tokenizer")
    with IndexedWriter(megatron / "a", tokenizer.vocab_size) as writer:
        for text in texts:
            writer.add([*tokenizer.encode(text).tolist(), tokenizer.end_of_document_id])
    return megatron


def test_without_a_tokenizer_there_is_no_sample_and_one_sentence(megatron: Path) -> None:
    begun = shardwise(*TRAINING, "model.vocab_size=300", "--run-dir", "run", at=megatron).succeeded()
    assert "data: a: " in begun.out
    assert "200 documents" in begun.out
    assert "sample: none, as the data hold only tokens: data.tokenizer names" in begun.out.replace("\n", " ")
    assert not (megatron / "run/checkpoints/step-00000002/tokenizer.json").exists()
    asked = ("generate", "run", "--prompt", "the ring", "--max-tokens", "4")
    said = within(*asked, at=megatron).failed(2)
    assert "must hold the model's tokenizer (tokenizer.json, vocab.json with merges.txt, " in said
    assert "), and it holds none: name it by data.tokenizer" in said
    text = within(*asked, "data.tokenizer=tokenizer", at=megatron)
    assert text.code == 0, text.err
    assert text.out.startswith("the ring")


def test_a_token_beyond_the_vocabulary_is_named(megatron: Path) -> None:
    said = shardwise(*TRAINING, "model.vocab_size=200", "--run-dir", "small", at=megatron)
    assert ", must be in 0 … 199: set model.vocab_size to that of the tokenizer that made the data" in said.failed(2)
