"""Small data of a reader of docs/data-formats.md and docs/token-files.md: a function for each section that has data."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from shardwise.data import train_tokenizer
from tests.arch.source import ROOT
from tests.unit.data import hdf5_shards


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
