"""The files that published tokenizers come in: the ids are those of the library that each was made for."""

import base64
import hashlib
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
import yaml
from tokenizers import models, normalizers, trainers

from shardwise.base.errors import DataError
from shardwise.data.open_data import prepare_data
from shardwise.data.tokens import ranked_vocabularies
from shardwise.data.tokens import tokenizer as tokenizer_module
from shardwise.data.tokens.tokenizer import Tokenizer, open_user_tokenizer, train_tokenizer
from shardwise.data.tokens.tokenizer_files import END_OF_DOCUMENT
from tests.unit.data.small_runs import config

SHARED = Path(__file__).resolve().parents[5] / "shared/data"
TEXT = ["The quick brown fox jumps over the lazy dog.\n" * 3, "def quick(fox):\n    return fox.jumps(over='dog')\n" * 2]
STRANGE = [
    "tabs\tand  spaces\r\n\n\n日本語 🦊 \x00 naïve café — “quotes” 12345\n",
    " leading and trailing  ",
    "   ",
    "\t\n\r\x0b\x0c\x1b[0m\x7f\x85\u2028",
    "👩‍👩‍👧‍👦 🇨🇭 e\u0301 ﬁ ½ Ⅷ \ufeff",
    "中文字符和한국어와 العربية",
    "a▁b ▁ ▁▁",
    "aaaaaaa abababa banana     bananas",
    "",
]


# A part of `tokenizer.json` at which the library panics when it reads it.
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": ""}
NO_WORDS = {"type": "WordLevel", "vocab": {}, "unk_token": "a"}
# An expression that tries more ways through a text than the library allows.
ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$b"}, "behavior": "Isolated", "invert": False}


def tokenizer_json(**parts: object) -> str:
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    vocabulary = {"a": 0, "b": 1, END_OF_DOCUMENT: 2}
    plain = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}, "added_tokens": []}
    return json.dumps({"version": "1.0"} | dict.fromkeys(names) | plain | parts)


def gpt2_files(folder: Path, prefix: str = "") -> Path:
    """`vocab.json` and `merges.txt` of a byte-level BPE that is trained here."""
    train_tokenizer(TEXT, 300, "text").save(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / f"{prefix}vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / f"{prefix}merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def piece_model(folder: Path, **options: object) -> Path:
    """A SentencePiece model as Llama's, of few tokens."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {
        "vocab_size": 380, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "character_coverage": 0.999, "allow_whitespace_only_pieces": True,
        "minloglevel": 2, "num_threads": 1, "split_digits": True, **options,
    }  # fmt: skip
    with (folder / "tokenizer.model").open("wb") as file:
        texts = iter([line for text in [*TEXT, "aaaa aaaaa ababab bananas\n" * 9] for line in text.split("\n")])
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=file, **chosen)
    return folder


def reference_of(folder: Path) -> Any:
    """The model as its own library reads it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def same_as(tokenizer: Tokenizer, reference: Callable[[str], Sequence[int]], texts: Sequence[str] = STRANGE) -> None:
    for text in (*TEXT, *texts):
        assert tokenizer.encode(text).tolist() == list(reference(text)), text[:80]


def exported(path: Path, folder: Path) -> Any:
    """What transformers opens of an export; our own reading of it is checked too."""
    transformers = pytest.importorskip("transformers")
    tokenizer = open_user_tokenizer(str(path), 1 << 20)
    tokenizer_module.export_user_tokenizer(str(path), tokenizer, folder)
    theirs, again = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in (*TEXT, *STRANGE):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text
        assert again.encode(text).tolist() == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == tokenizer.decode(ids)
    assert theirs.eos_token_id == tokenizer.end_of_document_id == again.end_of_document_id
    assert theirs("fox")["input_ids"] == tokenizer.encode_prompt("fox")
    return theirs


def test_gpt2_files(tmp_path: Path) -> None:
    folder, trained = gpt2_files(tmp_path / "own"), train_tokenizer(TEXT, 300, "text")
    for path in (folder, folder / "vocab.json", folder / "merges.txt"):
        tokenizer = open_user_tokenizer(str(path), 300)
        assert (tokenizer.end_of_document, tokenizer.vocab_size) == (END_OF_DOCUMENT, 300)
        same_as(tokenizer, lambda text: trained.encode(text).tolist())
        assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in STRANGE)
        assert tokenizer.encode(f"a{END_OF_DOCUMENT}").tolist()[-1] == tokenizer.end_of_document_id
    assert exported(folder, tmp_path / "export").bos_token == END_OF_DOCUMENT
    kept = {file.name for file in (tmp_path / "export").iterdir()}
    assert {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"} <= kept
    # A changed file is another tokenizer.
    before = tokenizer_module.user_tokenizer_digest(str(folder))
    merges = (folder / "merges.txt").read_text(encoding="utf-8")
    (folder / "merges.txt").write_text(merges.replace("#version: 0.2\n", ""), encoding="utf-8")
    assert tokenizer_module.user_tokenizer_digest(str(folder)) != before
    assert tokenizer_module.user_tokenizer_digest(str(folder / "vocab.json")) == tokenizer_module.user_tokenizer_digest(
        str(folder)
    )


def test_files_of_another_name(tmp_path: Path) -> None:
    """As Megatron-LM's guides call them; what lies beside them is not theirs."""
    folder = gpt2_files(tmp_path / "own", "gpt2-")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "fox"}')
    tokenizer = open_user_tokenizer(str(folder / "gpt2-vocab.json"), 300)
    assert tokenizer.end_of_document == END_OF_DOCUMENT
    tokenizer_module.export_user_tokenizer(str(folder / "gpt2-merges.txt"), tokenizer, tmp_path / "export")
    assert (tmp_path / "export/vocab.json").read_bytes() == (folder / "gpt2-vocab.json").read_bytes()
    assert Tokenizer.load(tmp_path / "export").encode("fox").tolist() == tokenizer.encode("fox").tolist()
    assert tokenizer_module.user_tokenizer_digest(str(folder)) == tokenizer_module.user_tokenizer_digest(
        str(folder / "gpt2-vocab.json")
    )
    assert Tokenizer.load(folder).end_of_document == END_OF_DOCUMENT, "the folder is read otherwise than its files"
    (folder / "gpt2-merges.txt").unlink()
    with pytest.raises(DataError, match=r"must hold a tokenizer, which is .*: it has gpt2-vocab\.json"):
        Tokenizer.load(folder)


