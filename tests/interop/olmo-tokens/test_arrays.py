"""OLMo-core's and dolma's .npy, which have no header: the tokens and the dtype that OLMo-core's data set gives."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.data.open_data import prepare_data
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.interop.data_formats_texts import SHARED, documents
from tests.unit.data.small_runs import sized

LENGTH = 32


def ours(folder: Path, vocab_size: int, **keys: str) -> list[int]:
    config = sized(vocab_size, LENGTH, 0, path=f"{folder}/*.npy", split="1,0", **keys)
    return [int(token) for token in prepare_data(config, folder / "cache").tokens["train"][:]]


@pytest.mark.parametrize("vocab_size", [250, 256, 257, 50_280, 65_536, 65_537, 100_278])
def test_tokens_and_dtype_are_those_of_olmo_core(vocab_size: int, tmp_path: Path) -> None:
    from olmo_core.data import NumpyFSLDatasetConfig, TokenizerConfig

    named = SHARED / "tokenizers/gpt-neox-20b"
    if vocab_size == 50_280 and named.exists():  # OLMo's vocabulary is NeoX's, and more
        _, rows = [], [encoding.ids for encoding in Tokenizer.load(named).encodings(documents())]
    else:
        generator = np.random.default_rng(vocab_size)
        rows = [generator.integers(0, vocab_size, size).tolist() for size in generator.integers(1, 60, 5_000)]
    end = vocab_size - 1
    files = [list(chain.from_iterable([*row, end] for row in rows[part::2])) for part in range(2)]
    paths = [str(tmp_path / f"part-{number}-00000.npy") for number in range(2)]
    config = NumpyFSLDatasetConfig(
        paths=paths,
        sequence_length=LENGTH,
        tokenizer=TokenizerConfig(vocab_size=vocab_size, eos_token_id=end, pad_token_id=end),
        work_dir=str(tmp_path / "work"),
    )
    for path, tokens in zip(paths, files, strict=True):
        array = np.memmap(path, dtype=config.get_dtype(), mode="w+", shape=(len(tokens),))
        array[:] = tokens
        array.flush()
    theirs = config.build()
    theirs.prepare()
    read = ours(tmp_path, vocab_size)
    assert read == [*files[0], *files[1]]
    # It cuts each file into samples by itself, and leaves out what is over.
    cut = list(chain.from_iterable(tokens[: len(tokens) // LENGTH * LENGTH] for tokens in files))
    assert [token for item in theirs for token in item["input_ids"].tolist()] == cut
    assert ours(tmp_path, vocab_size, token_dtype=config.get_dtype().__name__) == read


def test_a_padded_vocabulary_is_told_by_the_bytes(tmp_path: Path) -> None:
    """A model of more than 2^16 tokens for a tokenizer of fewer: the tokenizer or the key says the dtype."""
    np.array([5, 70, 3000, 60_000] * 500, "<u2").tofile(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"a\.npy: token 0 \(4587525\) must be in 0 … 66047"):
        ours(tmp_path, 66_048)
    assert ours(tmp_path, 66_048, token_dtype="uint16") == [5, 70, 3000, 60_000] * 500
    np.array([5, 70, 3000, 60_000] * 500, "<u4").tofile(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"a\.npy look like ids of uint32, and a vocabulary of 60001 would be uint16"):
        ours(tmp_path, 60_001)
