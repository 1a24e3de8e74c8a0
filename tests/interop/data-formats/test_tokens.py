"""The tokens of five thousand documents as their makers' own programs write and read them, and as a run reads them."""

import base64
import hashlib
import io
import json
import re
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.base.errors import DataError
from shardwise.data.open_data import prepare_data
from shardwise.data.tokens import ranked_vocabularies
from shardwise.data.tokens.tokenizer import Tokenizer
from tests.interop.data_formats_texts import NUMBER, SHARED, documents
from tests.unit.data.small_runs import sized

VOCABULARY = 131_072
LLM_C = {"gpt-2": (20240520, 1, np.uint16, 50256), "llama-3": (20240801, 7, np.uint32, 128000)}
"""llm.c's header of each model, as its `write_datafile` writes it (dev/data/data_common.py), and the separator."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return documents()


@pytest.fixture(scope="module", params=["small", "large"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of less, or of more, than 2^16 tokens: NeoX's, and Mistral's tekken of 131,072."""
    import mistral_common

    source = SHARED / "tokenizers/gpt-neox-20b"
    if request.param == "large":
        source = Path(mistral_common.__file__).parent / "data/tekken_240911.json"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    folder = tmp_path_factory.mktemp(request.param)
    Tokenizer.load(source).save(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def rows(texts: list[str], tokenizer: Path) -> list[list[int]]:
    """The tokens of each document by the library tokenizers, without an end."""
    from tokenizers import Tokenizer as Library

    encoded = Library.from_file(str(tokenizer)).encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encoded]


def read(tmp_path: Path, path: Path | str, **keys: Any) -> list[int]:
    """The tokens of all of the data, as a run reads them: the parts one after another."""
    config = sized(VOCABULARY, 32, 0, path=str(path), **{"split": "1,0", **keys})
    data = prepare_data(config, tmp_path / "cache")
    return [int(token) for part in ("train", "eval", "test") for token in data.tokens[part][:]]


