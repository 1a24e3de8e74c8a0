"""The commands of the documentation at a size for tests.

bash runs the blocks of a page as they are, with a `Reader`'s commands in place of those of the same names; all else
(tail, grep, ls, …) is what it is:

    shardwise train   a dry run checks the command at its own size and number of ranks; then one process trains a model
                      of 2 layers for two steps, or all of a tiny recipe where the page shows the end
    torchrun          as `shardwise train`; a script has its ranks
    python -m         a script of scripts/ is looked for
    tensorboard       its files are looked for
    make              -n: it says what it would do
    ssh               its options are checked
"""

import gzip
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.distributed.run import get_args_parser

from shardwise.data import train_tokenizer
from tests.arch.source import ROOT
from tests.e2e.command import Outcome, outcome, start
from tests.unit.data import hdf5_shards

_MODEL = ["model.hidden_size=64", "model.intermediate_size=128", "model.num_attention_heads=4"]
_TRAIN = ["train.global_batch=8", "train.micro_batch=2", "train.sequence_length=64", "train.stop_after=2"]
_LOG = ["log.sample_tokens=4", "log.tensorboard=false"]
_SMALL = ["model.vocab_size=512", "model.num_hidden_layers=2", "precision.mode=float32", *_LOG, *_TRAIN]
_GPT = [*_SMALL, *_MODEL]
_LLAMA = [*_GPT, "model.num_key_value_heads=4"]
_BERT = [*_GPT, "data.max_predictions=10"]
RECIPES = {
    # its page opens TensorBoard, as GPT-3's does
    "llama2-7b": [*_LLAMA, "log.tensorboard=true"],
    "gpt3-23b": [*_GPT, "model.num_hidden_layers=8", "log.tensorboard=true"],
    **dict.fromkeys(("quickstart", "llama-small", "my.yaml"), _LLAMA),
    **dict.fromkeys(("gpt-neox-20b", "gpt-neox-6.9b", "gpt2"), _GPT),
    **dict.fromkeys(("bert-large", "bert-large-phase2"), _BERT),
    "docs/tutorials/bert-mini.yaml": [*_BERT, "data.dataset=tiny"],
    # an odd number of heads, as GPT-2 XL's
    "gpt2-xl": [*_SMALL, "model.hidden_size=80", "model.intermediate_size=320", "model.num_attention_heads=5"],
    "gpt-tiny": ["model.num_hidden_layers=2", *_LOG],
    "gpt3-tiny": ["log.sample_tokens=4"],
    "my-model": ["train.stop_after=2", "log.sample_tokens=4"],
    "olmoe-tiny": ["train.steps=4", "log.sample_tokens=4"],
    **dict.fromkeys(("llama2-tiny", "llama3-tiny", "gpt-neox-tiny", "bert-tiny", "gpt2-xl-tiny"), _LOG),
    "glm4-moe-tiny": _LOG,
}
ALONE = [
    *("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=1"),
    *("train.stop_after=2", "train.recompute=none"),  # the first recompute of a process imports torch's compiler
]
COMMANDS = ("shardwise", "torchrun", "python", "tensorboard", "make", "ssh")
_SHELL_COMMAND = """\
#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\0' "$#" {name} "$@" >&3
read -r code folder <&3
cat "$folder/out"
cat "$folder/err" >&2
exit "$code"
"""


