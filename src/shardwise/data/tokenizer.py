"""Tokenizers: byte-level BPE trained on the data, or the user's own `tokenizer.json` or WordPiece `vocab.txt`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError, listing

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
PAIR_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""BERT's special tokens, in the order of their ids in a tokenizer that is trained here."""
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_VOCABULARY = "vocab.txt"
_VOCABULARY_SUFFIX = ".txt"
# What transformers may read beside tokenizer.json; `export` copies those that are there.
_COMPANIONS = (_CONFIG, _SPECIAL, "added_tokens.json", "chat_template.jinja")
# The ends of document of GPT-2 and NeoX, Llama 2, Llama 3 and BERT.
_KNOWN_ENDS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", "[SEP]")


@dataclass(frozen=True)
class PairTokens:
    """Ids of the special tokens that sentence pairs are made with."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class Tokenizer:
    """Text to token ids and back.

    Args:
        end_of_document: the token that closes a document.
        pair_names: what the tokenizer calls BERT's special tokens, by the keys of `PAIR_TOKENS`; None where unknown.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, end_of_document: str, pair_names: Mapping[str, str] | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        end = backend.token_to_id(end_of_document)
        assert end is not None
        self._backend = backend
        self.end_of_document = end_of_document
        self.end_of_document_id: int = end
        self.pair_names = pair_names
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Opens a `tokenizer.json`, a WordPiece `vocab.txt`, or a folder that holds one.

        Raises:
            DataError: when it is missing, unreadable or has no token that ends a document.
        """
        file = _tokenizer_file(Path(path))
        backend = _open_vocabulary(file) if file.suffix == _VOCABULARY_SUFFIX else _open_json(file)
        return cls(backend, _find_end(backend, file))

    def token_id(self, token: str) -> int | None:
        """The id of one token, None where the vocabulary lacks it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The ids of `text`, nothing added."""
        self._backend.encode_special_tokens = False
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to be continued: after what the tokenizer puts before a text, such as `<s>`.

        What it puts after a text is left out.
        """
        self._backend.encode_special_tokens = False
        plain = self._backend.encode(text, add_special_tokens=False).ids
        whole = self._backend.encode(text, add_special_tokens=True).ids
        starts = (at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain)
        return [*whole[: next(starts, 0)], *plain]

    def encode_batch(self, texts: list[str], *, literally: bool = False) -> list[list[int]]:
        """The ids of each text, nothing added, on all cores.

        `literally`: the name of a special token, such as "[SEP]", is text like any other.
        """
        self._backend.encode_special_tokens = literally
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of `ids`; ends of documents show."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes a folder that `transformers.AutoTokenizer.from_pretrained` loads."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_json(folder)
        _write_config(folder, self)

    def save_json(self, folder: Path) -> None:
        """Writes `tokenizer.json` alone."""
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    def pair_tokens(self) -> PairTokens:
        """The ids of BERT's special tokens, for a tokenizer that was trained or opened for sentence pairs."""
        assert self.pair_names is not None
        ids = {role: self.token_id(name) for role, name in self.pair_names.items()}
        return PairTokens(**{role: number for role, number in ids.items() if number is not None})


