"""Long documents: whatever the tokenizer and the text, the ids are those of the library for the whole document."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from shardwise.config import DataConfig, config_from
from shardwise.data.formats.common import make_batches
from shardwise.data.open_data import prepare
from shardwise.data.prepare.from_text import TextJob, convert_text
from shardwise.data.reading import text_sources
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.reading.text_files import slices
from shardwise.data.reading.text_sources import cut_document
from shardwise.data.tokens import windows as windows_module
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.windows import TextWindow, encode_windows, text_windows
from tests.unit.data.prepare.jobs import Told
from tests.unit.data.tokens.test_tokenizer_files import TEXT, piece_model

# As GPT-4 splits text.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CORPUS = [
    *TEXT,
    "aaaa abab  baba    \n\n\n  \n x = [1, 2]\n    return x\n" * 20,
    "日本語中文字符 와한국어 " * 9,
    "12345 678",
]


def trained(model: object, trainer: object, normalizer: object = None, splitter: object = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    backend.train_from_iterator([line for text in CORPUS for line in text.split("\n")], trainer)
    backend.add_tokens([AddedToken("fox", lstrip=True, rstrip=True)])
    return Tokenizer(backend, "</s>")


def bpe(normalizer: object = None, splitter: object = None, *, letters: bool = True) -> Tokenizer:
    alphabet = [] if letters else pre_tokenizers.ByteLevel.alphabet()
    special = {"special_tokens": ["<unk>", "</s>"], "show_progress": False, "max_token_length": 12}
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, **special)
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, normalizer, splitter)


def unigram(splitter: object) -> Tokenizer:
    special = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>", "show_progress": False}
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return trained(models.Unigram(), trainers.UnigramTrainer(vocab_size=300, **special), normalizer, splitter)


def word_piece() -> Tokenizer:
    special = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}
    trainer = trainers.WordPieceTrainer(vocab_size=400, **special)
    model = models.WordPiece(unk_token="<unk>")
    return trained(model, trainer, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())


def as_gpt4() -> Tokenizer:
    steps = [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return bpe(normalizers.NFC(), pre_tokenizers.Sequence(steps), letters=False)


def as_llama2() -> Tokenizer:
    return bpe(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt4": as_gpt4,
    "llama2": as_llama2,
    "llama2, newer": lambda: bpe(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "gemma": lambda: bpe(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "tokens of several words": lambda: bpe(None, pre_tokenizers.ByteLevel(use_regex=False), letters=False),
    "t5": lambda: unigram(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])),
    "unigram of the whole text": lambda: unigram(pre_tokenizers.Metaspace(split=False)),
    "bert": word_piece,
    "five letters": lambda: bpe(None, pre_tokenizers.FixedLength(5)),
}
BOUNDED = ("gpt4", "llama2", "llama2, newer", "gemma", "tokens of several words", "t5", "bert")
tokenizer_of = cache(lambda kind: KINDS[kind]())


def documents(size: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(0)

    def drawn(parts: list[str] | str, length: int) -> str:
        return "".join(draw.choices(parts, k=size // length))

    words = drawn(["the quick ", "brown fox ", "jumps over. ", "return x\n"], 10)
    yield "words", words
    yield "letters without spaces", drawn("abcdefgh", 1)
    yield "one letter", "a" * size
    yield "spaces", words[: size // 4] + " " * (size // 2) + "\n" + words[: size // 4]
    yield "spaces at the cuts alone", ("x" * 590 + " " * 20) * (size // 610)
    yield "lines", drawn(["\n", "\n\n", "\n\n\n", " ", "  ", "word", "=="], 2)
    yield "line ends", "===" + "\n" * (size // 2) + "  \n" + "\n" * (size // 2)
    yield "emoji", drawn(["👩‍👩‍👧‍👦", "🇨🇭", "🦊", "e\u0301", " ", "\u200d"], 3)
    yield "chinese", drawn("日本語中文字符와한국어。、", 1)
    yield "marks", "a" + "\u0301\u0323" * (size // 2)
    yield "digits", drawn("0123456789", 1)
    yield "names of tokens", words[: size // 2] + "</s>" * (size // 8) + words[: size // 4]
    yield (
        "all kinds",
        drawn(["word ", "a", "  ", "\n", "日本", "12", "'s", "don't ", "🦊", "▁", "\u3000", "</s>", "fox"], 3),
    )


def windows_of(text: str, tokenizer: Tokenizer) -> list[TextWindow]:
    pieces = ((0, piece) for piece in cut_document(slices(text)))
    return [window for _, window in text_windows(pieces, tokenizer)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "PIECE_CHARACTERS", 600)
    monkeypatch.setattr(windows_module, "MARGINS", (120, 250))
    monkeypatch.setattr(windows_module, "SHIFT", 31)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_11_a_long_document_has_the_tokens_of_the_whole(kind: str, small: None) -> None:
    tokenizer = tokenizer_of(kind)
    for name, text in documents(3000):
        cut = windows_of(text, tokenizer)
        assert "".join(window.text[window.context :] for window in cut) == text, name
        assert sum(window.characters for window in cut) == len(text), name
        assert [window.ends_document for window in cut] == [False] * (len(cut) - 1) + [True], name
        ids, sizes = encode_windows(cut, tokenizer)
        assert ids.tolist() == tokenizer.encode(text).tolist(), name
        assert len(sizes) == len(cut), name
        if name == "words" and kind in BOUNDED:
            assert max(window.characters for window in cut) < 1200, "memory stays bounded"


def test_fault_11_the_text_of_a_part_is_encoded_by_itself(small: None) -> None:
    """A document whose end is held out is two texts."""
    tokenizer = tokenizer_of("llama2")
    pieces = list(cut_document(slices(next(iter(documents(3000)))[1])))
    parts = [("train" if number < 2 else "eval", piece) for number, piece in enumerate(pieces)]
    found = list(text_windows(parts, tokenizer))
    for part in ("train", "eval"):
        text = "".join(piece.text for name, piece in parts if name == part)
        ids, _ = encode_windows([window for name, window in found if name == part], tokenizer)
        assert ids.tolist() == tokenizer.encode(text).tolist()
    assert [window.ends_document for _, window in found][-1:] == [True]
    assert sum(window.ends_document for _, window in found) == 1


@pytest.mark.parametrize("way", ["cache", "stream", "megatron"])
def test_fault_11_every_way_to_tokens_gives_those_of_sentencepiece(
    way: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("shardwise.data.tokens.encoding._BATCH_CHARACTERS", 1000)
    monkeypatch.setattr("shardwise.data.prepare.tokenizing.BATCH_CHARACTERS", 1000)
    folder, text = piece_model(tmp_path / "own"), "alpha beta gamma delta. " * 200
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    expected = [*reference.encode(text), reference.eos_id()]
    (tmp_path / "a.txt").write_text(text)
    named = {"path": str(tmp_path / "a.txt"), "tokenizer": str(folder), "split": "1,0"}
    if way in ("cache", "stream"):
        keys = {"streaming": way == "stream", **named}
        model = {"family": "llama", "vocab_size": 380, "hidden_size": 64, "intermediate_size": 176,
                 "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
        config = config_from({
            "model": model, "optimizer": {"lr": 1e-3}, "data": keys,
            "train": {"steps": 1, "global_batch": 1, "sequence_length": 16, "eval_every": 0},
        })  # fmt: skip
        data = prepare(config)
        assert data.tokens["train"].tolist() == expected
        if way == "stream":
            stream = make_batches(config, data, "train")._stream
            assert stream._tokens([list(cut_document(slices(text)))] * 2).tolist() == expected * 2
        return
    options = {"append_eod": True, "split_sentences": False}
    job = TextJob(DataConfig(path=named["path"]), tmp_path / "made", str(folder), options)
    convert_text(job, force=False, announce=lambda _line: None, bar=Told().bar)
    assert IndexedFile.open(tmp_path / "made").tokens.tolist() == expected


def test_fault_11_pieces_of_the_real_size() -> None:
    tokenizer, text = tokenizer_of("llama2"), "alpha beta gamma delta. " * 12_500
    cut = windows_of(text, tokenizer)
    assert len(cut) == 2
    assert np.array_equal(encode_windows(cut, tokenizer)[0], tokenizer.encode(text))