BROKEN = (
    ("vocab.json", '{"a": "b"}', r"vocab\.json must hold tokens and their ids, such as"),
    ("vocab.json", '{"a": 1, "b": 1}', r"vocab\.json gives one id to two tokens"),
    ("vocab.json", '{"a": 0, "b": 1}', r"vocab\.json lacks 254 of the 256 bytes"),
    ("tokenizer_config.json", '{"tokenizer_class": "Qwen2TokenizerFast"}', "is a Qwen2Tokenizer's, which splits"),
    ("tokenizer.json", tokenizer_json(normalizer=CHARSMAP), "is not a tokenizer that Hugging Face tokenizers can"),
    ("tokenizer.json", tokenizer_json(model=NO_WORDS), "must have tokens, and its vocabulary is empty"),
    ("merges.txt", "a \udcff\n", r"merges\.txt must be UTF-8, and byte 2 is not: copy it again"),
)


@pytest.mark.parametrize(("name", "content", "text"), BROKEN)
def test_broken_files(name: str, content: str, text: str, tmp_path: Path) -> None:
    folder = gpt2_files(tmp_path / "own")
    (folder / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match=text):
        open_user_tokenizer(str(folder), 1000)


def test_an_expression_at_which_the_library_panics(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(pre_tokenizer=ENDLESS), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("b").tolist() == [1]
    text = 40 * "a"
    for encode in (tokenizer.encode, tokenizer.encode_prompt, lambda text: tokenizer.encode_rows([text])):
        with pytest.raises(DataError, match=r"tokenizer\.json is not .* can apply to a text: .*retry-limit"):
            encode(text)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = gpt2_files(tmp_path / "own")
    (tmp_path / "empty").mkdir()

    def expect(path: Path, told: str) -> None:
        with pytest.raises(DataError, match=told):
            open_user_tokenizer(str(path), 300)

    (folder / "merges.txt").unlink()
    expect(folder, r"must hold a tokenizer, which is .*: it has vocab\.json")
    expect(folder / "vocab.json", r"vocab\.json must have merges\.txt beside it")
    (folder / "vocab.json").rename(folder / "other.bin")
    expect(folder, r"own must hold a tokenizer, which is .*: it has other\.bin")
    expect(tmp_path / "empty", "it is empty")
    expect(folder / "vocab.json", r"data\.tokenizer \(.*/own/vocab\.json\) must be a tokenizer's file or ")
    with pytest.raises(DataError, match=r"nothing does not exist: a tokenizer is .*, or a folder that holds one"):
        Tokenizer.load(tmp_path / "nothing")


def test_sentencepiece(tmp_path: Path) -> None:
    folder = piece_model(tmp_path / "own")
    reference = reference_of(folder)
    for path in (folder, folder / "tokenizer.model"):
        tokenizer = open_user_tokenizer(str(path), 380)
        assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (380, reference.eos_id())
        assert tokenizer.encode_prompt("fox") == [reference.bos_id(), *reference.encode("fox")]
        same_as(tokenizer, reference.encode)
        for text in (*TEXT, *STRANGE):
            assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")
    same_as(Tokenizer.load(folder), reference.encode, ["an <unk> in a text"])
    # On any text: few letters make many ways to the same piece, and every text has all of them.
    draw = random.Random(0)
    for letters in ("ab", "a b", "ban ", "thequickfox \n", " ▁", "a\x00é🦊 "):
        same_as(tokenizer, reference.encode, ["".join(draw.choices(letters, k=1 + i % 60)) for i in range(400)])
    theirs = exported(folder, tmp_path / "export")
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert tokenizer_module.special_token_ids(tmp_path / "export") == {"bos_token_id": 1, "eos_token_id": 2}
    assert (tmp_path / "export/tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


BY_TRANSFORMERS = r"write its tokenizer\.json by transformers 5\.24 or newer"
BY_SENTENCEPIECE = r"cut the texts by sentencepiece, and give the tokens as data\.path"  # transformers reads otherwise


def test_other_models_are_refused(tmp_path: Path) -> None:
    for options, text, way in (
        ({"model_type": "unigram"}, "it is no BPE", BY_TRANSFORMERS),
        ({"byte_fallback": False}, "it has no pieces for bytes", BY_TRANSFORMERS),
        ({"remove_extra_whitespaces": True}, "it drops spaces", BY_TRANSFORMERS),
        ({"treat_whitespace_as_suffix": True}, "it marks the ends of words", BY_SENTENCEPIECE),
    ):
        folder = piece_model(tmp_path / "own", **{"vocab_size": 350, "hard_vocab_limit": False, **options})
        with pytest.raises(DataError, match=rf"must be a model such as Llama's, and {text}: {way}"):
            Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "cl100k_base.tiktoken"])