def train_tokenizer(texts: Iterable[str], vocab_size: int, name: str, *, pairs: bool = False) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens: special ones, 256 bytes, and merges learned from `texts`.

    The special tokens are the end of document or, for sentence pairs, BERT's: [PAD] is 0.

    Raises:
        DataError: when `texts` (called `name`) yield fewer, with the number that they reach.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    special = list(PAIR_TOKENS.values()) if pairs else [END_OF_DOCUMENT]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise DataError(
            f"model.vocab_size ({vocab_size}) must be at least {smallest} (256 bytes and {listing(special)}) where the "
            "tokenizer is trained on the data; data.tokenizer names your own"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    reached = backend.get_vocab_size(with_added_tokens=True)
    if reached != vocab_size:
        raise DataError(
            f"model.vocab_size ({vocab_size}) must be at most {reached}, the vocabulary that {name} has text for: "
            f"set model.vocab_size={reached} or lower, give more text, or name your own tokenizer by data.tokenizer"
        )
    if not pairs:
        return Tokenizer(backend, END_OF_DOCUMENT)
    sep, cls = PAIR_TOKENS["sep"], PAIR_TOKENS["cls"]
    backend.post_processor = processors.BertProcessing((sep, special.index(sep)), (cls, special.index(cls)))
    return Tokenizer(backend, sep, PAIR_TOKENS)


def open_user_tokenizer(path: str, vocab_size: int, *, pairs: bool = False) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, which must fit `model.vocab_size`.

    Raises:
        DataError: when it cannot be opened, has ids beyond the model's vocabulary, or lacks a token that sentence pairs
            need.
    """
    file = _tokenizer_file(_existing(path))
    tokenizer = Tokenizer.load(file)
    problems = []
    if tokenizer.vocab_size > vocab_size:
        problems.append(
            f"the vocabulary of data.tokenizer {path} ({tokenizer.vocab_size}) must be at most model.vocab_size "
            f"({vocab_size}): set model.vocab_size={tokenizer.vocab_size}"
        )
    if pairs:
        names = {role: (_named_tokens(file, f"{role}_token") or [usual])[0] for role, usual in PAIR_TOKENS.items()}
        missing = [name for name in names.values() if tokenizer.token_id(name) is None]
        if missing:
            problems.append(
                f"data.tokenizer {path} has no {listing(missing, 'or')}: model.family=bert needs "
                f"{listing(names.values())}; other names are read from a {_CONFIG} beside it"
            )
        tokenizer.pair_names = names
    if problems:
        raise DataError(problems)
    return tokenizer


def user_tokenizer_digest(path: str) -> str:
    """A digest of the files that `export_user_tokenizer` copies."""
    digest = hashlib.sha256()
    for file in _files(_existing(path)):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
        digest.update(hashlib.sha256(content).digest() + _target_name(file).encode())
    return digest.hexdigest()


def special_token_ids(folder: Path) -> dict[str, int | None]:
    """`bos_token_id` and `eos_token_id`, as a model's config.json names them; None where the tokenizer has none.

    Raises:
        DataError: as `Tokenizer.load`.
    """
    tokenizer = Tokenizer.load(folder)
    begins = [tokenizer.token_id(token) for token in _named_tokens(_tokenizer_file(folder), "bos_token")]
    return {"bos_token_id": begins[0] if begins else None, "eos_token_id": tokenizer.end_of_document_id}


def export_user_tokenizer(path: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Copies the user's tokenizer into `folder`, with the configuration that transformers needs where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in _files(_existing(path)):
        shutil.copyfile(file, folder / _target_name(file))
    if not (folder / "tokenizer.json").exists():
        tokenizer.save_json(folder)
    if not (folder / _CONFIG).exists():
        _write_config(folder, tokenizer)


def _write_config(folder: Path, tokenizer: Tokenizer) -> None:
    end, names = tokenizer.end_of_document, tokenizer.pair_names
    if names is None:
        special = {"bos_token": end, "eos_token": end}
    else:
        special = {f"{role}_token": name for role, name in names.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    for name, value in ((_CONFIG, config), (_SPECIAL, special)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(
            f"data.tokenizer ({path}) does not exist on this machine: name a tokenizer.json, a WordPiece vocab.txt or "
            "a folder that holds one, or leave it null to train one on the data"
        )
    return found


def _tokenizer_file(path: Path) -> Path:
    candidates = [path / "tokenizer.json", path / _VOCABULARY] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file():
            return file
    missing = (
        f"the folder {path} holds no tokenizer.json or {_VOCABULARY}" if path.is_dir() else f"{path} does not exist"
    )
    raise DataError(
        f"{missing}: a tokenizer is a tokenizer.json, a WordPiece {_VOCABULARY}, or a folder that holds one"
    )


def _files(path: Path) -> list[Path]:
    file = _tokenizer_file(path)
    own_folder = file.name in ("tokenizer.json", _VOCABULARY)
    companions = [file.parent / name for name in _COMPANIONS if own_folder and (file.parent / name).is_file()]
    return [file, *companions]


def _target_name(file: Path) -> str:
    if file.name in _COMPANIONS:
        return file.name
    return _VOCABULARY if file.suffix == _VOCABULARY_SUFFIX else "tokenizer.json"


def _open_json(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        raise DataError(f"{file} is not a tokenizer that Hugging Face tokenizers can read: {error}") from error


def _open_vocabulary(file: Path) -> tokenizers.Tokenizer:
    """WordPiece from one token a line, as BERT's: lower-casing unless a `tokenizer_config.json` beside it says not."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    try:
        lines = file.read_bytes().decode().removesuffix("\n").split("\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}, byte {error.start}, is not UTF-8: a WordPiece vocabulary has one token a line"
        ) from None
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        if token in vocabulary:
            raise DataError(
                f"{file}:{number + 1} repeats {token!r} of line {vocabulary[token] + 1}: ids would be unclear"
            )
        vocabulary[token] = number
    special = [token for token in PAIR_TOKENS.values() if token in vocabulary]
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=PAIR_TOKENS["unk"]))
    backend.add_special_tokens(special)
    options = _configured(file)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=options.get("do_lower_case", True),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    sep, cls = PAIR_TOKENS["sep"], PAIR_TOKENS["cls"]
    if {sep, cls} <= vocabulary.keys():
        backend.post_processor = processors.BertProcessing((sep, vocabulary[sep]), (cls, vocabulary[cls]))
    return backend


def _find_end(backend: tokenizers.Tokenizer, file: Path) -> str:
    for token in [*_named_tokens(file, "eos_token"), *_KNOWN_ENDS]:
        if backend.token_to_id(token) is not None:
            return token
    raise DataError(
        f"{file} has no token that ends a document (none of {', '.join(_KNOWN_ENDS)}): name one as eos_token in "
        f"a {_CONFIG} beside a tokenizer.json"
    )


def _named_tokens(file: Path, role: str) -> list[str]:
    """The tokens that the files beside a tokenizer give a role, such as `eos_token`."""
    found: list[str] = []
    for path in _files(file):
        if path.name not in (_CONFIG, _SPECIAL):
            continue
        token = _read_object(path).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        found += [token] if isinstance(token, str) else []
    return found


def _configured(file: Path) -> dict[str, Any]:
    """The `tokenizer_config.json` beside a tokenizer."""
    return next((_read_object(path) for path in _files(file) if path.name == _CONFIG), {})


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return values if isinstance(values, dict) else {}