@dataclass
class Reader:
    """Whoever follows a page in the folder `at`; the public methods are the commands of their names.

    Attributes:
        whole: a training of a tiny recipe takes all steps, as the page shows what it prints at its end.
    """

    at: Path
    whole: bool = False

    def shardwise(self, arguments: list[str]) -> Outcome:
        if arguments[0] == "train" and "--dry-run" not in arguments:
            return self._train(arguments)
        if arguments[0] in ("evaluate", "generate"):
            arguments = _without_ranks(arguments)
            arguments += ["data.path=own.txt"] if "train" in arguments else []  # that part of the built-in text is long
        # The input of a conversation, which is empty, ends it.
        return self._run("-m", "shardwise", *self._newest(arguments))

    def torchrun(self, arguments: list[str]) -> Outcome:
        options = get_args_parser().parse_args(arguments)
        script, given = options.training_script, options.training_script_args
        if script == "shardwise":
            return self._train(given, int(options.nnodes.rpartition(":")[2]) * int(options.nproc_per_node))
        agent = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc_per_node}")
        return self._run(*agent, script, *given)

    def python(self, arguments: list[str]) -> Outcome:
        if arguments[0] != "-m":
            return self._run(*arguments)
        return _found(importlib.util.find_spec(arguments[1]), arguments[1])

    def tensorboard(self, arguments: list[str]) -> Outcome:
        (folder,) = arguments[1:]
        return _found(next((self.at / folder).rglob("events.*"), None), "files of events")

    def make(self, arguments: list[str]) -> Outcome:
        command = ["make", "-C", str(ROOT), "-n", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and arguments == ["train"]:
            return self._train(["train", "quickstart"])
        return Outcome(done.returncode, done.stdout, done.stderr)

    def ssh(self, arguments: list[str]) -> Outcome:
        return _found(re.fullmatch(r"-L \d+:[\w.]+:\d+ \S+", " ".join(arguments)), "tunnel to a port")

    # ---- how

    def _train(self, arguments: list[str], world: int | None = None) -> Outcome:
        ranks = [] if world is None else ["--nproc", str(world)]
        # The weights and the runs of this folder are of a small model; the training loads and continues them.
        others = ["checkpoint.load=null", "--run-dir", "unused"]
        checked = self._run("-m", "shardwise", *self._newest(arguments), *others, *ranks, "--dry-run")
        if checked.code:
            return checked
        alone = [key for key in ALONE if not (self.whole and key.startswith("train.stop_after"))]
        return self._run("-m", "shardwise", *_without_ranks(self._small(arguments)), *alone)

    def _small(self, arguments: list[str]) -> list[str]:
        """The arguments of a training, and those that make it small."""
        large = re.compile(r"data\.(dataset=(?!stories)|config=)")
        found = [argument for argument in self._newest(arguments) if not large.match(argument)]
        recipe = next(argument for argument in found if argument in RECIPES)
        if not re.search(r"data\.(path|blend|dataset)=", " ".join(found)):
            found = [*(argument for argument in found if not argument.startswith("data.split=")), "data.dataset=tiny"]
        found += RECIPES[recipe]
        if any(argument.startswith("data.path=bert_pretrain") for argument in found):
            # Shards fix the size of samples: the short ones do for phase 2 as well.
            found = [argument.replace("seqlen512", "seqlen128") for argument in found]
            found += ["train.sequence_length=128", "data.max_predictions=20"]
        return found

    def _newest(self, arguments: list[str]) -> list[str]:
        """With the newest checkpoint of a run in place of the one that its last step would have."""

        def newest(found: re.Match[str]) -> str:
            names = sorted(path.name for path in (self.at / found[1]).glob("step-????????"))
            return f"{found[1]}/{names[-1]}" if names else found[0]

        return [re.sub(r"([^\s=]+/checkpoints)/step-\d{8}", newest, argument) for argument in arguments]

    def _run(self, *arguments: str) -> Outcome:
        return outcome(start(at=self.at, program=(sys.executable, *arguments), HF_HUB_OFFLINE="1"))


@contextmanager
def serve(reader: Reader) -> Iterator[Path]:
    """A folder with commands for bash, which this process runs as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        for name in COMMANDS:
            command = Path(folder, name)
            command.write_text(_SHELL_COMMAND.format(port=listener.getsockname()[1], name=name))
            command.chmod(0o755)
        thread = threading.Thread(target=_answer, args=(listener, reader, Path(folder)), daemon=True)
        thread.start()
        try:
            yield Path(folder)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answer(listener: socket.socket, reader: Reader, folder: Path) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener was shut down
            return
        with connection, connection.makefile("rw") as stream:
            words: list[str] = []
            while not words or len(words) < int(words[0]) + 2:
                words.append("".join(iter(lambda: stream.read(1) or "\0", "\0")))
            try:
                done = getattr(reader, words[1])(words[2:])
            except Exception:  # noqa: BLE001  bash shows it, and its caller fails
                done = Outcome(1, "", f"{shlex.join(words[1:])}\n{traceback.format_exc()}")
            for name, text in (("out", done.out), ("err", done.err)):
                (folder / name).write_text(text, encoding="utf-8")
            stream.write(f"{done.code} {folder}\n")


def _without_ranks(arguments: list[str]) -> list[str]:
    """Arguments of a command that runs in one process whatever its layout is."""
    text = re.sub(r"(^|\0)(--nproc\0\d+|parallel\.[^\0]*)", "", "\0".join(arguments))
    return text.split("\0")


def _found(thing: object, what: str) -> Outcome:
    return Outcome(1, "", f"there is no {what}\n") if thing is None else Outcome(0, "", "")


def sentences(what: str, number: int) -> list[str]:
    return [f"{what} {each} tells of the number {each * each}. " * 20 for each in range(number)]


def write_lines(path: Path, field: str, texts: list[str]) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({field: text}) + "\n" for text in texts)


def write_parquet(path: Path, field: str, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({field: texts}), path)


def text_files(at: Path) -> None:
    """`texts`: JSON lines and parquet with the field `body`."""
    (at / "texts").mkdir()
    texts = sentences("Document", 400)
    write_lines(at / "texts/0.jsonl.gz", "body", texts[:200])
    write_parquet(at / "texts/1.parquet", "body", texts[200:])


def saved_datasets(at: Path) -> None:
    """`stories` with two splits of text, and `blocks` of tokens, as `save_to_disk` writes them."""
    import datasets

    stories = datasets.Dataset.from_dict({"text": sentences("Story", 400)}).train_test_split(0.05, seed=0)
    datasets.disable_progress_bars()
    datasets.DatasetDict(train=stories["train"], validation=stories["test"]).save_to_disk(at / "stories")
    blocks = [[(number * place) % 512 for place in range(128)] for number in range(400)]
    datasets.Dataset.from_dict({"input_ids": blocks, "labels": blocks}).save_to_disk(at / "blocks")


def stream(at: Path) -> None:
    """`lines` of two kinds of files, and a `tokenizer`."""
    (at / "lines").mkdir()
    texts = sentences("Line", 600)
    for number in range(2):
        write_lines(at / f"lines/{number}.jsonl.gz", "text", texts[number::3])
    write_parquet(at / "lines/2.parquet", "text", texts[2::3])
    train_tokenizer(texts, 400, "the lines").save(at / "tokenizer")


def bert_shards(at: Path) -> None:
    """`shards` of three sizes, with samples of 64 tokens."""
    (at / "shards").mkdir()
    for number, rows in enumerate((50, 20, 30)):
        shard = hdf5_shards.arrays(rows, 100 * number, length=64, predictions=4, vocab_size=512)
        hdf5_shards.write(at / f"shards/wiki_training_{number}.hdf5", shard)


def megatrons_files(at: Path) -> None:
    """`wiki` and `books`, as the section's program writes them."""
    page = (ROOT / "docs/data-formats.md").read_text(encoding="utf-8")
    program = re.search(r"^```python\n(# write.py: .*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=at, capture_output=True, text=True, check=True)
    assert done.stdout == "201 [  1   2   3   4   5 511] [2 4]\n"


def token_files(at: Path) -> None:
    """`rows.jsonl` without ends of documents, and two flat files with them."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 511, size).tolist() for size in generator.integers(20, 200, 400)]
    (at / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in documents))
    (at / "flat").mkdir()
    for number in range(2):
        tokens = [token for row in documents[number::2] for token in [*row, 511]]
        np.array(tokens, dtype=np.uint16).tofile(at / f"flat/part-{number}.npy")


PREPARED = {
    "docs/data-formats.md": (text_files, saved_datasets, stream, megatrons_files, bert_shards),
    "docs/token-files.md": (token_files,),
}