def test_a_vocabulary_of_tiktoken_is_told_what_to_take(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"IQ== 0\nIg== 1\nICB0aGU= 2\n")
    said = rf"{name} is a vocabulary of tiktoken, .*: take the tokenizer\.json of a model with that encoding, which the"
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path / name)


def test_no_sentencepiece_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencepiece")
    for content in (b"", b"\x00\xff nonsense"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.model is no SentencePiece model: copy it again, or take"):
            Tokenizer.load(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"not installed: pip install 'shardwise\[sentencepiece\]'"):
        Tokenizer.load(tmp_path)


def published(name: str) -> Path:
    folder = SHARED / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"needs the tokenizers in {folder.parent}")
    return folder


def wikitext() -> list[str]:
    text = (SHARED / "text/wikitext-2-valid.txt").read_text(encoding="utf-8")[:200_000]
    return [text, *text.split("\n")[:200]]


def test_the_published_bert(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = published("bert-large-uncased")
    reference = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer = open_user_tokenizer(str(folder), 30522, pairs=True)
    same_as(tokenizer, lambda text: reference(text, add_special_tokens=False)["input_ids"], [*STRANGE, *wikitext()])
    tokenizer_module.export_user_tokenizer(str(folder), tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    same_as(tokenizer, lambda text: theirs(text, add_special_tokens=False)["input_ids"])


def test_bytes_of_ids_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    """Special tokens have none; a piece of SentencePiece may be one byte, and a space is put before the text."""
    byte_level = train_tokenizer(TEXT, 300, "text")
    pieces = Tokenizer.load(piece_model(tmp_path / "pieces"))
    for text in STRANGE:
        assert byte_level.byte_counts()[byte_level.encode(text)].sum() == len(text.encode())
        plain = text.replace("▁", "")
        if plain:
            assert pieces.byte_counts()[pieces.encode(plain)].sum() == len(plain.encode()) + 1
    assert byte_level.byte_counts()[byte_level.required_end()] == 0


def fast_tokenizer(folder: Path, **files: object) -> tuple[Path, int]:
    """A folder with a `tokenizer.json` and these files beside it, and the size of the vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = {"special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=100, initial_alphabet=list("<>[]|/_PADXx"), **special)
    backend.train_from_iterator([line for text in TEXT for line in text.split("\n")], trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder, 100


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
NAMED = "the <x> fox<PAD>over <|im_end|> a<two>  <two>b <x><x> dog</s> <image>"
BESIDE = yaml.safe_load(Path(__file__).with_name("files_beside.yaml").read_text(encoding="utf-8"))
ADDED = BESIDE["added"]
CHECKPOINTS = BESIDE["checkpoints"]
CONTRADICTIONS = BESIDE["contradictions"]


@pytest.mark.parametrize("files", ADDED)
def test_fault_12_files_beside_a_tokenizer_add_what_transformers_adds(files: dict[str, Any], tmp_path: Path) -> None:
    folder, size = fast_tokenizer(tmp_path / "own", **files)
    tokenizer = open_user_tokenizer(str(folder), 1 << 20)
    tokenizer_module.export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    assert tokenizer.vocab_size >= size
    for place in (folder, tmp_path / "export"):
        theirs = transformers.AutoTokenizer.from_pretrained(place)
        assert theirs(NAMED, add_special_tokens=False)["input_ids"] == tokenizer.encode(NAMED).tolist()
        assert Tokenizer.load(place).encode(NAMED).tolist() == tokenizer.encode(NAMED).tolist()
        assert Tokenizer.load(place).digest == tokenizer.digest
        assert len(theirs) == tokenizer.vocab_size
        assert theirs.eos_token_id in (None, tokenizer.end_of_document_id)


@pytest.mark.parametrize(("files", "model"), CHECKPOINTS)
def test_fault_12_a_checkpoint_has_the_ids_of_the_training(files: dict[str, Any], model: str, tmp_path: Path) -> None:
    """Whatever class transformers has for the model."""
    folder, _ = fast_tokenizer(tmp_path / "own", **files)
    tokenizer = open_user_tokenizer(str(folder), 1 << 20)
    tokenizer_module.export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    (tmp_path / "export/config.json").write_text(json.dumps({"model_type": model}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs(NAMED, add_special_tokens=False)["input_ids"] == tokenizer.encode(NAMED).tolist()


def test_fault_12_a_vocabulary_has_the_tokens_beside_it(tmp_path: Path) -> None:
    folder = gpt2_files(tmp_path / "own")
    settings = {"tokenizer_class": "GPT2Tokenizer", "pad_token": "<PAD>", "eos_token": END_OF_DOCUMENT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_user_tokenizer(str(folder), 301)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("fox<PAD>")["input_ids"] == tokenizer.encode("fox<PAD>").tolist()
    assert exported(folder, tmp_path / "export").pad_token_id == 300
    pieces = piece_model(tmp_path / "pieces")
    (pieces / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}')
    assert Tokenizer.load(pieces).encode("a<unk>").tolist()[-1] == 0
    exported(pieces, tmp_path / "exported pieces")


@pytest.mark.parametrize(("files", "told"), CONTRADICTIONS)
def test_fault_12_files_that_contradict_the_vocabulary(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder, size = fast_tokenizer(tmp_path / "own", **files)
    with pytest.raises(DataError, match=told):
        open_user_tokenizer(str(folder), size)


def test_fault_15_bpe_dropout_is_off(tmp_path: Path) -> None:
    folder, size = fast_tokenizer(tmp_path / "own", tokenizer_config=FAST)
    plain = Tokenizer.load(folder).encode(TEXT[0]).tolist()
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = open_user_tokenizer(str(folder), size)
    assert tokenizer.encode(TEXT[0]).tolist() == plain
    assert tokenizer.note == "the tokenizer's BPE dropout (0.5) is off: a text always becomes the same tokens"
    tokenizer_module.export_user_tokenizer(str(folder), tokenizer, tmp_path / "export")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "export")(TEXT[0])["input_ids"] == plain
    assert Tokenizer.load(tmp_path / "export").note is None
    (tmp_path / "a.txt").write_text(TEXT[0])
    chosen = config(size, 8, path=str(tmp_path / "a.txt"), tokenizer=str(folder), split="1,0")
    told: list[str] = []
    for _ in range(2):
        prepare_data(chosen, tmp_path / "cache", announce=told.append)
    assert [line for line in told if "BPE dropout" in line] == [tokenizer.note]


TOKENS = [bytes([byte]) for byte in range(256)] + [
    token.encode() for token in ("th", "he", "the", " t", " the", "ab", "bc", "abc", "cab", "é", "日", "\n\n", "  ")
]
PATTERN = r"\p{N}| ?\p{L}+|\s+"
TEXTS = ["the cab abcab\n\nthe 日é  x", "", "abcabc bcab", "12 the", "\x00ÿ"]


def by_rank(text: str) -> list[int]:
    """The ids as tiktoken finds them: the neighbours whose union has the lowest rank are joined first."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    ids = []
    for piece in re.findall(r"[0-9]| ?[^\W\d_]+|\s+|[^\w\s]+", text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while not (piece.encode() in ranks and len(parts) == 1):
            pairs = [(ranks.get(left + right, 9_999), at) for at, (left, right) in enumerate(zip(parts, parts[1:]))]  # noqa: B905, RUF007
            rank, at = min(pairs, default=(9_999, 0))
            if piece.encode() in ranks:
                parts = [piece.encode()]
            elif rank == 9_999:
                break
            else:
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def tekken(path: Path, **changes: object) -> Path:
    described = {
        "config": {"pattern": PATTERN, "default_vocab_size": 12 + len(TOKENS) - 2, "default_num_special_tokens": 12},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(t).decode()} for rank, t in enumerate(TOKENS)],
        "special_tokens": [{"rank": n, "token_str": name} for n, name in enumerate(("<unk>", "<s>", "</s>"))],
    }
    path.write_text(json.dumps({**described, **changes}))
    return path


def test_tekken(tmp_path: Path) -> None:
    """The file may have more tokens than the vocabulary, and fewer special tokens."""
    tokenizer = Tokenizer.load(tekken(tmp_path / "tekken_1.json"))
    expected = [[12 + number for number in by_rank(text.replace("\n\n", "").replace("  ", " "))] for text in TEXTS]
    texts = [text.replace("\n\n", "").replace("  ", " ") for text in TEXTS]
    assert [encoding.ids for encoding in tokenizer.encodings(texts)] == expected
    assert (tokenizer.vocab_size, tokenizer.token_of(11), tokenizer.end_of_document_id) == (279, "<SPECIAL_11>", 2)
    assert tokenizer.begin_of_document == "<s>"
    tekken(tmp_path / "tekken.json")
    kept = tokenizer_module.keep_user_tokenizer(str(tmp_path), 279, tmp_path / "kept", None)
    assert Tokenizer.load(tmp_path / "kept").digest == kept.digest == tokenizer.digest
    assert json.loads((tmp_path / "kept/special_tokens_map.json").read_text())["bos_token"] == "<s>"
    unlisted = Tokenizer.load(tekken(tmp_path / "tekken_2.json", special_tokens=None, config={"pattern": PATTERN}))
    assert (unlisted.token_of(3), unlisted.token_of(19), unlisted.vocab_size) == ("[INST]", "[TOOL_CONTENT]", 289)


@pytest.mark.parametrize("changes", [{"vocab": [{"token_bytes": "?"}]}, {"config": {}}, {"vocab": 5}])
def test_no_tekken(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tekken\.json is no tekken\.json of Mistral \(.*\): copy it again"):
        Tokenizer.load(tekken(tmp_path / "tekken.json", **changes))


@pytest.mark.parametrize("name", ["a.tiktoken", "tokenizer.model"])
def test_a_known_vocabulary_of_tiktoken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens keep their ids, with gaps before and between them."""
    content = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS))
    (tmp_path / name).write_bytes(content)
    special = {"<|endoftext|>": 270, "<|endofprompt|>": 290}
    monkeypatch.setitem(ranked_vocabularies._TIKTOKEN, hashlib.sha256(content).hexdigest(), (PATTERN, special))
    tokenizer = Tokenizer.load(tmp_path / name)
    assert [encoding.ids for encoding in tokenizer.encodings(TEXTS)] == [by_rank(text) for text in TEXTS]
    assert tokenizer.encode("the<|endofprompt|>").tolist() == [258, 290]
    assert (tokenizer.end_of_document_id, tokenizer.vocab_size) == (270, 291)