def joined(rows: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(rows))


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_size_list", "json", "gzip", "folder"])
def test_rows_that_datasets_wrote(kind: str, texts: list[str], rows: list[list[int]], tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    if kind == "fixed_size_list":
        tokens = joined(rows)
        rows = [tokens[at : at + 128] for at in range(0, len(tokens) - 127, 128)]
    table = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    inner = datasets.Value("int32")
    features = {"large_list": datasets.LargeList(inner), "fixed_size_list": datasets.List(inner, length=128)}
    table = table.cast_column("input_ids", features.get(kind, datasets.List(inner)))
    if kind in ("json", "gzip"):
        path = tmp_path / ("rows.jsonl" if kind == "json" else "rows.json.gz")
        table.to_json(path, compression="infer")
        reader = "json"
    elif kind == "folder":
        path = tmp_path / "rows"
        path.mkdir()
        for number in range(3):
            table.shard(3, number, contiguous=True).to_parquet(path / f"train-{number:05d}-of-00003.parquet")
        reader = "parquet"
    else:
        path = tmp_path / "rows.parquet"
        table.to_parquet(path)
        reader = "parquet"
    files = sorted(map(str, path.iterdir())) if path.is_dir() else str(path)
    theirs = datasets.load_dataset(reader, data_files=files, split="train", cache_dir=str(tmp_path / "hf"))
    assert read(tmp_path, path) == joined(theirs["input_ids"]) == joined(rows)
    assert read(tmp_path, path, text_key="attention_mask") == [1] * len(joined(rows))


@pytest.mark.parametrize("eos", [None, "end"])
def test_datatrove(eos: str | None, texts: list[str], tokenizer: Path, rows: list[list[int]], tmp_path: Path) -> None:
    """As written, shuffled and merged; windows and ends as datatrove's own readers give them."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger
    from datatrove.pipeline.tokens.merger import load_doc_ends
    from datatrove.utils.dataset import DatatroveFolderDataset

    ours = Tokenizer.load(tokenizer)
    end = ours.end_of_document
    width = 4 if ours.vocab_size > 1 << 16 else 2
    options = {"tokenizer_name_or_path": str(tokenizer), "eos_token": end if eos else None, "seed": 5}
    for rank in range(3):  # the last one has no documents, and leaves an empty file
        given = [Document(text, str(number)) for number, text in enumerate(texts[rank::2] if rank < 2 else ())]
        plain = DocumentTokenizer(str(tmp_path / "plain"), shuffle_documents=False, **options)
        for _ in plain.run(given, rank, 3) or ():
            pass
        shuffled = DocumentTokenizer(str(tmp_path / "shuffled"), max_tokens_per_file=100_000, **options)
        for _ in shuffled.run(given, rank, 3) or ():
            pass
    merger = DocumentTokenizerMerger(
        str(tmp_path / "shuffled"), str(tmp_path / "merged"), "all", progress=False, seed=1
    )
    merger.run()
    ended = [[*row, *([ours.end_of_document_id] if eos else [])] for row in rows]
    assert read(tmp_path, tmp_path / "plain", tokenizer=str(tokenizer)) == joined([*ended[0::2], *ended[1::2]])
    for name in ("plain", "shuffled", "merged"):
        folder = tmp_path / name
        theirs = DatatroveFolderDataset(str(folder), 15, filename_pattern="*.ds", token_size=width)
        windows: list[int] = []
        found = []
        for file in filter(lambda file: file.stat().st_size, sorted(folder.glob("*.ds"))):
            tokens = read(tmp_path, file)
            cuts = [0, *load_doc_ends(io.BytesIO(Path(f"{file}.index").read_bytes())).tolist()]
            found += [tokens[start:stop] for start, stop in pairwise(cuts)]
            windows += tokens[: len(tokens) // 16 * 16]
        assert [token for item in theirs for token in item["input_ids"].tolist()] == windows
        assert sorted(found) == sorted(ended)
        assert read(tmp_path, folder) == read(tmp_path, folder, tokenizer=str(tokenizer)) == joined(found)
        config = sized(VOCABULARY, 512, 0, path=str(folder), packing="best_fit", split="90,10")
        data = prepare_data(config, tmp_path / "cache")
        facts = data.packed["train"].facts + data.packed["eval"].facts
        assert facts.documents == NUMBER, "the index says where documents end"
    other = tmp_path / "other"
    from shardwise.data.tokens.tokenizer import train_tokenizer

    train_tokenizer(["some other text, of few words"] * 9, 270, "text").save(other)
    with pytest.raises(
        DataError, match=r"data\.tokenizer \(.*other, .*\) must be the tokenizer that .*\.metadata names"
    ):
        read(tmp_path, tmp_path / "plain", tokenizer=str(other))


@pytest.mark.parametrize("model", LLM_C)
def test_shards_of_llm_c(model: str, rows: list[list[int]], tmp_path: Path) -> None:
    magic, version, dtype, end = LLM_C[model]
    if max(map(max, rows)) > np.iinfo(dtype).max:
        pytest.skip("this model has no such ids")
    ended = [[end, *row] for row in rows]
    for number in range(3):
        header = np.zeros(256, dtype=np.int32)
        tokens = np.array(joined(ended[number::3]), dtype=dtype)
        header[:3] = magic, version, len(tokens)
        (tmp_path / f"fineweb_train_{number:06d}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    theirs = []
    for file in sorted(tmp_path.glob("*.bin")):  # as its loaders skip the header
        theirs += np.fromfile(file, dtype, offset=1024).tolist()
    assert (
        read(tmp_path, tmp_path / "fineweb_train_*.bin") == theirs == joined([*ended[0::3], *ended[1::3], *ended[2::3]])
    )


def test_arrays_of_numpy(rows: list[list[int]], tmp_path: Path) -> None:
    for dtype in ("<u4", ">i4", "<i8", "<u8"):
        np.save(tmp_path / "a.npy", np.array(joined(rows), dtype))
        assert read(tmp_path, tmp_path / "a.npy") == np.load(tmp_path / "a.npy").tolist() == joined(rows)


ODD = [
    "",
    " ",
    "\n\n  \r\n\t x",
    "I'll he'S THEY'RE don't",
    "١٢٣ 12345678 Ⅷ½",
    "naïve café e\u0301 ǅ ﬁ",
    "日本語のテキスト、그리고 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧\ufeff\u200b\u00a0x\u3000y",
    "a" * 300,
    "def f(x):\n    return x**2  # done\n\n\n\tif  x:",
    "https://example.org/a/b?c=d&e=[f]",
    "\x00\x7f\x80",
]
TEXTS = [*documents(), *ODD]


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken_is_that_of_mistral_common(name: str, tmp_path: Path) -> None:
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from transformers import AutoTokenizer

    file = Path(mistral_common.__file__).parent / "data" / name
    theirs = Tekkenizer.from_file(file)
    ours = Tokenizer.load(file)
    expected = [theirs.encode(text, bos=False, eos=False) for text in TEXTS]
    assert [encoding.ids for encoding in ours.encodings(TEXTS)] == expected
    assert ours.vocab_size == theirs.n_words
    assert [ours.token_of(number) for number in range(theirs.num_special_tokens)] == [
        theirs.id_to_piece(number) for number in range(theirs.num_special_tokens)
    ]
    assert (ours.end_of_document_id, ours.token_id(ours.begin_of_document)) == (theirs.eos_id, theirs.bos_id)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/tekken.json").symlink_to(file)
    library = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert library(TEXTS, add_special_tokens=False)["input_ids"] == expected
    ours.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(TEXTS, add_special_tokens=False)["input_ids"] == expected
    assert Tokenizer.load(tmp_path / "folder").digest == Tokenizer.load(tmp_path / "saved").digest == ours.digest


def ranks(name: str) -> dict[bytes, int]:
    """Ranks of the size of an encoding: those of tekken, as the encoding's own file is not here."""
    import mistral_common

    file = Path(mistral_common.__file__).parent / "data/tekken_240911.json"
    vocabulary = [base64.b64decode(row["token_bytes"]) for row in json.loads(file.read_text())["vocab"]]
    size = {"r50k_base": 50256, "p50k_base": 50280, "cl100k_base": 100256, "o200k_base": 130000}[name]
    tokens = vocabulary[:size]
    found = {token: rank for rank, token in enumerate(tokens)}
    if name == "p50k_base":  # which has a gap for <|endoftext|>
        found = {token: rank + (rank >= 50256) for token, rank in found.items()}
    return found


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_encodings_of_tiktoken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern, the special tokens and the digest are those of tiktoken's registry."""
    import tiktoken
    import tiktoken_ext.openai_public as registry

    vocabulary = ranks(name)
    digests: list[str] = []

    def load(_url: str, expected_hash: str) -> dict[bytes, int]:
        digests.append(expected_hash)
        return vocabulary

    monkeypatch.setattr(registry, "load_tiktoken_bpe", load)
    described = getattr(registry, name)()
    theirs = tiktoken.Encoding(**{**described, "explicit_n_vocab": None})
    file = tmp_path / f"{name}.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in vocabulary.items()))
    known = ranked_vocabularies._TIKTOKEN[digests[0]]
    assert known[1] == described["special_tokens"]
    monkeypatch.setitem(ranked_vocabularies._TIKTOKEN, hashlib.sha256(file.read_bytes()).hexdigest(), known)
    ours = Tokenizer.load(file)
    assert [encoding.ids for encoding in ours.encodings(TEXTS)] == [theirs.encode_ordinary(text) for text in TEXTS]
    text = "".join(f"a{token}" for token in described["special_tokens"])
    assert ours.encode(text).tolist() == theirs.encode(text, allowed_special="all")
    assert ours.end_of_document_id == theirs.eot_token


@pytest.mark.parametrize("place", ["file", "folder"])
def test_llama_3_is_that_of_llama_models(place: str, tmp_path: Path) -> None:
    """Meta's own file and program. It names reserved ids otherwise since it has `<|step_id|>` and `<|image|>`."""
    from llama_models.llama3 import tokenizer

    file = Path(tokenizer.__file__).with_name("tokenizer.model")
    theirs = tokenizer.Tokenizer(file)
    (tmp_path / "tokenizer.model").symlink_to(file)
    ours = Tokenizer.load(file if place == "file" else tmp_path)
    assert [encoding.ids for encoding in ours.encodings(TEXTS)] == [
        theirs.model.encode_ordinary(text) for text in TEXTS
    ]
    names = [name for name in theirs.special_tokens if not re.search("reserved|step_id|image", name)]
    assert [ours.token_id(name) for name in names] == [theirs.special_tokens[name] for name in names]
    assert (ours.vocab_size, ours.end_of_document_id) == (theirs.n_words, theirs.eos_id)
